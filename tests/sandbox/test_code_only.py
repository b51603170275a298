"""Sandboxes by the servers of other projects, with servers that speak their protocols and can do
all that a bad one does."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pydantic
import pytest
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

from agentevo.config.agents import CodeAgentSection
from agentevo.config.sandbox import SandboxSection
from agentevo.errors import SandboxError
from agentevo.sandbox import Sandboxes, SandboxTool, agentdock, opening
from agentevo.sandbox.agentdock import AgentDock
from agentevo.sandbox.openenv import OpenEnv
from agentevo.store.trace_context import Place
from agentevo.trace_header import current


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch):
    monkeypatch.setattr(opening, "_working", set())


def run(work):
    async def within():
        async with asyncio.timeout(300):
            return await work()

    return asyncio.run(within())


def executed(code, variables):
    """What such a server does with code, which is the test's own."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(code, variables)
        except Exception as error:  # noqa: BLE001
            return out.getvalue(), f"{type(error).__name__}: {error}", 1
    return out.getvalue(), "", 0


@asynccontextmanager
async def openenv(says=(), full=0, places=None):
    """A coding environment. `says`: texts in place of answers to steps; `die`, `hang`. `full`: how
    many resets find no free session. `places`: gets the header that tells of a place in a trace."""
    says = list(says)
    refused = [None] * full

    async def episode(connection):
        variables = {}
        if places is not None:
            places.append(connection.request.headers.get("traceparent"))

        with suppress(ConnectionClosed):
            async for text in connection:
                message = json.loads(text)
                if message["type"] == "reset" and refused:
                    refused.pop()
                    data = {"code": "CAPACITY_REACHED", "message": "full"}
                    await connection.send(json.dumps({"type": "error", "data": data}))
                    continue

                code = message["data"].get("code", "")
                said = says.pop(0) if says and code and "6 * 7" not in code else None
                if said == "die":
                    return

                if said == "hang":
                    await connection.wait_closed()
                    return

                stdout, stderr, status = executed(code, variables)
                seen = {"stdout": stdout, "stderr": stderr, "exit_code": status, "metadata": {}}
                data = {"observation": seen, "reward": None, "done": False}
                answer = json.dumps({"type": "observation", "data": data})
                await connection.send(said if said is not None else answer)

    async with serve(episode, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield SandboxSection(type="openenv", url=f"http://127.0.0.1:{port}", timeout_s=300.0)


def test_an_episode_of_openenv_is_an_interpreter():
    async def work():
        async with openenv(full=2) as section, Sandboxes(section).open() as sandbox:
            first = await sandbox.run("x = 20\nprint('hi')")
            assert (first.stdout, first.error, first.is_new) == ("hi\n", None, False)
            assert (await sandbox.run("print(x + 1)")).stdout == "21\n"
            failed = await sandbox.run("1 / 0")
            assert "ZeroDivisionError" in failed.stderr and failed.error.type == "CodeFailed"
            assert failed.is_alive and not failed.is_new
            small = section.model_copy(update={"output_kib": 1})

        async with openenv() as section:
            small = section.model_copy(update={"output_kib": 1})
            async with Sandboxes(small).open() as sandbox:
                flood = await sandbox.run("print('a' * 100_000)")
                assert "characters left out" in flood.stdout and len(flood.stdout) < 1200

    run(work)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("die", "ServerLost"),
        ("hang", "Timeout"),
        ("no JSON", "ProtocolViolation"),
        ("[1]", "ProtocolViolation"),
        ('{"type": "error", "data": {"code": "X", "message": "it broke"}}', "ServerLost"),
        ('{"type": "observation", "data": {"observation": 3}}', "ServerLost"),
        ('"' + "a" * (2**24 + 1) + '"', "ServerLost"),
    ],
)
def test_an_openenv_server_that_fails_costs_the_call_and_the_variables(said, kind):
    async def work():
        async with openenv([said]) as section, Sandboxes(section).open() as sandbox:
            limit = 0.5 if said == "hang" else 300.0
            lost = await sandbox.run("print(1)", deadline_s=limit)
            assert lost.error.type == kind and not lost.is_alive and lost.files_lost
            again = await sandbox.run("print(2)")
            assert (again.stdout, again.is_new) == ("2\n", True)

    run(work)


