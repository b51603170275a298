"""Sandboxes on another machine: the client and the server of a WebSocket each, over loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

from agentevo.environments.sandbox import SandboxTool, open_sandbox, remote, wire
from agentevo.environments.sandbox.client import longest_message
from agentevo.environments.sandbox.open_sandbox import Sandboxes
from agentevo.environments.sandbox.section import SandboxSection
from agentevo.errors import SandboxError, ToolError
from agentevo.inference.serving.admission import AdmissionLimits, WebSocketProtocol
from agentevo.inference.serving.http_server import open_socket, serving, url_of
from agentevo.inference.serving.secret import RunSecret
from agentevo.runs.processes import sandbox_server
from agentevo.runs.processes.sandbox_server import SandboxServer

NONE = SandboxSection(type="none", timeout_s=300.0, file_mib=1, memory_mib=1024)
LONG_S = 300.0


@pytest.fixture
def secret(tmp_path, monkeypatch):
    found = RunSecret(tmp_path / "keys")
    monkeypatch.setenv("BOX_KEY", found.value())
    monkeypatch.setattr(open_sandbox, "_working", set())
    return found


@asynccontextmanager
async def served(secret, section=NONE, *, idle_s=LONG_S, ping_s=20.0, silent_s=60.0):
    """(the server, a section of its clients)"""
    with open_socket("127.0.0.1", 0) as listener:
        server = SandboxServer(section, "none", secret, idle_s=idle_s)
        async with serving(
            server,
            listener,
            close=server.close,
            limits=AdmissionLimits(strangers=16, clients=64),
            ws=WebSocketProtocol,
            ws_max_size=longest_message(section),
            ws_ping_interval=ping_s,
            ws_ping_timeout=silent_s,
            ws_per_message_deflate=False,
        ):
            yield (
                server,
                SandboxSection(
                    type="remote",
                    url=url_of(listener),
                    api_key="${env:BOX_KEY}",
                    file_mib=1,
                    timeout_s=300.0,
                ),
            )


def run(work):
    async def within():
        async with asyncio.timeout(LONG_S):
            return await work()

    return asyncio.run(within())


async def until(condition):
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.02)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.slow
def test_it_is_a_sandbox_as_those_of_this_machine(secret, tmp_path):
    async def search(arguments):
        if arguments["query"] == "broken":
            raise ToolError("no such page")
        if arguments["query"] == "bug":
            raise RuntimeError("secret words")
        return {"got": arguments}

    async def work():
        tools = {"search": SandboxTool("search", ("query", "k"), "Finds it.", search)}
        async with (
            served(secret) as (_, section),
            Sandboxes(section).open(tools) as sandbox,
        ):
            first = await sandbox.run("x = search('cats', k=2)\nprint('hi')\nx['got']['k'] * 21")
            assert (first.value, first.stdout, first.error) == ("42", "hi\n", None)

            broken = await sandbox.run("search('broken')")
            assert broken.error.message == "no such page" and broken.is_alive
            assert "secret words" not in (await sandbox.run("search('bug')")).error.message

            await sandbox.write_file("in/a.bin", bytes(range(256)))
            made = await sandbox.run("open('b', 'wb').write(open('in/a.bin', 'rb').read()[::-1])")
            assert made.files == ("b",) and await sandbox.files() == {"b": 256, "in/a.bin": 256}
            assert await sandbox.read_file("b") == bytes(range(256))[::-1]
            assert await sandbox.export(tmp_path / "out") == ("b", "in/a.bin")

            program = await sandbox.execute(
                ["python", "-c", "print(input()); raise SystemExit(3)"], stdin=b"\xc3\xa4\n"
            )
            assert (program.stdout, program.exit_code) == ("ä\n", 3)

            again = await sandbox.run("x")
            assert again.is_new and again.error.type == "NameError"
            for path in ("../out", "/etc/passwd", "none", "\ud800"):
                with pytest.raises(SandboxError):
                    await sandbox.read_file(path)

            late = await sandbox.run("while True: pass", deadline_s=0.5)
            assert late.error.type == "Timeout"
            assert (await sandbox.run("'on'")).value == "'on'"

    run(work)


def test_who_has_no_key_gets_nothing(secret, monkeypatch):
    async def work():
        async with served(secret) as (server, section):
            for key in ("0" * 64, "", "a b", "\u00e4"):
                monkeypatch.setenv("BOX_KEY", key)
                with pytest.raises(SandboxError, match="api_key") as refused:
                    await remote.Remote().open(section, {})
                assert not key.strip() or key not in str(refused.value)

            bare = section.model_copy(update={"api_key": None})
            with pytest.raises(SandboxError, match="key is wrong or missing"):
                await remote.Remote().open(bare, {})

            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{section.url}/sandbox")).status_code == 401

            assert server.num_sessions == 0

        with pytest.raises(SandboxError, match="can't be reached"):
            await remote.Remote().open(bare, {})

    run(work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"memory_mib": 4096}, "memory_mib is 4096, and the server allows 1024"),
        ({"max_tool_calls": 10_000}, "max_tool_calls"),
        ({"packages": True}, "start the server with packages=true"),
        ({"timeout_s": 500.0}, "timeout_s"),
    ],
)
def test_a_server_gives_no_more_than_its_own_limits(secret, asked, message):
    async def work():
        async with served(secret) as (_, section):
            more = section.model_copy(update=asked)
            with pytest.raises(SandboxError, match=message):
                await remote.Remote().open(more, {})
            async with Sandboxes(section).open() as sandbox:
                with pytest.raises(SandboxError, match="the server allows 300 s"):
                    await sandbox.run("1", deadline_s=500.0)
                assert (await sandbox.run("1")).value == "1"

    run(work)


@pytest.mark.slow
def test_a_client_that_is_gone_leaves_nothing_running(secret):
    async def work():
        async with served(secret) as (server, section):
            sandbox = await remote.Remote().open(section, {})
            pid = int((await sandbox.run("import os; os.getpid()")).value)
            running = asyncio.create_task(sandbox.run("import time; time.sleep(600)"))
            await asyncio.sleep(0)
            assert is_running(pid)

            sandbox._connection.transport.abort()
            assert (await running).error.type == "SandboxDied"

            await until(lambda: not is_running(pid) and server.num_sessions == 0)
            again = await sandbox.run("import os; os.getpid()")
            assert again.is_new, "the next call has another one"

            await sandbox.close()
            await until(lambda: not is_running(int(again.value)))
            with pytest.raises(SandboxError, match="closed"):
                await sandbox.run("1")

            await until(lambda: server.num_sessions == 0)

    run(work)


def test_a_call_that_is_cancelled_ends_its_sandbox(secret):
    async def work():
        async with served(secret) as (server, section):
            sandbox = await remote.Remote().open(section, {})
            running = asyncio.create_task(sandbox.run("import time; time.sleep(600)"))
            await until(lambda: server.num_sessions == 1)
            await asyncio.sleep(0.1)

            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

            await until(lambda: server.num_sessions == 0)

    run(work)


@pytest.mark.slow
def test_a_client_that_hears_nothing_any_more_is_found_out(secret):
    async def work():
        async with served(secret, ping_s=0.2, silent_s=5.0) as (server, section):
            sandbox = await remote.Remote().open(section, {})
            sandbox._connection.transport.pause_reading()  # half-open: no pong, no end
            await until(lambda: server.num_sessions == 0)
            await sandbox.close()

    run(work)


@pytest.mark.slow
def test_a_full_server_says_so(secret):
    async def work():
        small = NONE.model_copy(update={"max_sandboxes": 1})
        async with served(secret, small) as (_, section):
            first = await remote.Remote().open(section, {})
            impatient = section.model_copy(update={"wait_timeout_s": 0.2})
            with pytest.raises(SandboxError, match="has 1 sandboxes open"):
                await remote.Remote().open(impatient, {})

            waiting = asyncio.create_task(remote.Remote().open(section, {}))
            gone = asyncio.create_task(remote.Remote().open(section, {}))
            await asyncio.sleep(0.2)
            gone.cancel()  # who waits and goes takes no place
            await first.close()
            second = await waiting
            assert (await second.run("2")).value == "2"

            await second.close()

    run(work)


@pytest.mark.slow
def test_one_that_nobody_uses_is_closed(secret):
    async def work():
        async with served(secret, idle_s=0.3) as (server, section):
            sandbox = await remote.Remote().open(section, {})
            await until(lambda: server.num_sessions == 0)
            lost = await sandbox.run("1")
            assert lost.files_lost and lost.error.type == "SandboxDied"

            server.idle_s = LONG_S
            assert (await sandbox.run("1")).value == "1"
            await sandbox.close()

    run(work)


OPEN = wire.to_json(wire.Open({}, (), 10.0))
MISUSES = {
    "no JSON": [b"\xff" * 100],
    "another form": [b'{"type": "Rm", "path": "/"}'],
    "nothing": [],
    "a call before a sandbox": [wire.to_json(wire.Run(1, "1", 5.0))],
    "two sandboxes": [OPEN, OPEN],
    "a flood of requests": [OPEN, *[wire.to_json(wire.Files(n)) for n in range(2000)]],
    "a huge message": [OPEN, b'{"type":"Run","id":1,"deadline_s":1,"code":"' + b"a" * 2**25],
    "deep": [b"[" * 100_000],
    "a tool that is none": [wire.to_json(wire.Open({}, (wire.ToolForm("a b", (), ""),), 1.0))],
    "a type of its own": [wire.to_json(wire.Open({"type": "none"}, (), 1.0))],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", MISUSES)
def test_a_client_that_misuses_the_protocol_ends_its_own_sandbox(secret, monkeypatch, what):
    monkeypatch.setattr(sandbox_server, "OPEN_S", 1.0 if what == "nothing" else LONG_S)

    async def work():
        async with served(secret) as (server, section):
            url = f"ws{section.url.removeprefix('http')}{wire.PATH}"
            key = {"Authorization": f"Bearer {secret.value()}"}
            async with connect(url, additional_headers=key, proxy=None) as raw:
                with suppress(ConnectionClosed):
                    for message in MISUSES[what]:
                        await raw.send(message)
                with suppress(ConnectionClosed):
                    while True:
                        await raw.recv()

            await until(lambda: server.num_sessions == 0)
            async with Sandboxes(section).open() as sandbox:
                assert (await sandbox.run("6 * 7")).value == "42"

    run(work)


def test_a_server_that_ends_costs_the_call(secret):
    async def work():
        async with served(secret) as (server, section):
            sandbox = await remote.Remote().open(section, {})
            running = asyncio.create_task(sandbox.run("import time; time.sleep(600)"))
            await until(lambda: server.num_sessions == 1)
            await asyncio.sleep(0.1)
            await server.close()
            ended = await running
            assert ended.error.type == "SandboxDied" and ended.files_lost and not ended.is_alive

        with pytest.raises(SandboxError, match="can't be reached"):
            await sandbox.run("1")

    run(work)


@pytest.mark.slow
def test_a_program_whose_server_ends_is_told_apart_from_one_that_fails(secret):
    async def work():
        async with served(secret) as (server, section):
            sandbox = await remote.Remote().open(section, {})
            assert not (await sandbox.execute(["python", "-c", "1 / 0"])).server_lost

            sleeps = ["python", "-c", "import time; time.sleep(600)"]
            running = asyncio.create_task(sandbox.execute(sleeps))
            await asyncio.sleep(0.3)
            await server.close()
            ended = await running
            assert ended.server_lost and ended.exit_code is None

            await sandbox.close()

    run(work)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"no JSON", "ProtocolViolation"),
        (b'{"type":"Done","id":77,"value":1}', "ProtocolViolation"),
        (b'{"type":"Done","id":1,"value":{"stdout":7}}', "ProtocolViolation"),
        (b'"' + b"a" * 2**25 + b'"', "SandboxDied"),
        (None, "Timeout"),
    ],
)
def test_a_server_that_answers_nonsense_or_nothing_costs_the_call(
    secret, monkeypatch, answer, kind
):
    limit_s = 0.5 if answer is None else 300.0
    monkeypatch.setattr(remote, "MARGIN_S", limit_s)

    async def nonsense(connection):
        await connection.recv()
        await connection.send(wire.to_json(wire.Opened("none")))
        await connection.recv()
        with suppress(ConnectionClosed):
            if answer is not None:
                await connection.send(answer)
            await connection.wait_closed()

    async def work():
        async with serve(nonsense, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            section = SandboxSection(type="remote", url=url, file_mib=1)
            sandbox = await remote.Remote().open(section, {})
            ran = await sandbox.run("1", deadline_s=limit_s)
            assert ran.error.type == kind and ran.files_lost
            await sandbox.close()

    run(work)


@pytest.mark.slow
def test_processes_that_are_killed_leave_nothing_behind(tmp_path):
    command = [
        sys.executable,
        "-m",
        "agentevo",
        "sandbox",
        "box",
        "--serve",
        "type=none",
        "timeout_s=300",
    ]
    server = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        url = server.stderr.readline().split()[-1]
        env = {**os.environ, "BOX_KEY": (tmp_path / "box" / "secret").read_text().strip()}
        assert (tmp_path / "box" / "secret").stat().st_mode & 0o77 == 0

        code = "import os; open('{}', 'w').write(str(os.getpid())); import time; time.sleep(300)"
        words = ["type=remote", f"url={url}", "api_key=${env:BOX_KEY}", "timeout_s=300"]

        def client(name):
            (tmp_path / f"{name}.py").write_text(code.format(tmp_path / f"{name}.pid"))
            words_of = ["sandbox", f"{name}.py", *words]
            process = subprocess.Popen(
                [sys.executable, "-m", "agentevo", *words_of], cwd=tmp_path, env=env
            )

            ends = time.monotonic() + LONG_S
            place = tmp_path / f"{name}.pid"
            while not (place.exists() and place.read_text()) and time.monotonic() < ends:
                time.sleep(0.05)

            return process, int(place.read_text())

        first, pid = client("first")
        first.send_signal(signal.SIGKILL)
        first.wait()
        asyncio.run(until(lambda: not is_running(pid)))
        second, pid = client("second")
        server.send_signal(signal.SIGKILL)
        assert second.wait(LONG_S) == 1, "its code has failed, as SandboxDied"

        asyncio.run(until(lambda: not is_running(pid)))
    finally:
        server.kill()
        server.wait()
        server.stderr.close()
