"""A manager of MCP servers as tools: AgentDock's API on loopback, and all that it may do wrong."""

from __future__ import annotations

import json

import pydantic
import pytest
from mcp_manager import Manager

from agentevo.agents.tools import mcp_manager
from agentevo.agents.tools.toolbox import Toolbox
from agentevo.cli.main import main
from agentevo.config.mcp import MCPManagerSection
from agentevo.errors import ConfigError, ToolUnavailableError
from agentevo.runtime.event_loop import run_coroutine
from agentevo.store.call_log import AttemptCalls, RunningCall
from agentevo.store.trace_context import AttemptTrace
from agentevo.types import Task, ToolCall


def played(*attempts, **options):
    """For each attempt, a list of calls (name, arguments) made one after the other: the texts, the
    metrics and the names of the tools."""

    async def work():
        box = Toolbox([MCPManagerSection(**{"timeout_s": 300.0, **options})], [].append)
        done = []
        try:
            for calls in attempts:
                async with box.open(Task(id="t"), 7) as tools:
                    texts = [
                        (await tools.call([ToolCall(name, json.dumps(given))]))[0].text
                        for name, given in calls
                    ]
                    names = [schema["function"]["name"] for schema in tools.schemas]
                done.append((texts, tools.metrics, names))
        finally:
            await box.close()

        return done

    return run_coroutine(work())


@pytest.mark.parametrize("bare", [False, True])
def test_tools_are_called_by_their_own_names_and_by_those_of_their_servers(bare):
    with Manager(bare=bare) as manager:
        calls = [
            ("fetch_url", {"url": "u"}),
            ("web.fetch_url", {"url": "u"}),
            ("python__search", {"query": "q"}),
            ("web.search", {"query": "q"}),
        ]
        ((texts, metrics, names),) = played(calls, url=manager.node_url)

    assert names == [
        "web__search",
        "fetch_url",
        "execute_code",
        "python__search",
        "count",
        "give",
    ]
    assert [tool for tool, _ in manager.calls] == [
        "web.fetch_url",
        "web.fetch_url",
        "python.search",
        "web.search",
    ]
    assert texts[0] == 'web.fetch_url of {"url": "u"}'
    assert metrics == {"num_tool_calls": 4}


def test_tools_are_chosen_by_server_and_by_name():
    with Manager() as manager:
        url = manager.node_url
        assert played([], url=url, servers=("web",))[0][2] == ["search", "fetch_url"]
        chosen = played([], url=url, include=("web.*", "count"), exclude=("web.fetch_url",))
        assert chosen[0][2] == ["web__search", "count"]

        with pytest.raises(ConfigError, match="there is no 'wib': did you mean web"):
            played([], url=url, servers=("wib",))
        with pytest.raises(ConfigError, match=r"no tool is called 'web\.serch'"):
            played([], url=url, include=("web.serch",))


def test_what_a_tool_gives_is_read_in_every_form():
    given = ["text", "json", "number", "parts", "blank"]
    with Manager() as manager:
        calls = [("give", {"what": what}) for what in given]
        ((texts, metrics, _),) = played(calls, url=manager.node_url)

    assert texts == [
        "a text",
        '{"title": "a page", "hits": [1, 2]}',
        "42",
        '{"caption": "a cat"}\n[image, image/png, 6 bytes, left out: the image: it begins with '
        "b'\\x00\\x00\\x00\\x04\\x10A', which no image has: give a whole PNG, JPEG, WebP, GIF "
        "of one frame or BMP]",
        "",
    ]
    assert metrics == {"num_tool_calls": 5}


