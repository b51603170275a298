"""MCP servers as tools: a real server over stdio, HTTP and SSE, and all that it does wrong."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from agentevo.agents.tools.mcp_servers import RESTARTED
from agentevo.agents.tools.task_headers import task_headers, task_variables
from agentevo.agents.tools.tool import object_schema
from agentevo.agents.tools.toolbox import Toolbox
from agentevo.config.mcp import MCPFileSection, MCPServerSection
from agentevo.errors import EnvironmentFailure, ToolUnavailableError
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task, ToolCall

pytest.importorskip("mcp", reason="the SDK of MCP is not installed")
SERVER = str(Path(__file__).parents[2] / "support" / "mcp_server.py")
TASK = Task(
    id="t",
    answer="a secret",
    metadata={"count": 4, "solved_by_calls": [{"tool": "add", "arguments": {"number": 5}}]},
)


def section(*words, **options):
    settings = {"name": "c", "command": sys.executable, "args": (SERVER, *words)}
    is_own = options.get("session") != "shared"
    return MCPServerSection(**{"timeout_s": 300.0, "send_task": is_own, **settings, **options})


def played(*attempts, sections=None):
    """For each attempt, a list of calls (name, arguments) made one after the other: the texts of
    the results, the outcomes or what was raised, and the metrics."""

    async def work():
        box = Toolbox(sections or [section()], [].append)
        done = []
        try:
            for calls in attempts:
                async with box.open(TASK, 7) as tools:
                    texts = []
                    for name, given in calls:
                        (result,) = await tools.call([ToolCall(name, json.dumps(given))])
                        texts.append(result.text)

                    try:
                        outcome = await tools.outcomes()
                    except EnvironmentFailure as error:
                        outcome = error

                done.append((texts, outcome, tools.metrics, tools.schemas))
        finally:
            await box.close()

        return done

    return run_coroutine(work())


@pytest.fixture(scope="module")
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module", params=["http", "sse"])
def url(request, port):
    process = subprocess.Popen([sys.executable, SERVER, request.param, str(port)])
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        assert process.poll() is None
        time.sleep(0.1)

    yield {"transport": request.param, "url": f"http://127.0.0.1:{port}/{_path(request.param)}"}
    process.kill()
    process.wait()


def servers():
    """Processes of the server that this one has started. Other tests may have left zombies, which
    have no command line."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += [one] if any(SERVER in word for word in one.cmdline()) else []
    return found


def _path(transport):
    return "mcp" if transport == "http" else "sse"


def add(number):
    return ("add", {"number": number})


@pytest.mark.slow
def test_every_attempt_has_a_server_of_its_own_which_knows_the_task():
    sections = [section("sdk", outcome="worth", exclude=("gr*",))]
    first, second = played([add(2), add(3)], [add(1)], sections=sections)
    assert first[:2] == (["6", "9"], {"c": {"count": 9}})
    assert second[:2] == (["5"], {"c": {"count": 5}})

    names = [one["function"]["name"] for one in first[3]]
    assert "worth" not in names and "grow" not in names and "add" in names

    (schema,) = [one["function"] for one in first[3] if one["function"]["name"] == "add"]
    assert schema["description"].startswith("Adds a number to the count.")
    assert schema["parameters"]["properties"]["number"]["type"] == "integer"
    assert not servers()


@pytest.mark.slow
def test_a_prompt_is_read_first_and_resources_are_tools():
    given = {"prompt": "rules", "prompt_arguments": {"tone": "low"}, "resources": True}

    async def work():
        box = Toolbox([section(**given)], [].append)
        found = []
        for _ in range(2):  # of the second it is known already
            async with box.open(TASK, 7) as tools:
                asked = [{"uri": "count://now"}, {"uri": "count://none"}, {}, {"uri": 3}]
                calls = [ToolCall("read_resource", json.dumps(one)) for one in asked]
                results = await tools.call([*calls, ToolCall("list_resources", "{}")])
                found.append((tools.instructions, [result.text for result in results]))

        await box.close()
        return found, tools.schemas

    (first, second), schemas = run_coroutine(work())
    assert first == second

    instructions, texts = first
    assert instructions == "Count in a low voice, and be short."
    assert texts[0] == "4" and texts[4].startswith("count://now  The count.\ncount://{number}/half")
    assert all(text.startswith("Error: ") for text in texts[1:4]) and "takes one" in texts[2]
    assert {"list_resources", "read_resource"} <= {schema["function"]["name"] for schema in schemas}


