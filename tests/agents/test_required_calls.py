"""First replies of the tool agent that can only be calls: sampled by the real engine."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from constrained import policy_of

from agentevo.agents import ToolAgent
from agentevo.config import build_config
from agentevo.config import tools as tool_config
from agentevo.config.agents import ToolAgentSection
from agentevo.config.tools import FunctionToolSection, tool
from agentevo.errors import ConfigError
from agentevo.models.chat import answer_form
from agentevo.runs.orchestration.checks import check_unloaded
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task


@pytest.fixture(autouse=True)
def adder(monkeypatch):
    """A registered tool that notes its numbers; what a test registers is gone after it."""
    monkeypatch.setattr(tool_config.tools, "_items", {})
    numbers = []

    @tool("add")
    def add(number: int) -> int:
        """Adds a number."""
        numbers.append(number)
        return sum(numbers)

    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("required_calls", [1, 2])
def test_a_policy_that_knows_no_tools_calls_them(adder, required_calls):
    policy = policy_of(SimpleNamespace(gateway=None))
    agent = ToolAgent(ToolAgentSection(tools=("add",), max_turns=3, required_calls=required_calls))

    async def play():
        outcome = await agent.run(Task(id="t", query="Count."), policy)
        await agent.close()
        return outcome

    outcome = run_coroutine(play())
    turns = policy.conversation.turns
    first = [turn.constraint is not None for turn in turns]
    assert first == [index < required_calls for index in range(len(turns))]
    assert len(adder) >= required_calls == outcome.metrics["num_tool_calls"]
    for turn in turns[:required_calls]:
        assert re.fullmatch(r"<tool_call>.*</tool_call>", turn.messages[-1].text, re.DOTALL)


@pytest.mark.slow
def test_a_narrowed_parameter_is_written_as_narrowed_and_shown_so(adder):
    policy = policy_of(SimpleNamespace(gateway=None))
    narrowed = FunctionToolSection(name="add", narrow={"add": {"number": {"enum": [7]}}})
    agent = ToolAgent(ToolAgentSection(tools=(narrowed,), max_turns=2, required_calls=1))

    async def play():
        await agent.run(Task(id="t", query="Count."), policy)
        await agent.close()

    run_coroutine(play())
    assert adder[0] == 7


def recipe(*overrides):
    tree = {
        "model": {"name": "tiny", "tiny": {"tokenizer": "byte"}},
        "tasks": "questions.jsonl",
        "rewards": ["numeric"],
        "agent": {"type": "tool_agent", "tools": ["add"], "required_calls": 1},
    }
    return build_config(tree, overrides)


@pytest.mark.slow
def test_what_can_not_be_required_is_refused_before_the_run(monkeypatch):
    assert check_unloaded(recipe()) is not None
    with pytest.raises(ConfigError, match="set format=native in place of react"):
        recipe("agent.format=react")

    monkeypatch.setattr(answer_form, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"agent\.required_calls.*agentevo\[constrained\]"):
        check_unloaded(recipe())


def test_a_model_whose_calls_can_not_be_prescribed_is_refused(monkeypatch):
    monkeypatch.setattr(answer_form, "HARMONY", "hermes")
    with pytest.raises(ConfigError, match=r"agent\.required_calls.*leave the key out"):
        check_unloaded(recipe())