def test_an_error_inside_of_a_good_answer_is_an_error():
    given = ["error", "status", "nothing", "null", "no parts", "luck"]
    with Manager() as manager:
        calls = [*(("give", {"what": what}) for what in given), ("web__search", {"q": 1})]
        ((texts, metrics, _),) = played(calls, url=manager.node_url)

    assert texts[:2] == [
        "Error: the page is gone",
        'Error: {"status": "error", "message": "no luck"}',
    ]
    assert texts[2:5] == ["Error: the tool returned nothing"] * 3
    assert texts[5:] == ["Error: no luck", "Error: 'query' is a required property"]
    assert metrics["num_tool_errors"] == 7 and metrics["num_wrong_arguments"] == 1


@pytest.mark.slow
def test_a_manager_that_breaks_costs_its_call(monkeypatch):
    monkeypatch.setattr(mcp_manager, "MAX_ANSWER", 2**20)
    given = ["half", "no json", "no object", "proxy", "flood", "text"]
    with Manager() as manager:
        calls = [("give", {"what": what}) for what in given]
        ((texts, metrics, _),) = played(calls, url=manager.node_url)
        assert len(manager.calls) == len(calls)  # none that may have changed something is repeated
        ((late, counted, _),) = played(
            [("give", {"what": "hang"}), ("count", {})], url=manager.node_url, timeout_s=3.0
        )

    for text, said in zip(
        texts,
        ["broke off", "not JSON", "not an object", "Error connecting", "1,048,576"],
        strict=False,
    ):
        assert "can't be reached" in text and said in text

    assert texts[-1] == "a text" and metrics["num_tool_failures"] == 5
    assert late == ["Error: give: no answer within 3 s", "1"]
    assert counted["num_tool_timeouts"] == 1


@pytest.mark.slow
def test_a_manager_that_starts_is_waited_for_and_one_that_is_not_there_is_told():
    with Manager(asleep=1) as manager:
        assert played([("count", {})], url=manager.node_url)[0][0] == ["1"]
        gone = manager.node_url
    with pytest.raises(ToolUnavailableError, match=r"no tools listed within 0\.5 s.*ConnectError"):
        played([], url=gone, start_timeout_s=0.5)


def test_a_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("MANAGER_KEY", "sesame-open")
    monkeypatch.setenv("WRONG_KEY", "open-sesame")
    with Manager(key="sesame-open") as manager:
        good = {"url": manager.node_url, "api_key": "${env:MANAGER_KEY}"}
        assert played([("count", {})], **good)[0][0] == ["1"]
        with pytest.raises(ToolUnavailableError, match=r"HTTP 401: Bearer \*\*\* is not known"):
            played([], **{**good, "api_key": "${env:WRONG_KEY}", "start_timeout_s": 2})

    with pytest.raises(ConfigError, match="NO_SUCH_KEY holds no key"):
        played([], url=good["url"], api_key="${env:NO_SUCH_KEY}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "http://h:1"}, "ends with /mcpapi"),
        ({"url": "ftp://h/mcpapi"}, "is not the URL of a server"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(options, said):
    with pytest.raises(pydantic.ValidationError, match=said):
        MCPManagerSection(**options)


def test_inspect_lists_and_calls_through_a_manager(capsys):
    with Manager() as manager:
        assert main(["tools", "inspect", manager.node_url]) == 0
        assert "fetch_url(url: string)  Does fetch_url." in capsys.readouterr().out
        words = ["--call", "web.fetch_url", "--arguments", '{"url": "u"}', manager.node_url]
        assert main(["tools", "inspect", *words]) == 0
        assert capsys.readouterr().out == 'web.fetch_url of {"url": "u"}\n'


def test_a_manager_is_told_of_the_call_that_it_is_asked_for():
    calls = AttemptCalls(None, "t/train@1#0")
    calls.trace = AttemptTrace(7, True)
    with Manager() as manager:
        with RunningCall(calls, "attempt", "Player", {}) as attempt:
            attempt.number = 5
            played([("fetch_url", {"url": "u"})], url=manager.node_url)
        assert set(manager.places) == {attempt.place.header}
        told = len(manager.places)
        played([("fetch_url", {"url": "u"})], url=manager.node_url)
        assert len(manager.places) == told
