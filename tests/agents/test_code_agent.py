"""The code agent: code runs in one interpreter, its output comes back, its tools are functions."""

from __future__ import annotations

import asyncio

import pytest

from agentevo.agents import CodeAgent, Policy
from agentevo.agents.code_agent import is_unfinished, read_code
from agentevo.config import tools as tool_config
from agentevo.config.agents import CodeAgentSection
from agentevo.config.tools import tool
from agentevo.environments.sandbox.open_sandbox import problem_of
from agentevo.environments.sandbox.section import SandboxSection
from agentevo.errors import ConfigError, ToolError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.tiny_tokenizer import byte_tokenizer
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import SamplingParams, Task


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(tool_config.tools, "_items", {})


@pytest.fixture(scope="module", autouse=True)
def sandboxed():
    problem = asyncio.run(problem_of("bubblewrap", SandboxSection(type="bubblewrap")))
    problem = problem and asyncio.run(problem_of("landlock", SandboxSection(type="landlock")))
    if problem:
        pytest.skip(f"no sandbox works here: {problem}")


@pytest.fixture
def played(scripted_engine):
    """(outcome, observations, turns) of an attempt in which the policy says `words`."""

    def play(*words, task=None, **options):
        tokenizer = byte_tokenizer(8192)
        chat = ChatFormat(tokenizer)
        engine = scripted_engine(tokenizer, chat.end_of_turn_id, words)
        conversation = Conversation(
            engine, chat, SamplingParams(), name="a", seed=1, context_length=8192, timeout_s=600
        )
        agent = CodeAgent(CodeAgentSection(**options))

        async def work():
            policy = Policy(conversation)
            try:
                outcome = await agent.run(task or Task(id="t", query="Count."), policy)
            finally:
                play.kept = policy.files
            await agent.close()
            return outcome

        outcome = run_coroutine(work())
        prompt = tokenizer.decode(engine.requests[-1][0])
        told = [one.partition("<|end|>")[0] for one in prompt.split("<|user|>")[1:]]
        return outcome, told, conversation.turns

    return play


def block(code):
    return f"Let me see.\n```python\n{code}\n```"


def test_variables_live_from_one_reply_to_the_next(played):
    outcome, told, turns = played(
        block("x = 20"), block("print('x is', x)\nx + 1"), block("1 / 0"), "21", code_penalty=0.5
    )
    assert told[:3] == ["Count.", "Output:\n(nothing was printed)", "Output:\nx is 20\n21"]
    assert told[3].endswith("ZeroDivisionError: division by zero")
    assert [turn.parent for turn in turns] == [None, 0, 1, 2]
    assert outcome.turn_rewards == {0: 0.0, 1: 0.0, 2: -0.5, 3: 0.0}
    assert outcome.reward == -0.5 and not outcome.truncated
    assert (outcome.metrics["num_code_blocks"], outcome.metrics["num_failed_code_blocks"]) == (3, 1)
    assert outcome.metrics["ended_by_answer"] == 1


def test_tools_are_functions_of_the_code(played):
    @tool("shop")
    class Shop:
        """A shop."""

        def __init__(self):
            self.sold = 0

        def prices(self, kind: str) -> dict[str, float]:
            """Prices of a kind."""
            return {"apple": 1.5, "pear": 2.0} if kind == "fruit" else {}

        def buy(self, name: str, count: int = 1) -> str:
            """Buys."""
            if count > 9:
                raise ToolError("there are only nine")
            self.sold += count
            return f"bought {count} {name}"

        def outcome(self):
            return float(self.sold == 3)

    code = "p = prices('fruit')\ncheap = min(p, key=p.get)\nprint(buy(cheap, count=3))"
    outcome, told, _ = played(
        block(code), block("buy('pear', 10)"), block("buy()"), "Done", tools=("shop",)
    )
    assert told[1] == "Output:\nbought 3 apple"
    assert told[2].endswith("ToolError: there are only nine")
    assert "name is missing" in told[3]
    assert (outcome.reward, outcome.success) == (1.0, True)
    assert outcome.metrics["num_tool_calls"] == 3


def test_code_that_hangs_or_dies_costs_its_turn(played):
    sandbox = SandboxSection(timeout_s=300)
    _, told, _ = played(
        block("x = 1\nimport os; os._exit(3)"),
        block("x"),
        "No.",
        sandbox=sandbox,
    )
    assert told[1].endswith("The interpreter has ended: variables are lost.")
    assert "A new interpreter has started" in told[2] and "NameError" in told[2]