@pytest.mark.slow
def test_attempts_may_share_a_server():
    first, second = played([add(2)], [add(3)], sections=[section(session="shared")])
    assert (first[0], second[0]) == (["2"], ["5"])


@pytest.mark.slow
def test_a_server_that_breaks_costs_its_call():
    ((texts, outcome, metrics, _),) = played(
        [
            ("refuse", {}),
            add("x"),
            ("garbage", {}),
            ("no_such", {}),
            add(1),
            ("die", {}),
            add(1),
            add(1),
        ],
        sections=[section(outcome="worth")],
    )
    assert texts[0].startswith("Error: ") and "refuse" in texts[0]
    assert texts[1].startswith("Error: ") and "integer" in texts[1]
    assert texts[2] == "done"
    assert texts[3].startswith("Error: there is no tool 'no_such'")
    assert texts[4] == "5"
    assert (
        "it is gone" in texts[5]
        and "it said: " in texts[5]
        and texts[5].endswith("\nout of cheese")
    )
    assert texts[6:] == [f"{RESTARTED}5", "6"]
    assert isinstance(outcome, EnvironmentFailure) and "restarted during the attempt" in str(
        outcome
    )
    assert metrics == {
        "num_tool_calls": 6,
        "num_tool_errors": 4,
        "num_tool_failures": 1,
        "num_unknown_tools": 1,
    }


@pytest.mark.slow
def test_arguments_that_no_message_can_hold_leave_the_server_alone():
    deep = '{"value": ' + "[" * 400 + "]" * 400 + "}"

    async def work():
        box = Toolbox([section()], [].append)
        async with box.open(TASK, 7) as tools:
            texts = ['{"value": "\\ud800"}', deep, '{"value": "\\ud83d\\ude00"}']
            results = [(await tools.call([ToolCall("echo", text)]))[0] for text in texts]
        await box.close()
        return [result.text for result in results], tools.metrics

    texts, metrics = run_coroutine(work())
    assert "can't be sent as JSON" in texts[0] and "can't be sent as JSON" in texts[1]
    assert texts[2] == '"\\ud83d\\ude00"'
    assert metrics["num_wrong_arguments"] == 2


def test_a_server_that_is_ending_has_ended_when_its_tools_are_closed():
    """One that never says hello, nor looks at its standard input: the SDK gives it two seconds."""
    deaf = section("stdio", session="shared").model_copy(
        update={
            "command": sys.executable,
            "args": ["-c", f"import time  # {SERVER}\ntime.sleep(99)"],
        }
    )

    async def work():
        box = Toolbox([deaf], [].append)

        async def attempt():
            async with box.open(TASK, 7):
                pass

        first = asyncio.create_task(attempt())
        async with asyncio.timeout(300):
            while not servers():
                await asyncio.sleep(0.01)

        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

        await box.close()

    run_coroutine(work())
    assert not servers()


@pytest.mark.slow
def test_an_opening_that_is_cancelled_leaves_nothing_behind():
    """The first of two attempts that share a server is broken off while it starts."""

    async def work():
        box = Toolbox([section("stdio", "--slow", "2", session="shared")], [].append)

        async def attempt():
            async with box.open(TASK, 7) as tools:
                return (await tools.call([ToolCall("add", '{"number": 1}')]))[0].text

        first = asyncio.create_task(attempt())
        await asyncio.sleep(0.1)
        second = asyncio.create_task(attempt())
        await asyncio.sleep(0.1)

        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

        text = await second
        await box.close()
        return text

    assert run_coroutine(work()) == "1"
    assert not servers()


@pytest.mark.slow
def test_a_server_that_never_says_hello_is_ended_at_once_and_for_all_who_wait():
    async def work():
        silent = section(session="shared", start_timeout_s=1.0)
        silent = silent.model_copy(
            update={"args": ("-c", f"'{SERVER}'; import time; time.sleep(600)")}
        )
        box = Toolbox([silent], [].append)

        async def attempt():
            async with box.open(TASK, 7):
                pass

        began = time.monotonic()
        failures = await asyncio.gather(*[attempt() for _ in range(30)], return_exceptions=True)
        await box.close()
        return failures, time.monotonic() - began

    failures, took_s = run_coroutine(work())
    assert all(isinstance(failure, ToolUnavailableError) for failure in failures)
    assert took_s < 25, "each would wait for a second of its own, and then for the server's end"
    assert not servers()