def test_what_they_can_not_do_is_refused_in_words():
    async def nothing(arguments):
        return None

    async def work():
        tools = {"f": SandboxTool("f", (), "", nothing)}
        async with openenv() as section:
            with pytest.raises(SandboxError, match="calls no functions of this machine"):
                await OpenEnv().open(section, tools)

            async with Sandboxes(section).open() as sandbox:
                for call in (
                    sandbox.files(),
                    sandbox.read_file("a"),
                    sandbox.write_file("a", b""),
                    sandbox.execute(["ls"]),
                ):
                    with pytest.raises(SandboxError, match="use a sandbox of this machine"):
                        await call

        for kind, made in (("openenv", OpenEnv()), ("agentdock", AgentDock())):
            gone = section.model_copy(update={"type": kind})
            assert "can be reached" in (problem := await made.problem(gone)) or (
                "can't be reached" in problem
            )

    run(work)
    for wrong, message in (
        ({"memory_mib": 100}, "memory_mib can't be chosen"),
        ({"env": {"A": "1"}}, "env can't be chosen"),
        ({"url": None}, "needs the url"),
    ):
        with pytest.raises(pydantic.ValidationError, match=message):
            SandboxSection(**{"type": "openenv", "url": "http://a", **wrong})

    good = SandboxSection(type="agentdock", url="http://a/mcpapi", timeout_s=3)
    assert SandboxSection.model_validate(good.model_dump()) == good, "as a resumed run reads it"
    with pytest.raises(pydantic.ValidationError, match="tools: a sandbox of type agentdock"):
        CodeAgentSection(sandbox=good, tools=("x",))


@asynccontextmanager
async def node(answer, places=None):
    """AgentDock's API: `answer(code)` gives status and body; None hangs. `places`: gets the headers
    that tell of a place in a trace."""
    places = [] if places is None else places
    seen = []

    async def client(reader, writer):
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length:")[2].split()[0])
            code = json.loads(await reader.readexactly(length))["code"]
            seen.append(head.splitlines()[0])
            places.extend(line for line in head.splitlines() if line.startswith("traceparent"))

            given = answer(code)
            if given is None:
                await reader.read()
            else:
                status, body = given
                writer.write(
                    f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                )
                writer.write(body)
                await writer.drain()

        writer.close()

    server = await asyncio.start_server(client, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/mcpapi"
        yield SandboxSection(type="agentdock", url=url, timeout_s=300.0), seen


def test_agentdock_runs_each_call_alone():
    def answer(code):
        stdout, stderr, status = executed(code, {})
        if status:
            inner = {"status_code": 500, "detail": stderr, "headers": None}
            return 200, json.dumps(inner).encode()
        return 200, json.dumps({"content": [{"type": "text", "text": stdout}]}).encode()

    async def work():
        async with node(answer) as (section, seen), Sandboxes(section).open() as sandbox:
            first = await sandbox.run("x = 1\nprint('hi')")
            assert (first.stdout, first.is_new, first.error) == ("hi\n", False, None)
            second = await sandbox.run("print(x)")
            assert second.is_new and "name 'x' is not defined" in second.error.message
            assert set(seen) == {"POST /mcpapi/tool/python.execute_code HTTP/1.1"}

    run(work)


def test_servers_are_told_of_the_call_that_they_are_asked_for():
    place = Place(7, 9, True)

    async def work():
        agentdock_s = []
        openenv_s = []

        done = json.dumps({"content": [{"type": "text", "text": "42\n"}]}).encode()
        async with (
            node(lambda code: (200, done), agentdock_s) as (section, _),
            Sandboxes(section).open() as sandbox,
        ):
            assert agentdock_s == []
            token = current.set(SimpleNamespace(place=place))
            await sandbox.run("1")
            current.reset(token)
            await sandbox.run("1")

        assert agentdock_s == [f"traceparent: {place.header}"]
        async with openenv(places=openenv_s) as section:
            current.set(SimpleNamespace(place=place))
            async with Sandboxes(section).open() as sandbox:
                await sandbox.run("1")

        assert place.header in openenv_s

    run(work)


@pytest.mark.parametrize(
    ("content", "stdout", "stderr", "failure"),
    [
        ("text", "text", "", None),
        ({"stdout": "a", "stderr": "b"}, "a", "b", None),
        ({"value": 3}, '{"value": 3}', "", None),
        ({"error": "no", "stdout": "a"}, "a", "", "no"),
        ({"status": "error", "x": 1}, "", "", '{"status": "error", "x": 1}'),
        ({}, "", "", "the tool returned nothing"),
        (None, "", "", "the tool returned nothing"),
    ],
)
def test_contents_of_agentdock_in_every_form(content, stdout, stderr, failure):
    out, err, failed = agentdock._outcome(content)
    assert (out, err, failed and failed.message) == (stdout, stderr, failure)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (None, "Timeout"),
        ((200, b"no JSON"), "ProtocolViolation"),
        ((200, b'{"content": "' + b"a" * (2**24) + b'"}'), "ProtocolViolation"),
    ],
)
def test_a_node_that_fails_costs_the_call(given, kind):
    async def work():
        async with node(lambda code: given) as (section, _):
            sandbox = await AgentDock().open(section, {})
            lost = await sandbox.run("1", deadline_s=0.5 if given is None else 300.0)
            assert lost.error.type == kind

    run(work)


def test_a_node_that_refuses_is_no_fault_of_the_code():
    async def work():
        async with node(lambda code: (404, b'{"detail": "no such tool"}')) as (section, _):
            sandbox = await AgentDock().open(section, {})
            with pytest.raises(SandboxError, match=r"HTTP 404.*no such tool"):
                await sandbox.run("1")

    run(work)
