"""Engines as processes: killed, stopped, hanging, and given new weights while they work. No request
is lost, no token is of weights that nobody has written, and the same request gives the same tokens
wherever it ends up."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import threading
import time

import pytest
import torch
from engine_process import EngineProcesses
from served_run import PROMPT, Run, names, until, wait_for
from slow import soak

from agentevo.cli.main import main
from agentevo.config import EngineSection
from agentevo.errors import ConfigError, EngineError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.inference.serving.address import EngineAddress
from agentevo.inference.serving.directory import Announcement
from agentevo.inference.serving.remote import RemoteEngine
from agentevo.inference.serving.secret import RunSecret
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.runs.processes.serve import VersionFollower, serve
from agentevo.types import Completion, SamplingParams

STEP_S = 0.01
"""How much longer each step of an engine takes: nothing ends before the test has done what it does
in the middle."""


@pytest.fixture
def engines(run):
    with EngineProcesses(run.folder) as found:
        yield found


LONG = [SamplingParams(max_new_tokens=100, seed=seed) for seed in range(4)]
SHORT = SamplingParams(max_new_tokens=4, seed=9)


@pytest.mark.slow
def test_it_waits_for_the_first_weights_and_ends_cleanly(small_config, tmp_path):
    run = Run(small_config(tmp_path / "run", "rollout.poll_s=0.02", "engine.kv_cache_gb=0.1"))
    with EngineProcesses(run.folder) as engines:
        process = engines.start("early")
        wait_for(lambda: bool(engines.log("early")), "the engine has started")
        assert "waiting for the first weights" in engines.log("early")[0]

        time.sleep(0.2)
        assert names(run) == []

        run.write(7)
        wait_for(lambda: names(run) == ["early"], "it has announced itself")

        async def work():
            client = run.client()
            found = await client.generate(PROMPT, LONG[0], deadline_s=300)
            assert client.version == 7
            await client.close()
            return found

        found = asyncio.run(work())
        assert set(found.versions) == {7}
        assert found.ids == run.expected(7, LONG[:1])[0]

        engines.signal("early", signal.SIGTERM)
        process.join(300)
        assert process.exitcode == 0
        assert [path.name for path in (run.folder / "engines").iterdir()] == ["secret"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGSTOP, *soak(signal.SIGTERM)],
    ids=lambda number: number.name,
)
def test_an_engine_that_ends_in_the_middle_costs_time_only(number, run, engines):
    """Killed, hanging, or told to stop: its requests are answered by another one, with the tokens
    that it would have given."""
    for name in ("a", "b"):
        engines.start(name, step_s=STEP_S)

    wait_for(lambda: names(run) == ["a", "b"], "both are there")

    async def work():
        client = run.client(max_age_s=1.5)
        await client.refresh()
        tasks = [
            asyncio.create_task(client.generate(PROMPT, one, session=f"s{i}", deadline_s=300))
            for i, one in enumerate(LONG)
        ]
        await until(
            lambda: (
                client.stats().get("engine/running") == 4
                and client.stats()["engine/generated_tokens"] >= 20
            )
        )
        assert {one.open for one in client._known.values()} == {2}

        engines.signal("a", number)
        found = await asyncio.gather(*tasks)
        await until(lambda: client.stats()["engine/engines"] == 1)

        if number == signal.SIGSTOP:
            engines.signal(
                "a", signal.SIGCONT
            )  # it finds that nobody waits for its answers any more, and is there again
            await until(
                lambda: (
                    client.stats()["engine/engines"] == 2 and client.stats()["engine/running"] == 0
                )
            )

        await client.close()
        return found

    found = asyncio.run(work())
    assert [one.ids for one in found] == run.expected(0, LONG)
    assert all(one.versions == [0] * 100 for one in found)

    if number == signal.SIGTERM:
        wait_for(lambda: engines.processes["a"].exitcode == 0, "it has ended")
        assert names(run) == ["b"]


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["continue", "finish"])
def test_new_weights_come_while_it_works(in_flight, small_config, tmp_path):
    """A torn version is refused once and the old one serves on; a whole one is served, and requests
    under way go on or end first."""
    run = Run(
        small_config(
            tmp_path / "run",
            "rollout.poll_s=0.02",
            "engine.kv_cache_gb=0.1",
            "model.tiny.context_length=512",
            f"rollout.in_flight={in_flight}",
        )
    )
    run.write(0)
    with EngineProcesses(run.folder) as engines:
        engines.start("a", step_s=STEP_S)
        wait_for(lambda: names(run) == ["a"], "it is there")

        async def work():
            client = run.client()
            await client.refresh()

            staged = WeightsFolder(
                run.folder / "staged"
            )  # written elsewhere, torn, and moved into place: as a reader may find it
            changed = copy.deepcopy(run.model)
            staged.write(1, changed, keep=1)
            torn = staged.path(1) / "weights.safetensors"
            torn.write_bytes(torn.read_bytes()[:-7])
            staged.path(1).rename(run.weights.path(1))
            (run.folder / "staged" / "latest.json").rename(run.folder / "weights" / "latest.json")
            await until(lambda: client.stats()["engine/refused_publishes"] >= 1)
            assert client.version == 0

            tasks = [
                asyncio.create_task(client.generate(PROMPT, one, deadline_s=300)) for one in LONG
            ]
            await until(lambda: client.stats()["engine/generated_tokens"] >= 40)
            run.write(2)
            found = await asyncio.gather(*tasks)
            await until(lambda: client.version == 2)

            later = await client.generate(PROMPT, SHORT, deadline_s=300)
            run.write(1)  # a trainer that went back to a checkpoint
            await asyncio.sleep(0.3)
            await client.refresh()
            assert client.version == 2

            stats = client.stats()
            await client.close()
            return found, later, stats

        found, later, stats = asyncio.run(work())
        log = engines.log("a")

    assert later.versions == [2] * 4
    assert (stats["engine/publishes"], stats["engine/refused_publishes"]) == (2, 1)
    assert sum("is not what was written" in line for line in log) == 1, log

    if in_flight == "finish":
        assert [one.ids for one in found] == run.expected(0, LONG)
        assert all(one.versions == [0] * 100 for one in found)
    else:
        for one, params in zip(found, LONG, strict=True):
            assert one.versions == sorted(one.versions) and set(one.versions) == {0, 2}
            split = one.versions.index(2)
            for version, begin, end in ((0, 0, split), (2, split, 100)):
                wanted = run.logprobs(version, one.ids)[begin:end]
                assert torch.allclose(torch.tensor(one.logprobs[begin:end]), wanted, atol=1e-4), (
                    params.seed,
                    version,
                )


@pytest.mark.slow
def test_a_client_that_dies_or_gives_up_leaves_nothing_behind_and_sleep_goes_over_http(
    run, engines
):
    import httpx

    engines.start("a", step_s=STEP_S)
    wait_for(lambda: names(run) == ["a"], "it is there")
    (announcement,) = run.directory.living(5.0)

    async def work():
        client = run.client()
        await client.refresh()
        running = lambda: client.stats()["engine/running"]  # noqa: E731
        task = asyncio.create_task(
            client.generate(PROMPT, SamplingParams(max_new_tokens=500), deadline_s=300)
        )
        await until(lambda: running() == 1)
        task.cancel()
        await until(lambda: running() == 0)

        doomed = run.client()
        cut = asyncio.create_task(
            doomed.generate(PROMPT, SamplingParams(max_new_tokens=500), deadline_s=300)
        )
        await until(lambda: running() == 1)

        for one in doomed._known.values():
            one.connection.abandon("its process dies")

        await until(lambda: running() == 0)
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
        await doomed.close()

        task = asyncio.create_task(client.generate(PROMPT, LONG[0], deadline_s=300))
        await until(lambda: running() == 1 and client.stats()["engine/generated_tokens"] > 0)

        headers = RunSecret(run.folder / "engines").header()
        async with httpx.AsyncClient(
            base_url=announcement.url, trust_env=False, headers=headers
        ) as http:
            state = (await http.post("/sleep", content=b'{"in_flight": "continue"}')).json()
            assert (
                state["asleep"]
                and state["stats"]["engine/kv_tokens"] == 0
                and state["stats"]["engine/waiting"] == 1
            )

            await asyncio.sleep(0.2)
            assert (await http.get("/state")).json()["stats"]["engine/steps"] == state["stats"][
                "engine/steps"
            ]
            assert not (await http.post("/wake")).json()["asleep"]

        found = await task
        await client.close()
        return found

    assert asyncio.run(work()).ids == run.expected(0, LONG[:1])[0]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--name", "a/b"], "becomes the name of a file"),
        (["--port", "TAKEN"], "can't listen on 127.0.0.1"),
        (["trainer.group_size=1"], "trainer.group_size"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_created(
    words, problem, tmp_path, monkeypatch, capsys
):
    import socket

    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert (
            main(
                [
                    "serve",
                    "coins",
                    "run.dir=run",
                    *(port if word == "TAKEN" else word for word in words),
                ]
            )
            == 2
        )

    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "encrypts"),
    [({}, False), ({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "tls": False}, False)],
    ids=str,
)
def test_it_encrypts_where_other_machines_reach_it(given, encrypts, run):
    if encrypts:
        pytest.importorskip("cryptography")

    answers: list[object] = []

    async def ask(announced: Announcement) -> Completion:
        here = announced.url.rpartition(":")[2]
        url = f"{'https' if encrypts else 'http'}://127.0.0.1:{here}"
        address = EngineAddress(url, announced.certificate)
        secret = RunSecret(run.folder / "engines")
        client = RemoteEngine([address.pinned_url], secret=secret, poll_s=0.02)
        try:
            return await client.generate(PROMPT, SHORT, deadline_s=300)
        finally:
            await client.close()

    def meet() -> None:
        try:
            wait_for(lambda: names(run) == ["a"], "it is there")
            (announced,) = run.directory.living(60.0)
            answers.extend((announced, asyncio.run(ask(announced))))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # `serve` takes it as the word to stop

    lines: list[str] = []
    meeting = threading.Thread(target=meet)
    meeting.start()
    serve(run.config, name="a", note=lines.append, **given)
    meeting.join()

    announced, answer = answers
    assert announced.url.startswith("https://" if encrypts else "http://")
    assert bool(announced.certificate) == encrypts == (run.folder / "engines/tls.pem").exists()
    assert any(line.endswith(announced.address.pinned_url) for line in lines), lines
    assert [answer.ids] == run.expected(0, [SHORT])


@pytest.mark.slow
def test_an_engine_of_another_recipe_is_refused(run):
    config = run.config.model_copy(update={"run": run.config.run.model_copy(update={"seed": 99})})
    with pytest.raises(ConfigError, match=r"run\.seed=5 and not 99"):
        serve(config, name="stranger")
    assert names(run) == []


@pytest.mark.slow
def test_an_engine_ends_with_the_process_that_started_it(run, engines):
    process = engines.start(
        "orphan", parent=os.getpid()
    )  # its parent is the fork server, not this process
    process.join(300)
    assert process.exitcode == 0
    assert names(run) == []


@pytest.mark.slow
def test_a_name_is_refused_while_its_engine_lives_and_free_once_it_was_killed(
    run, engines, monkeypatch
):
    monkeypatch.setattr("agentevo.inference.serving.directory.ENDING_S", 0.2)
    first = engines.start("a")
    wait_for(lambda: names(run) == ["a"], "it is there")

    with pytest.raises(ConfigError, match="an engine named a is running: give another --name"):
        serve(run.config, name="a")
    assert [one.pid for one in run.directory.living(5.0)] == [first.pid]

    engines.signal("a", signal.SIGKILL)
    first.join(300)
    second = engines.start("a")
    wait_for(
        lambda: [one.pid for one in run.directory.living(60.0)] == [second.pid],
        "it has the name, and its announcement",
    )


@pytest.mark.slow
def test_an_engine_whose_steps_only_fail_ends_and_says_why(run, monkeypatch):
    """It would answer with errors, at once, and be asked all the more: three in a row, not three at
    all."""
    steps = []
    real = TorchEngine._step

    def step(engine):
        if not engine.scheduler.running and not engine.scheduler.waiting:
            return real(engine)  # which has nothing to do
        steps.append(len(steps))
        if steps[-1] in (1, 2) or steps[-1] > 10:
            raise RuntimeError("device-side assert triggered")
        return real(engine)

    monkeypatch.setattr(TorchEngine, "_step", step)
    answers: list[object] = []

    async def ask() -> None:
        client = run.client()
        for _ in range(7):  # 4 steps each
            answers.append(
                *await asyncio.gather(
                    client.generate(PROMPT, SHORT, deadline_s=300), return_exceptions=True
                )
            )

        await client.close()

    asking = threading.Thread(target=lambda: asyncio.run(ask()))
    asking.start()
    with pytest.raises(EngineError, match=r"3 steps in a row have failed.*device-side assert"):
        serve(run.config, name="a")

    asking.join()
    assert [isinstance(answer, Completion) for answer in answers] == [
        False,
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert all("device-side assert" in str(one) for one in answers[:2] + answers[4:6])
    assert names(run) == []


@pytest.mark.slow
def test_a_follower_that_breaks_ends_the_engine_and_says_why(run, monkeypatch):
    def broken(self):
        raise OSError("the disk is on fire")

    monkeypatch.setattr(WeightsFolder, "latest_version", broken)
    with pytest.raises(OSError, match="on fire"):
        serve(run.config, name="a")
    assert names(run) == []


class Watched(TorchEngine):
    """Counts how often weights are verified."""

    verified = 0

    def verify(self, weights):
        self.verified += 1
        return super().verify(weights)


@pytest.mark.slow
def test_refused_weights_are_tried_again_when_they_change_and_told_once(run):
    engine = Watched(copy.deepcopy(run.model))
    asyncio.run(engine.begin(-1))
    notes: list[str] = []
    follower = VersionFollower(run.weights, engine, "continue", deadline_s=300, note=notes.append)

    async def look(times: int = 1) -> list[bool]:
        return [await follower.look() for _ in range(times)]

    assert asyncio.run(look(3)) == [True, False, False]
    assert (engine.version, engine.verified) == (0, 1), "what is served already is not read again"

    unfit = copy.deepcopy(run.model)
    unfit.get_input_embeddings().weight.data.fill_(float("nan"))
    sha256 = run.weights.write(1, unfit, keep=3)

    assert asyncio.run(look(5)) == [False] * 5
    assert (engine.version, engine.verified) == (0, 2)
    assert (
        len(notes) == 2
        and "version 0 continues to serve: weights refused" in notes[1]
        and "NaN" in notes[1]
    )
    assert run.weights.write(1, unfit, keep=3) == sha256
    assert asyncio.run(look(3)) == [False] * 3
    assert engine.verified == 3, "they were written again, so they were looked at again"
    assert len(notes) == 2, "with the same outcome, of which nothing more is to be said"

    run.write(1)
    assert asyncio.run(look(2)) == [True, False]
    assert (engine.version, follower.stats()["engine/refused_publishes"]) == (1, 2)
    assert notes[2:] == ["serving version 1"]

    (run.folder / "weights" / "latest.json").write_text("{")
    assert asyncio.run(look(3)) == [False] * 3
    assert len(notes) == 4 and "latest.json can't be read" in notes[3]


@pytest.mark.slow
def test_refused_weights_are_tried_again_after_a_while_though_they_look_the_same(run, monkeypatch):
    """What failed may have been the reading: a disk or a network with a bad moment."""
    engine = TorchEngine(copy.deepcopy(run.model))
    asyncio.run(engine.begin(-1))
    follower = VersionFollower(
        run.weights, engine, "continue", deadline_s=300, note=lambda line: None
    )
    real = WeightsFolder.read

    def bad(self, version, **options):
        raise EngineError("a bad moment")

    monkeypatch.setattr(WeightsFolder, "read", bad)
    assert not asyncio.run(follower.look())

    monkeypatch.setattr(WeightsFolder, "read", real)
    assert not asyncio.run(follower.look()), "not at once"

    monkeypatch.setattr("agentevo.runs.processes.serve.AGAIN_S", 0.0)
    assert asyncio.run(follower.look())
    assert engine.version == 0


@pytest.mark.slow
def test_weights_that_can_not_be_swapped_in_yet_are_tried_again(run):
    engine = TorchEngine(copy.deepcopy(run.model), config=EngineSection(kv_cache_gb=0.1))
    run.write(1)
    notes: list[str] = []
    follower = VersionFollower(run.weights, engine, "finish", deadline_s=0.05, note=notes.append)

    async def work():
        long = asyncio.create_task(
            engine.generate(PROMPT, SamplingParams(max_new_tokens=480), deadline_s=300)
        )
        await until(lambda: engine.stats()["engine/generated_tokens"] > 0)
        assert not await follower.look() and not long.done()
        long.cancel()
        await until(lambda: engine.stats()["engine/running"] == 0)
        assert await follower.look()

    asyncio.run(work())
    assert engine.version == 1
    assert notes == [
        "publish: requests were still running after 0.05 s; the old weights keep serving",
        "serving version 1",
    ]
