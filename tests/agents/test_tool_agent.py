"""The tool agent: calls and results in both formats, its limits, and what an attempt is worth."""

from __future__ import annotations

import json

import pytest

from agentevo.agents import Policy, ToolAgent
from agentevo.agents.history import LEFT_OUT
from agentevo.agents.task_agent import check_agent_names
from agentevo.agents.tool_format import read_action
from agentevo.agents.tools.search import CorpusSearch
from agentevo.config import tools as tool_config
from agentevo.config.agents import ContextSection, ToolAgentSection
from agentevo.config.tools import tool
from agentevo.errors import ConfigError, ToolError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.tiny_tokenizer import byte_tokenizer
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import SamplingParams, Task


@pytest.fixture(autouse=True)
def counter(monkeypatch):
    """A registered class of tools; what a test registers is gone after it."""
    monkeypatch.setattr(tool_config.tools, "_items", {})

    @tool("counter")
    class Counter:
        """Counts."""

        def __init__(self, task):
            self.count = 0

        def add(self, number: int) -> int:
            """Adds a number."""
            if number < 0:
                raise ToolError("only upwards")
            self.count += number
            return self.count

    return Counter


def call(number, name="add"):
    arguments = json.dumps({"number": number})
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.fixture
def played(scripted_engine):
    """(outcome, turns, prompts as text) of an attempt in which the policy says `words`."""

    def play(*words, task=None, **options):
        tokenizer = byte_tokenizer(4096)
        chat = ChatFormat(tokenizer)
        engine = scripted_engine(tokenizer, chat.end_of_turn_id, words)
        conversation = Conversation(
            engine, chat, SamplingParams(), name="a", seed=1, context_length=4096, timeout_s=300
        )
        agent = ToolAgent(ToolAgentSection(**{"tools": ("counter",), "max_turns": 6} | options))

        async def work():
            outcome = await agent.run(task or Task(id="t", query="Count."), Policy(conversation))
            await agent.close()
            return outcome

        outcome = run_coroutine(work())
        prompts = [tokenizer.decode(ids) for ids, _, _ in engine.requests]
        return outcome, conversation.turns, prompts

    return play


def ended_by(outcome):
    (end,) = [
        name for name, metric in outcome.metrics.items() if name.startswith("ended_by") and metric
    ]
    return end.removeprefix("ended_by_")


def test_each_reply_and_result_extends_the_ids_before_it(played):
    outcome, turns, prompts = played(call(2) + call(3), call(4), "It is 9.")
    assert [turn.parent for turn in turns] == [None, 0, 1]

    schema = json.loads(prompts[0].partition("<|system|>")[2].partition("<|end|>")[0])
    assert schema[0]["function"]["name"] == "add"

    told = prompts[-1].partition("Count.")[2]
    assert told == (
        f"<|end|><|assistant|>{call(2)}{call(3)}<|end|>"
        "<|user|><tool_response>2</tool_response><|end|>"
        "<|user|><tool_response>5</tool_response><|end|>"
        f"<|assistant|>{call(4)}<|end|>"
        "<|user|><tool_response>9</tool_response><|end|><|assistant|>"
    )
    assert (outcome.reward, outcome.truncated, ended_by(outcome)) == (0.0, False, "answer")
    assert outcome.metrics["num_tool_calls"] == 3


def test_what_is_wrong_with_a_call_is_told_counted_and_priced(played):
    outcome, _, prompts = played(
        call(1) + '<tool_call>{"name": "add", "arg</tool_call>',
        call(1, "ad"),
        call("one"),
        call(-1),
        "0",
        call_penalty=0.25,
    )
    results = [
        part.partition("</tool_response>")[0] for part in prompts[-1].split("<tool_response>")[1:]
    ]
    assert results[0] == "1"
    assert "<|user|>Error: failed to decode the tool call: " in prompts[-1]
    assert results[1] == "Error: there is no tool 'ad': did you mean add? tools: add"
    assert results[2].startswith("Error: wrong arguments for add: number: ")
    assert results[3] == "Error: only upwards"
    assert outcome.turn_rewards == {0: -0.25, 1: -0.25, 2: -0.25, 3: 0.0, 4: 0.0}
    assert outcome.reward == -0.75
    assert outcome.reward_parts == {"tool_results": 0.0, "call_penalty": -0.75}

    counted = {name: count for name, count in outcome.metrics.items() if name.startswith("num_")}
    assert counted == {
        "num_context_cuts": 0,
        "num_malformed_calls": 1,
        "num_tool_calls": 2,
        "num_tool_errors": 3,
        "num_tool_failures": 0,
        "num_tool_timeouts": 0,
        "num_unknown_tools": 1,
        "num_wrong_arguments": 1,
    }