@pytest.mark.slow
def test_a_first_try_that_failed_is_no_restart(tmp_path):
    """A server that starts at the second try held nothing that could be lost."""
    script = (
        f"import os, runpy, sys\n"
        f"if not os.path.exists({str(tmp_path / 'tried')!r}):\n"
        f"    open({str(tmp_path / 'tried')!r}, 'w').close()\n"
        f"    raise SystemExit(3)\n"
        f"sys.argv = ['x', 'stdio']\n"
        f"runpy.run_path({SERVER!r}, run_name='__main__')\n"
    )

    async def work():
        box = Toolbox([section(outcome="worth", args=("-c", script))], [].append)
        (tmp_path / "tried").touch()
        async with box.open(TASK, 7) as tools:
            pass

        (tmp_path / "tried").unlink()
        async with box.open(TASK, 7) as tools:
            (result,) = await tools.call([ToolCall("add", '{"number": 1}')])
            outcomes = await tools.outcomes()

        await box.close()
        return result.text, outcomes

    assert run_coroutine(work()) == ("5", {"c": {"count": 5}})


@pytest.mark.slow
def test_a_call_that_is_given_up_leaves_the_server_as_it_is():
    ((texts, _, metrics, _),) = played(
        [add(1), ("wait", {"seconds": 600}), add(1)], sections=[section(timeout_s=5)]
    )
    assert texts == ["5", "Error: wait: no answer within 5 s", "6"]
    assert metrics["num_tool_timeouts"] == 1


@pytest.mark.slow
def test_a_flood_costs_its_call():
    ((texts, _, _, _),) = played(
        [("flood", {"megabytes": 20}), add(1)], sections=[section(timeout_s=30)]
    )
    assert texts[0].startswith("Error: ") or "are left out here" in texts[0]
    assert len(texts[0]) < 11_000
    assert texts[1] in ("5", f"{RESTARTED}5")


@pytest.mark.slow
def test_a_frozen_server_is_started_again():
    frozen = []

    async def work():
        box = Toolbox([section(timeout_s=5)], [].append)
        async with box.open(TASK, 7) as tools:
            results = await tools.call([ToolCall("add", '{"number": 1}')])
            frozen.extend(servers())
            for one in frozen:
                os.kill(one.pid, signal.SIGSTOP)
            for _ in range(2):
                results += await tools.call([ToolCall("add", '{"number": 1}')])

        await box.close()
        return [result.text for result in results]

    texts = run_coroutine(work())
    assert texts == ["5", "Error: add: no answer within 5 s", f"{RESTARTED}5"]
    assert frozen and not servers()


@pytest.mark.slow
def test_tools_that_change_are_those_of_the_next_attempt_at_most():
    first, second = played([("grow", {}), add(1)], [add(1)])
    assert first[0] == ["grown", "5"] and second[0] == ["5"]


@pytest.mark.slow
def test_a_server_at_a_url(url):
    sections = [MCPServerSection(name="far", timeout_s=300, **url)]
    first, second = played([add(2), ("refuse", {})], [add(3)], sections=sections)
    assert int(second[0][0]) == int(first[0][0]) + 3, "its state is its own affair"
    assert first[0][1].startswith("Error: ")


@pytest.mark.slow
def test_a_call_at_a_url_has_its_own_limit_and_not_that_of_the_sdk(url, monkeypatch):
    monkeypatch.setattr("mcp.shared._httpx_utils.MCP_DEFAULT_SSE_READ_TIMEOUT", 0.2)
    sections = [MCPServerSection(name="far", timeout_s=300, **url)]
    (((text,), *_),) = played([("wait", {"seconds": 2})], sections=sections)
    assert not text.startswith("Error: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"command": sys.executable, "args": ("-c", "raise SystemExit('no luck')")}, "no luck"),
        ({"command": sys.executable, "args": ("-c", "print('hello')")}, "the MCP server 'c'"),
        ({"command": None, "args": (), "url": "http://127.0.0.1:9/mcp"}, "127.0.0.1:9"),
        (
            {"args": (SERVER, "stdio", "--slow", "600"), "start_timeout_s": 2},
            "has not started within 2 s",
        ),
    ],
)
def test_a_server_that_does_not_start_fails_the_attempt_with_the_reason(options, problem):
    with pytest.raises(ToolUnavailableError, match=problem):
        played([], sections=[section(**options)])


