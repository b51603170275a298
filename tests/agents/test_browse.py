"""Long results are summarised by a helper model, and a failure never looks like a summary."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from remote_server import RemoteServer, chat, fails, gives, hangs

from agentevo.agents import Policy, ToolAgent
from agentevo.agents.browse import FAILED, LEFT_OUT
from agentevo.agents.remote_policy import RemoteModelPolicy, RemotePolicyConversation
from agentevo.config import build_config
from agentevo.config import tools as tool_config
from agentevo.config.agents import ToolAgentSection
from agentevo.config.remote_models import RemoteModelSection
from agentevo.config.tools import tool
from agentevo.errors import ConfigError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.remote_models.conversations import RemoteConversations
from agentevo.inference.remote_models.model import RemoteModels
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.tiny_tokenizer import byte_tokenizer
from agentevo.runtime.event_loop import run_coroutine
from agentevo.store.call_log import AttemptCalls, RunningCall
from agentevo.types import SamplingOverrides, SamplingParams, Task

PAGE = "The door is blue. " * 20


@pytest.fixture(autouse=True)
def visit(monkeypatch):
    """A registered tool; what a test registers is gone after it."""
    monkeypatch.setattr(tool_config.tools, "_items", {})

    @tool("visit")
    def visit(url: str, purpose: str = "") -> str:
        """Reads a page."""
        return url

    return visit


def call(page=PAGE, **arguments):
    given = {"name": "visit", "arguments": {"url": page, **arguments}}
    return f"<tool_call>{json.dumps(given)}</tool_call>"


@pytest.fixture
def told(scripted_engine):
    """(what the policy is told of its call's result, metrics, remote turns)."""

    def play(words, servers, **browse):
        tokenizer = byte_tokenizer(65536)
        form = ChatFormat(tokenizer)
        engine = scripted_engine(tokenizer, form.end_of_turn_id, [words, "blue"])
        conversation = Conversation(
            engine, form, SamplingParams(), name="a", seed=1, context_length=65536, timeout_s=300
        )
        sections = {
            name: RemoteModelSection(model="m", base_url=server.base_url, max_tries=1)
            for name, server in servers.items()
        }
        settings = {"models": tuple(servers), "min_prompt_length": 100} | browse
        agent = ToolAgent(
            ToolAgentSection(tools=("visit",), browse=settings)  # type: ignore[arg-type]
        )

        async def work():
            with closing(RemoteModels(sections)) as models:
                remote = RemoteConversations(models, name="a", seed=1)
                policy = Policy(conversation, remote=remote)
                outcome = await agent.run(Task(id="t", query="Which colour?"), policy)
                await agent.close()
            return outcome, remote.turns

        outcome, turns = run_coroutine(work())
        prompt = tokenizer.decode(engine.requests[-1][0])
        result = prompt.partition("<tool_response>")[2].partition("</tool_response>")[0]
        return result, outcome.metrics, turns

    return play


def asked_of(server):
    return [body["messages"][0]["content"] for body in server.received]


def test_a_long_result_is_summarised_for_the_purpose_of_its_call(told):
    with RemoteServer(gives(chat("It is blue."))) as server:
        result, metrics, turns = told(call(purpose="the colour"), {"helper": server})
        (asked,) = asked_of(server)

    assert result == f"[a summary of {len(PAGE):,} characters, made for: the colour]\nIt is blue."
    assert "wants to know: the colour\n" in asked and f"<content>\n{PAGE}\n</content>" in asked
    assert (metrics["num_summaries"], metrics["num_failed_summaries"]) == (1, 0)
    assert metrics["num_tool_calls"] == 1

    (turn,) = turns
    assert turn.agent == "browse" and PAGE in turn.messages[0].text


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (call("short"), {}),
        (call(purpose="Give me the full page content."), {}),
        (call(), {"browse_tools": ("fetch_*",)}),
        (call(), {"min_prompt_length": 5000}),
        (call(), {"status": False}),
    ],
)
def test_what_need_not_be_summarised_stays_as_it_is(told, words, settings):
    with RemoteServer() as server:
        result, metrics, _ = told(words, {"helper": server}, **settings)
        assert server.received == []
    assert result in ("short", PAGE) and not metrics.get("num_summaries")


def test_models_are_asked_in_order_until_one_answers(told):
    with (
        RemoteServer(fails(500)) as broken,
        RemoteServer(gives(chat("  "))) as silent,
        RemoteServer(gives(chat("Blue."))) as good,
    ):
        servers = {"broken": broken, "silent": silent, "good": good}
        result, metrics, _ = told(call(), servers, default_purpose={"visit": "colours"})

    assert result.endswith("made for: colours]\nBlue.")
    assert (metrics["num_summaries"], metrics["num_failed_summaries"]) == (1, 0)