@pytest.mark.slow
def test_limits_end_an_attempt_and_say_so(played):
    assert ended_by(played(*[call(n) for n in range(6)])[0]) == "turns"
    assert ended_by(played(call(1), call(1), call(1), "x", max_repeats=2)[0]) == "repeats"
    assert ended_by(played(call(1), call(2), call(3), max_tokens=100)[0]) == "tokens"
    assert ended_by(played(*[call(n) for n in range(60)], max_turns=60)[0]) == "context"

    outcome, _, prompts = played(call(1) + call(2) + call(3), call(4), "6", max_calls_per_turn=2)
    assert "Error: a reply may hold 2 calls" in prompts[1] and ended_by(outcome) == "answer"

    outcome, _, prompts = played(call(1), call(2), "1", max_tool_calls=1)
    assert "Error: all 1 calls are used up: give the final answer" in prompts[-1]
    assert not outcome.truncated


def test_an_answer_may_need_its_tag(played):
    outcome, _, prompts = played("I think", call(1), "<answer>1</answer>", final="answer_tag")
    assert "<|user|>Call a tool, or give the final answer as <answer>" in prompts[1]
    assert ended_by(outcome) == "answer"


def test_the_tools_may_say_what_an_attempt_is_worth(played, counter):
    counter.outcome = lambda self: {"reached": float(self.count >= 3), "steps": -0.1}
    outcome, _, _ = played(call(1), call(2), "done")
    assert outcome.reward_parts == {
        "counter.reached": 1.0,
        "counter.steps": -0.1,
        "tool_results": 0.0,
        "call_penalty": 0.0,
    }
    assert (outcome.reward, outcome.success) == (0.9, False)

    counter.outcome = lambda self: self.count >= 3
    assert played(call(3), "done")[0].success

    counter.outcome = lambda self: None
    assert played(call(3), "done")[0].reward is None, "a scorer's affair, else it fails in words"
    assert ToolAgent(ToolAgentSection(tools=("counter",))).needs_scorer is False


def test_a_class_whose_part_of_the_reward_would_be_the_agents_own_is_refused(counter):
    counter.outcome = lambda self: 1.0
    tool("call_penalty")(counter)
    with pytest.raises(ConfigError, match="reserved for a part of the reward"):
        ToolAgent(ToolAgentSection(tools=("call_penalty",)))


def results_in(prompt):
    return [one.partition("</tool_response>")[0] for one in prompt.split("<tool_response>")[1:]]


def test_old_results_may_be_left_out(played):
    context = {"strategy": "discard_results", "max_tokens": 1, "keep_turns": 1}
    outcome, turns, prompts = played(call(1), call(2), call(3), "6", context=context)
    assert [results_in(prompt) for prompt in prompts[1:]] == [
        ["1"],
        [LEFT_OUT, "3"],
        [LEFT_OUT, LEFT_OUT, "6"],
    ]
    assert [turn.parent for turn in turns] == [None, 0, 0, 0]
    assert call(1) in prompts[-1] and outcome.metrics["num_context_cuts"] == 2


def test_the_history_may_be_a_window(played):
    context = {"strategy": "window", "max_tokens": 1, "keep_turns": 1}
    _, turns, prompts = played(call(1), call(2), call(3), "6", context=context)
    assert [results_in(prompt) for prompt in prompts[1:]] == [["1"], ["3"], ["6"]]
    assert "Count." in prompts[-1] and call(1) not in prompts[-1]
    assert [turn.parent for turn in turns] == [None, 0, None, None]


@pytest.mark.slow
def test_a_full_context_is_cut_where_that_helps(played):
    context = {"strategy": "window", "keep_turns": 1}
    words = [call(n) for n in range(90)] + ["done"]
    outcome, turns, _ = played(*words, max_turns=91, context=context)
    assert ended_by(outcome) == "answer" and len(turns) == 91
    assert 1 <= outcome.metrics["num_context_cuts"] < 10
    assert ended_by(played(*words, max_turns=91)[0]) == "context"


def test_the_policy_may_summarise_what_came_before(played):
    _, turns, _ = played(call(1), call(2), "done")
    first_two = sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns[:2])
    context = {"strategy": "summary", "max_tokens": first_two - 1, "keep_turns": 0}
    words = [call(1), call(2), "I have 3 so far.", call(4), "7"]
    outcome, turns, prompts = played(*words, context=context)
    assert [turn.parent for turn in turns] == [None, 0, 1, None, 3]
    assert prompts[2].endswith(f"{ContextSection().summary_prompt}<|end|><|assistant|>")
    assert "Count.\n\nWhat was done and found so far: I have 3 so far.<|end|>" in prompts[3]
    assert results_in(prompts[3]) == []
    assert outcome.metrics["num_context_cuts"] == 1 and ended_by(outcome) == "answer"


