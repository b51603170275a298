"""A program's own loop on one side, the model on the other: what the server refuses, answers that
are lost, servers that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_processes
from loop_client import SECTIONS, TASKS, native
from loop_server import URL, served

import agentevo
from agentevo.api.loop.client import Client
from agentevo.api.loop.records import ModelNotOpenError, SealError, UnknownAttemptError
from agentevo.api.loop.routes import MAX_BODY
from agentevo.api.loop.wire import WireFailure, error_of, failure_of
from agentevo.errors import (
    AgentEvoError,
    BadRequestError,
    ConfigError,
    DeadlineExceededError,
    EngineUnavailableError,
)
from agentevo.observability import read_metrics


@pytest.mark.slow
def test_whatever_answer_is_lost_trains_once(tmp_path):
    async def work():
        async with (
            served(tmp_path, loses=True) as (client, wire, _),
            client.open_model("mine", **SECTIONS) as model,
        ):
            for step in (1, 2):
                groups = await agentevo.gather(native.group(model, task, size=4) for task in TASKS)
                groups = [group.with_rewards([0.0, 0.2, 0.4, 0.9]) for group in groups]
                trained = await model.train(groups)
                assert (trained.step, model.step, trained.dropped) == (step, step, {})
                assert len({turn.seed for g in groups for t in g.trajectories for turn in t.turns})

            assert {"POST steps", "POST attempts", "POST generate", "POST end"} <= set(wire.lost)

            await client.close_model("mine")
            with pytest.raises(ConfigError, match="no attempt is trained on twice"):
                await model.train(groups[:1])  # the model is opened again, by its name

            assert (await model.refresh()).step == 2

    asyncio.run(work())
    run = agentevo.load_run(tmp_path / "mine")
    assert run.audit().ok
    assert len(run.trajectories(state="committed")) == 2 * len(TASKS) * 4
    assert all(len(trajectory.turns) == 1 for trajectory in run.trajectories())


@pytest.mark.slow
def test_what_the_server_refuses(tmp_path):
    async def work():
        async with served(tmp_path) as (client, _, _):
            http = client.http
            for key in ("", "Bearer x", f"Bearer {'0' * 64}"):
                answer = await http.get("/loop/v1/models", headers={"Authorization": key})
                assert answer.status_code == 401
            async with Client(client.base(), "0" * 64) as stranger:
                with pytest.raises(ConfigError, match="the key is missing or wrong"):
                    await stranger.models()
            assert await client.models() == []

            for name, sections, message in (
                ("-x", {}, "not a valid model name"),
                ("..", {}, "not a valid model name"),
                ("mine", {"import": ["./evil.py"]}, "runs no code"),
                ("mine", {"run": {"dir": "/tmp/x"}}, "keeps the run in its own folder"),
                ("mine", {"store": "sqlite:///x"}, "keeps the run"),
                ("mine", {"trainer": {"stepps": 1}}, "steps"),
                ("mine", {"model": "no-such-model"}, "no-such-model"),
            ):
                with pytest.raises(ConfigError, match=message):
                    await client.request(
                        "POST", f"/{name.replace('.', '%2E')}", {"sections": sections}, kind=dict
                    )

            with pytest.raises(ConfigError, match="not a valid model name"):
                async with client.open_model("a/b"):
                    pass
            assert not list(tmp_path.glob("m*"))
            with pytest.raises(ModelNotOpenError):
                await client.request("GET", "/mine", kind=dict)

            for content in (b"", b"{", b"[]", b'{"sections": 3}', b"\xff" * 9, b"[" * 9999):
                answer = await http.post("/loop/v1/models/mine", content=content)
                assert answer.status_code == 400, content

            long = await http.post("/loop/v1/models/mine", content=b" " * (MAX_BODY + 1))
            assert long.status_code == 413
            assert f"longer than {MAX_BODY} bytes" in long.text
            for answer in (
                await http.put("/loop/v1/models/mine"),
                await http.get("/loop/v1/models/mine/no/such/route"),
            ):
                assert answer.status_code in (404, 405)
                assert answer.json()["type"] == "BadRequestError"
            assert (await http.get("/health")).status_code == 200  # the gateway's own

    asyncio.run(work())


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a"),
        BadRequestError("b"),
        SealError("c"),
        UnknownAttemptError("d"),
        ModelNotOpenError("e"),
        DeadlineExceededError("f"),
        AgentEvoError("g"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_is_the_same_on_the_other_side(error):
    status, failure = failure_of(error)
    assert 400 <= status < 600
    again = error_of(WireFailure(type=failure.type, message=failure.message))
    assert (type(again), str(again)) == (type(error), str(error))


def test_a_client_says_what_is_wrong_with_its_words():
    with pytest.raises(ConfigError, match="this is not a key"):
        Client(URL, "secret")
    with pytest.raises(ConfigError, match="unencrypted"):
        Client("http://example.org:80", "0" * 64)

    async def nobody():
        async with Client(URL, "0" * 64, patience_s=0.2) as client:
            await client.models()

    with pytest.raises(EngineUnavailableError, match="does not answer"):
        asyncio.run(nobody())


# From here on in processes of their own.


def start_server(folder: Path, *options: str) -> tuple[subprocess.Popen, str, str]:
    """(process, URL, key) of a server whose working directory is `folder`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentevo", "serve", "--training", "models", *options],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    url = ""
    for line in process.stderr:
        if " at http" in line:
            url = line.split(" at ")[1].strip()
        if "the key is in" in line:
            break

    key = (folder / "models" / "gateway" / "secret").read_text().strip()
    return process, url, key


