"""LangChain's agents over the policy itself. Runs where langchain is installed: in the environment
of examples/frameworks, which tests/examples/test_frameworks.py makes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from adding_agent import SAYS
from chat_templates import HERMES, tokenizer_with

import agentevo
from agentevo.agents import Policy
from agentevo.agents.agent import FunctionAgent, make_agent
from agentevo.config import build_config
from agentevo.errors import BadRequestError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.types import SamplingParams, Task

pytest.importorskip("langchain", reason="langchain is not in this environment")

from langchain.agents import create_agent

from agentevo.integrations.langchain import ChatPolicy, ReactAgent, ReactAgentSection

TASK = Task(id="t", query="What is 1 + 2, and 3 + 4?", answer="3 and 7.")


@pytest.fixture(scope="module")
def loaded():
    return SimpleNamespace(tokenizer=tokenizer_with(HERMES))


@pytest.fixture
def play(loaded, scripted_engine):
    """`play(run, says)`: what the agent returned and the turns that are recorded."""

    def played(run, says=SAYS, **options):
        chat = ChatFormat(loaded.tokenizer)
        engine = scripted_engine(loaded.tokenizer, chat.end_of_turn_id, says)
        settings = {"name": "a", "seed": 5, "context_length": 10_000, "timeout_s": 300.0}
        conversation = Conversation(engine, chat, SamplingParams(max_new_tokens=20), **settings)
        outcome = asyncio.run(
            (run if hasattr(run, "run") else FunctionAgent(run)).run(TASK, Policy(conversation))
        )
        return outcome, conversation, engine

    return played


def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


async def awaited(task, policy):
    agent = create_agent(ChatPolicy(policy), [add], system_prompt="Be brief.")
    state = await agent.ainvoke({"messages": [{"role": "user", "content": task.query}]})
    return float(state["messages"][-1].text == task.answer)


def plain(task, policy):
    agent = create_agent(ChatPolicy(policy), [add], system_prompt="Be brief.")
    state = agent.invoke({"messages": [{"role": "user", "content": task.query}]})
    return float(state["messages"][-1].text == task.answer)


@pytest.mark.parametrize("run", [awaited, plain])
def test_an_agent_of_langchain_extends_its_recorded_turns(play, run):
    outcome, conversation, _ = play(run)
    assert outcome.reward == 1.0
    assert [turn.parent for turn in conversation.turns] == [None, 0, 1]
    assert conversation.drift.branched == 0
    results = [message.text for message in conversation.turns[1].messages if message.role == "tool"]
    assert results == ["3", "7"]


def test_the_model_says_what_it_used_and_takes_a_sampling_of_its_own(play):
    async def ask(task, policy):
        model = ChatPolicy(policy, sampling={"temperature": 0.5}).bind_tools([add])
        said = await model.ainvoke(task.query, stop=["!"])
        assert [call["args"] for call in said.tool_calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        assert said.additional_kwargs["reasoning_content"] == "Two sums."
        assert said.usage_metadata["output_tokens"] == len(policy.turns[0].completion_ids)
        return 1.0

    _, _, engine = play(ask)
    sampling = engine.requests[0][1]
    assert sampling.temperature == 0.5 and sampling.stop_strings == ("!",)


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda model: model.bind_tools([add], tool_choice="any"), "tool_choice"),
        (lambda model: model.invoke("x", logit_bias={}), "logit_bias"),
    ],
)
def test_what_the_policy_does_not_do_is_refused(play, misuse, says):
    def run(task, policy):
        with pytest.raises(BadRequestError, match=says):
            misuse(ChatPolicy(policy))
        return 1.0

    play(run)


def test_a_blocking_call_on_the_samplers_loop_is_refused(play):
    async def run(task, policy):
        with pytest.raises(BadRequestError, match="ainvoke"):
            ChatPolicy(policy).invoke(task.query)
        return 1.0

    play(run)


class Adding(ReactAgent):
    def tools(self, task):
        return [add]

    async def reward(self, task, state):
        return len(state["messages"]) / 10


@pytest.mark.parametrize(("max_turns", "messages"), [(10, 7), (1, 4)])
def test_an_agent_by_class_ends_with_its_answer_or_after_its_turns(play, max_turns, messages):
    agent = Adding(ReactAgentSection(type="adding", max_turns=max_turns))
    outcome, conversation, _ = play(agent.run)
    assert outcome.reward == messages / 10
    assert len(conversation.turns) == min(max_turns, 3)


def test_an_agent_by_class_is_made_from_a_recipe(play):
    agentevo.agent("adding")(Adding)
    tree = {
        "agent": {"type": "adding", "system_prompt": "Be brief."},
        "tasks": "tasks.jsonl",
        "model": {"name": "tiny", "tiny": {"tokenizer": "byte"}},
    }
    config = build_config(tree, needs_environment=False)
    agent = make_agent(config.agent, lambda: None)
    _, conversation, _ = play(agent)
    assert conversation.turns[0].messages[0].text == "Be brief."