def test_limits_end_an_attempt(played):
    def ended_by(outcome):
        return [
            name for name, metric in outcome.metrics.items() if name.startswith("ended") and metric
        ]

    assert ended_by(played(*[block("1")] * 9, max_turns=2)[0]) == ["ended_by_turns"]
    assert ended_by(played(*[block("1")] * 9, max_tokens=60)[0]) == ["ended_by_tokens"]

    outcome, told, _ = played(
        "So...\n```python\nx = ", "maybe", "<answer>1</answer>", final="answer_tag"
    )
    assert told[1].startswith("Error: the block of code is not closed")
    assert told[2].startswith("Write code, or give the final answer")
    assert ended_by(outcome) == ["ended_by_answer"]


def test_files_of_the_task_are_there_and_those_of_the_code_are_kept(played):
    given = {"in/table.csv": "a,b\n1,2\n", "raw.bin": {"base64": "AAEC"}}
    task = Task(id="t", query="Count.", metadata={"files": given})
    code = (
        "table, raw = open('in/table.csv').read(), open('raw.bin', 'rb').read()\n"
        "open('sum.txt', 'w').write(f'{table[-2]}{len(raw)}')"
    )
    _, told, turns = played(
        block(code),
        block("open('sum.txt').read()"),
        block("open('b', 'w'); raise ValueError"),
        "23",
        task=task,
    )
    assert told[2].endswith("'23'")
    assert "- in/table.csv (8 bytes)\n- raw.bin (3 bytes)" in turns[0].messages[0].content
    assert played.kept == {"sum.txt": b"23", "b": b""}


def test_files_are_kept_as_they_were_before_the_sandbox_was_lost(played):
    task = Task(id="t", query="Count.", metadata={"files": {"in.txt": "7"}})
    flood = "import os, time\nfor n in range(600): open(f'f{n}', 'w').close()\ntime.sleep(3600)"
    sandbox = SandboxSection(max_files=500, timeout_s=600)
    _, told, _ = played(
        block("open('kept', 'w').write('1')"),
        block(flood),
        block("open('later', 'w').write(open('in.txt').read())"),
        "No.",
        task=task,
        sandbox=sandbox,
    )
    assert "more than 500 files" in told[2] and "A new interpreter has started" in told[3]
    assert played.kept == {"kept": b"1", "later": b"7"}


@pytest.mark.slow
def test_what_does_not_fit_is_left_out(played):
    code = "for name in 'abc': open(name, 'wb').write(bytes(600 if name != 'b' else 100))"
    again = "import os; os.remove('a'); os.symlink('/etc/passwd', 'd'); open('c', 'w').write('!')"
    outcome, _, _ = played(block(code), "Done.", keep_files_kib=1)

    assert {name: len(one) for name, one in played.kept.items()} == {"a": 600, "b": 100}
    assert outcome.metrics["num_files_left_out"] == 1

    outcome, _, _ = played(block(code), block(again), "Done.", keep_files_kib=1)
    assert outcome.metrics["num_files_left_out"] == 0, "c fits now"
    assert {name: len(one) for name, one in played.kept.items()} == {"b": 100, "c": 1}

    outcome, _, _ = played(block(code), "Done.", keep_files_kib=0)
    assert outcome.metrics["num_files_left_out"] == 3
    assert played.kept == {}


@pytest.mark.parametrize(
    "files", [["a"], {"../a": ""}, {"/a": ""}, {"a": 1}, {"a": {"base64": "!"}}, {"": ""}]
)
def test_files_of_a_task_that_are_none_are_refused(played, files):
    with pytest.raises(ConfigError, match="task t: files"):
        played("No.", task=Task(id="t", query="Count.", metadata={"files": files}))


@pytest.mark.parametrize(
    ("text", "code", "unfinished"),
    [
        ("no code", None, False),
        ("```\nplain\n```", None, False),
        ("```python\na = 1\n```", "a = 1", False),
        ("```py\na\n```\nand\n```Python\nb\n```", "a\nb", False),
        ("```python\na\n```\n```python\nb", "a", True),
        ("```python", None, True),
        ("```pythonic\na\n```", None, False),
    ],
)
def test_code_is_what_stands_in_blocks(text, code, unfinished):
    assert (read_code(text), is_unfinished(text)) == (code, unfinished)


def test_every_tool_is_a_function_of_its_own_that_python_can_call(played):
    for number, name in enumerate(("look-up", "look_up", "7z", "import")):
        tool(name)(_giving(number))

    outcome, told, _ = played(
        block("look_up(), look_up_2(), _7z(), import_()"),
        "Done.",
        tools=("look-up", "look_up", "7z", "import"),
    )
    assert told[1] == "Output:\n(0, 1, 2, 3)" and outcome.metrics["num_tool_calls"] == 4


def _giving(number):
    def give() -> int:
        """Gives a number."""
        return number

    return give