@pytest.mark.slow
def test_a_slow_start_is_no_part_of_a_call():
    (first,) = played([add(1)], sections=[section("stdio", "--slow", "6", timeout_s=5)])
    assert first[0] == ["5"]


@pytest.mark.slow
def test_an_unknown_outcome_is_told():
    with pytest.raises(EnvironmentFailure, match="has no tool 'wealth', which `outcome` names"):
        played([], sections=[section(outcome="wealth")])


def write(tmp_path, tree):
    path = tmp_path / "mcp_config.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_file_as_claude_and_cursor_write_it(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THIS_PROCESS", SERVER)
    server = {"command": sys.executable, "args": ["${OF_THIS_PROCESS}"]}
    tree = {
        "mcpServers": {
            "one": {**server, "autoApprove": [], "timeout": 3},
            "two": {**server, "args": ["${env:OF_THIS_PROCESS}", "${NO_SUCH_VARIABLE:-stdio}"]},
            "off": {"url": "http://${NO_SUCH_VARIABLE}:9/mcp", "disabled": True},
        }
    }
    entry = MCPFileSection(
        file=write(tmp_path, tree), include=("add", "worth"), timeout_s=300, send_task=True
    )
    (only,) = played([("one__add", {"number": 1}), ("two__add", {"number": 9})], sections=[entry])
    assert only[0] == ["5", "13"]
    assert len(only[3]) == 4


@pytest.mark.slow
def test_a_server_gets_no_secrets_of_this_process(monkeypatch, tmp_path):
    seen = tmp_path / "seen.json"
    script = f"import json, os; json.dump(dict(os.environ), open({str(seen)!r}, 'w'))"
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("WANTED", "w")

    options = {"args": ("-c", script), "pass_env": ("WANTED",), "env": {"OWN": "o"}}
    options["send_task"] = False
    with pytest.raises(ToolUnavailableError):
        played([], sections=[section(**options)])

    found = json.loads(seen.read_text())
    assert "SECRET" not in found and "AGENTEVO_TASK" not in found
    assert (found["WANTED"], found["OWN"], found["AGENTEVO_TASK_ID"]) == ("w", "o", "t")


def test_no_server_is_told_the_answer_nor_what_leads_there():
    checks = [{"tool": "worth", "result": "the wanted state"}]
    metadata = TASK.metadata | {"state_checks": checks}
    task = msgspec.structs.replace(TASK, metadata=metadata, query="Count.")
    told = json.loads(task_variables(task, 7, "c")["AGENTEVO_TASK"])
    assert (told["id"], told["query"], told["metadata"]) == ("t", "Count.", {"count": 4})
    assert told["answer"] is None and task.answer == "a secret"

    header = task_headers(task, 7, "c")["agentevo-task"]
    assert json.loads(base64.b64decode(header)) == told
    with pytest.raises(EnvironmentFailure, match="can pass 65,536: give it a file"):
        task_variables(Task(id="t", query="x" * 70_000), 7, "c")


@pytest.mark.slow
def test_messages_hold_no_secrets(monkeypatch, tmp_path):
    """Of a file: variables, headers, the environment and the URL; of an entry: what is passed."""
    monkeypatch.setenv("THE_KEY", "key-of-the-bank")
    says = "import os, sys; sys.exit(' '.join([*sys.argv, os.environ['OTHER']]))"
    servers = {
        "said": {
            "command": sys.executable,
            "args": ["-c", says, "--key=${THE_KEY}"],
            "env": {"OTHER": "word-of-the-house"},
        },
        "far": {"url": "http://127.0.0.1:9/mcp?token=key-of-the-door"},
    }
    path = write(tmp_path, {"mcpServers": servers})
    entries = [
        MCPFileSection(file=path, servers=("said",)),
        MCPFileSection(file=path, servers=("far",)),
        MCPServerSection(
            name="own",
            command=sys.executable,
            args=("-c", "import os; raise SystemExit(os.environ['THE_KEY'])"),
            pass_env=("THE_KEY",),
        ),
    ]
    for entry in entries:
        with pytest.raises(ToolUnavailableError) as caught:
            played([], sections=[entry])
        for secret in ("of-the-bank", "of-the-house", "of-the-door"):
            assert secret not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [None, {}, {"type": "string"}, {"properties": [1]}, {"properties": {"a": 3}}, {"required": 1}],
)
def test_a_schema_that_is_none_says_nothing(schema):
    assert object_schema(schema) == {"type": "object", "properties": {}}