@pytest.mark.slow
def test_where_all_models_fail_the_policy_reads_the_result_and_that_it_does(told, capsys):
    with RemoteServer(fails(500, "no luck")) as broken, RemoteServer(hangs) as slow:
        servers = {"broken": broken, "slow": slow}
        result, metrics, _ = told(call(PAGE * 40), servers, timeout_s=5.0)
    assert result.startswith(FAILED + PAGE[:1000]) and "characters are left out here]" in result
    assert (metrics["num_summaries"], metrics["num_failed_summaries"]) == (0, 1)
    said = capsys.readouterr().err
    assert "no luck" in said and "slow: no answer within" in said


def test_pages_are_summarised_at_once_and_one_that_fails_is_told(told):
    def by_page(request, handler):
        content = request["messages"][0]["content"]
        (fails(500) if "two" in content else gives(chat(f"read {len(content)}")))(request, handler)

    with RemoteServer(by_page) as server:
        pages = "\n=======\n".join(["one " * 40, "two " * 40, "three " * 40, "four"])
        result, metrics, turns = told(call(pages), {"helper": server}, max_pages=3)
        assert len(server.received) == 3

    first, second, third = result.split("\n=======\n", 2)
    assert first.startswith("read ") and second == FAILED + "two " * 40 and "read" in third
    assert metrics["num_failed_summaries"] == 1 and len(turns) == 2


def test_a_purpose_with_half_of_a_surrogate_pair_is_read_without_it(told):
    with RemoteServer(gives(chat("Blue."))) as server:
        result, metrics, _ = told(call(purpose="the \ud800 colour"), {"helper": server})
        (asked,) = asked_of(server)
    assert "the ? colour" in asked and "made for: the ? colour]" in result
    assert metrics["num_summaries"] == 1


@pytest.mark.slow
def test_a_helper_reads_no_more_than_it_may_and_is_told(told):
    with RemoteServer(gives(chat("Blue."))) as server:
        flood = PAGE * 1000 + "\ud800"
        told(call(flood), {"helper": server}, max_prompt_length=200)
        (asked,) = asked_of(server)
    content = asked.partition("<content>\n")[2].partition("\n</content>")[0]
    assert content == PAGE[:200] + LEFT_OUT


@pytest.mark.parametrize(
    ("settings", "content"),
    [
        ({"min_prompt_length": 20}, PAGE),
        ({"min_prompt_length": len(PAGE) // 4}, None),
        ({"min_prompt_length": 20, "max_prompt_length": 25}, PAGE[:100] + LEFT_OUT),
    ],
)
def test_a_remote_policy_has_long_results_summarised_by_its_characters(settings, content):
    """`content`: what the helper reads; None where the result is short."""
    arguments = json.dumps({"url": PAGE})
    function = {"id": "1", "type": "function"} | {
        "function": {"name": "visit", "arguments": arguments}
    }

    def plays(request, handler):
        has_result = request["messages"][-1]["role"] == "tool"
        gives(chat("blue") if has_result else chat(None, tool_calls=[function]))(request, handler)

    async def work(sections):
        section = ToolAgentSection(tools=("visit",), browse={"models": "helper"} | settings)
        agent = ToolAgent(section)
        with closing(RemoteModels(sections)) as models:
            calls = AttemptCalls(None, "a")
            remote = RemoteConversations(models, name="a", seed=1)
            conversation = RemotePolicyConversation(
                remote, "player", SamplingOverrides(), name="a", calls=calls
            )
            policy = RemoteModelPolicy(conversation, None, remote, "player")
            outcome = await agent.run(Task(id="t", query="Which colour?"), policy)
            await agent.close()
        return outcome.metrics

    with RemoteServer(plays) as player, RemoteServer(gives(chat("It is blue."))) as helper:
        servers = {"player": player, "helper": helper}
        sections = {
            name: RemoteModelSection(model="m", base_url=server.base_url, max_tries=1)
            for name, server in servers.items()
        }
        metrics = run_coroutine(work(sections))
        result = player.received[-1]["messages"][-1]["content"]
        asked = asked_of(helper)

    if content is None:
        assert result == PAGE and asked == []
        return

    assert result.startswith("[a summary of") and result.endswith("It is blue.")
    assert asked[0].partition("<content>\n")[2].partition("\n</content>")[0] == content
    assert metrics["num_summaries"] == 1


def test_the_calls_record_has_the_result_and_its_summary(told, monkeypatch):
    kept = {}
    monkeypatch.setattr(RunningCall, "keep", lambda self, **texts: kept.update(texts))
    with RemoteServer(gives(chat("It is blue."))) as server:
        result, _, _ = told(call(), {"helper": server})
    assert kept["whole_result"] == PAGE and kept["result"] == result
    assert json.loads(kept["arguments"]) == {"url": PAGE}


def test_a_helper_that_the_recipe_has_not_is_refused():
    tree = {
        "tasks": "t.jsonl",
        "rewards": ["numeric"],
        "agent": {"type": "tool_agent", "tools": ["search"], "browse": {"models": "helpr"}},
        "remote_models": {"helper": {"model": "m"}},
    }
    with pytest.raises(ConfigError, match=r"agent\.browse\.models: there is .* mean helper\?"):
        build_config(tree)