def start_client(folder: Path, url: str, key: str, until: int, kind: str) -> subprocess.Popen:
    folder.mkdir()
    program = Path(__file__).parents[2] / "support" / "loop_client.py"
    with warm_processes.cold_start():  # it has no torch
        return subprocess.Popen(
            [sys.executable, str(program), url, key, str(until), kind],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@pytest.mark.slow
def test_a_server_that_is_killed_goes_on_and_trains_on_nothing_twice(tmp_path):
    """Server and client share no folder. The server is killed under the client's hands;
    another client goes on."""
    here = tmp_path / "server"
    port = free_port()

    here.mkdir()
    server, url, key = start_server(here, "--port", port, "--tls")
    client = start_client(tmp_path / "client", url, key, 4, "native")
    steps = []
    try:
        for line in client.stdout:
            steps.append(json.loads(line))
            if len(steps) == 2:  # the step after it is under way by now
                time.sleep(0.2)
                server.send_signal(signal.SIGKILL)
                server.wait()
                server, again, _ = start_server(here, "--port", port, "--tls")
                assert again == url

        assert client.wait(300) == 0

        *steps, models = steps
        assert models == [["mine", True]]
        assert [step for step, _, _ in steps] == list(range(5))

        assert not any("stale" in reasons for _, _, reasons in steps)

        client = start_client(tmp_path / "another", url, key, 5, "client")
        lines = [json.loads(line) for line in client.stdout]

        assert client.wait(300) == 0
        assert [line[0] for line in lines[:-1]] == [4, 5]
        assert (tmp_path / "another" / "fetched" / "model.safetensors").is_file()

        server.send_signal(signal.SIGTERM)
        assert server.wait(300) == 0
    finally:
        for process in (server, client):
            process.kill()

    run = agentevo.load_run(here / "models" / "mine")
    audit = run.audit()
    assert audit.ok, audit
    assert audit.steps == 5

    committed = run.trajectories(state="committed")
    assert len({one.id for one in committed}) == len(committed) > 60


@pytest.mark.soak
def test_a_killed_server_makes_the_same_losses_of_several_agents(tmp_path):
    def losses(folder, killed):
        """Trains three steps; the server is killed after the second."""
        folder.mkdir()
        port = free_port()
        server, url, key = start_server(folder, "--port", port)
        client = start_client(folder / "client", url, key, 3, "agents")
        try:
            for number, _ in enumerate(client.stdout):
                if number == 2 and killed:
                    server.send_signal(signal.SIGKILL)
                    server.wait()
                    server, _, _ = start_server(folder, "--port", port)

            assert client.wait(300) == 0
            server.send_signal(signal.SIGTERM)
            assert server.wait(300) == 0
        finally:
            for process in (server, client):
                process.kill()

        run = agentevo.load_run(folder / "models" / "mine")
        assert run.audit().ok

        rows = [row for row in read_metrics(run.dir / "metrics.jsonl") if "actor/grad_norm" in row]
        keys = [key for key in rows[0] if key.endswith(("grad_norm", "pg_loss", "score/mean"))]
        assert {"actor/pg_loss", "agents/critic/actor/pg_loss"} <= set(keys)
        return [[row[key] for key in keys] for row in rows]

    assert losses(tmp_path / "killed", True) == losses(tmp_path / "whole", False)