def test_what_is_too_long_to_be_summarised_is_summarised_without_its_results(played, counter):
    def read(self, number: int) -> str:
        """Reads."""
        return "x" * 1500

    counter.read = read
    context = {"strategy": "summary", "max_tokens": 100_000, "keep_turns": 0}
    words = [*[call(n, "read") for n in range(3)], "I have read three.", "done"]
    outcome, _, prompts = played(*words, context=context)
    assert results_in(prompts[3]) == [LEFT_OUT] * 3
    assert prompts[3].endswith(f"{ContextSection().summary_prompt}<|end|><|assistant|>")
    assert "found so far: I have read three.<|end|>" in prompts[4]
    assert ended_by(outcome) == "answer" and outcome.metrics["num_context_cuts"] == 1


@pytest.mark.parametrize(
    "options", [{"strategy": "summary"}, {"strategy": "window", "summary_model": "helper"}]
)
def test_a_context_that_can_not_be_is_refused(options):
    with pytest.raises(ValueError, match=r"needs max_tokens|for strategy=summary"):
        ContextSection(**options)


def test_a_task_may_ask_for_one_reply_without_tools(played):
    task = Task(id="t", query="Count.", metadata={"agent_name": "single_turn_agent"})
    outcome, turns, prompts = played(call(1), task=task)
    assert (len(turns), outcome.reward, outcome.turn_rewards) == (1, None, {})
    assert "<|system|>" not in prompts[0]


@pytest.mark.parametrize(
    ("name", "kind", "remedy"),
    [
        ("tool_agent_loop", "tool_agent", None),
        ("tool_agent_loop", "single_turn", "set agent.type=tool_agent"),
        ("code_agent", "tool_agent", "set agent.type=code_agent"),
        ("oracle", "tool_agent", "use single_turn, single_turn_agent, tool_agent"),
        ("oracle", "function", None),
        (None, "single_turn", None),
    ],
)
def test_a_task_that_asks_for_another_agent_is_refused(name, kind, remedy):
    metadata = {} if name is None else {"agent_name": name}
    tasks = [Task(id="one"), Task(id="two", metadata=metadata)]
    if remedy is None:
        check_agent_names(tasks, kind)
        return
    with pytest.raises(ConfigError, match=f"'two' has the agent_name '{name}'.*{remedy}"):
        check_agent_names(tasks, kind)


def test_the_calls_of_the_last_reply_are_made(played, counter):
    """Nobody reads their results, but they change the state, and earn or cost."""
    counter.outcome = lambda self: self.count >= 3
    outcome, _, _ = played(call(3), max_turns=1)
    assert (outcome.reward, outcome.success, outcome.truncated) == (1.0, True, True)
    assert played(call(3), max_tokens=1)[0].reward == 1.0
    outcome, _, _ = played(call("x"), max_turns=1, call_penalty=0.5)
    assert outcome.turn_rewards == {0: -0.5}


def test_react_is_plain_text(played):
    first = 'Thought: add.\nAction: add\nAction Input: {"number": 5}'
    outcome, turns, prompts = played(first, "Thought: so.\nFinal Answer: 5", format="react")
    assert [turn.parent for turn in turns] == [None, 0]
    assert '{"name": "add", "description": "Adds a number."' in prompts[0]
    assert prompts[1].endswith(f"{first}<|end|><|user|>Observation: 5<|end|><|assistant|>")
    assert ended_by(outcome) == "answer"


def test_searches_may_be_tags(played, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "Canberra is the capital of Australia."}\n')
    tool("search")(CorpusSearch)
    entry = {"name": "search", "options": {"corpus": str(corpus)}}
    outcome, turns, prompts = played(
        "<think>Hm.</think><search>capital Australia</search>",
        "Hm.",
        "<answer>Canberra</answer>",
        tools=(entry,),
        format="search_tags",
        final="answer_tag",
    )
    assert prompts[0].endswith("Question: Count.<|end|><|assistant|>")

    found = "<information>[1] Canberra is the capital of Australia.</information>"
    assert prompts[1].endswith(f"</search><|end|><|user|>{found}<|end|><|assistant|>")
    assert "Search by <search>" in prompts[2]
    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert ended_by(outcome) == "answer"


@pytest.mark.parametrize(
    ("text", "calls", "problem"),
    [
        ("Final Answer: 3", [], None),
        ('Action: a\nAction Input: {"x": 1}', [("a", '{"x": 1}')], None),
        ('Action: a\nAction Input:\n```json\n{"x": 1}\n```', [("a", '{"x": 1}')], None),
        ("Action: a\nAction Input:", [("a", "{}")], None),
        ("Action: a\nAction Input: {}\nObservation: 7", [("a", "{}")], None),
        ("Action: a", [], "an action needs a line `Action Input:`"),
        ("Final Answer: Action: no\nAction: a\nAction Input: {}", [], None),
        ("I like\nThought: nothing", [], None),
    ],
)
def test_actions_are_read_out_of_a_reply(text, calls, problem):
    read, malformed = read_action(text)
    assert [(one.name, one.arguments) for one in read] == calls
    assert [one.problem.startswith(problem or "") for one in malformed] == [True] * bool(problem)
