"""L0's comparison at a small scale: a tiny policy answers questions about files, and acts by
writing Python, or by calls in JSON. The tools are the same, as are limits, demonstrations and
training.

    python examples/search_and_code/code_or_calls.py
    python examples/search_and_code/code_or_calls.py --only   # the table of earlier results

Everybody begins with random weights, learns to read from the same texts, is shown how the same
questions are answered, and goes on by GRPO on further ones. The held-out questions have files
that no question before had.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentevo.agents.code_agent import system_message
from agentevo.agents.tools.toolbox import Toolbox
from agentevo.config.agents import CodeAgentSection
from agentevo.types import Task
from arms import Arm, Results, main
from files import COLOURS, ITEMS, KINDS, STEMS, WORDS, Question, questions, reading
from stages import Row, Size, imitate, make_policy, reinforce, taught, write_rows

SIZE = Size(reading=6400, steps=10, learning_rate=3e-4, held_out=150)
COMMON = {"tools": ["folder"], "final": "answer_tag", "max_turns": 4}
CALLS = {"type": "tool_agent", **COMMON}
CODE = {"type": "code_agent", **COMMON}
REPLY = 256
"""Tokens of a reply: five calls, or the code of a question about a table, and room to err."""


def calls_for(question: Question) -> Iterator[tuple[list[tuple[str, dict[str, Any]]], list[str]]]:
    """Turn by turn: the calls that a demonstration makes, and what they give."""
    if question.kind == "find":
        names = list(question.files)
        yield [("list_files", {})], [json.dumps(names)]
        yield [("read_file", {"name": name}) for name in names], list(question.files.values())
        return

    file, text = next(iter(question.files.items()))
    yield [("read_file", {"name": file})], [text]
    yield [(question.kind, {"numbers": question.numbers})], [question.answer]


def code_for(question: Question) -> str:
    """What a demonstration runs."""
    if question.kind == "find":
        return (
            "for name in list_files():\n"
            f'    if "{question.about[0]}" in read_file(name):\n'
            "        print(name)"
        )

    file, colour = question.about
    return (
        f'rows = [line.split(",") for line in read_file("{file}").splitlines()]\n'
        f'print({question.kind}([int(row[2]) for row in rows if row[1] == "{colour}"]))'
    )


def shown_calls(question: Question, schemas: Sequence[Mapping[str, Any]]) -> Row:
    """A demonstration for the tool agent."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    for calls, results in calls_for(question):
        made = [
            {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in calls
        ]
        messages.append({"role": "assistant", "content": "", "tool_calls": made})
        messages += [{"role": "tool", "content": result} for result in results]

    return {"messages": [*messages, _answered(question)], "tools": list(schemas)}


def shown_code(question: Question, system: str) -> Row:
    """A demonstration for the code agent."""
    return {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": question.text},
            {"role": "assistant", "content": f"```python\n{code_for(question)}\n```"},
            {"role": "user", "content": f"Output:\n{question.answer}"},
            _answered(question),
        ]
    }


def _answered(question: Question) -> dict[str, str]:
    return {"role": "assistant", "content": f"<answer> {question.answer} </answer>"}


def tool_schemas() -> list[Mapping[str, Any]]:
    """As the tool agent names them in its requests."""

    async def ask() -> list[Mapping[str, Any]]:
        toolbox = Toolbox(CodeAgentSection(**CODE).tools)
        try:
            async with toolbox.open(Task(id="none", metadata={"folder": {}}), 0) as tools:
                return list(tools.schemas)
        finally:
            await toolbox.close()

    return asyncio.run(ask())


def calls(folder: Path, seed: int, size: Size, _: int) -> Results:
    """By calls in JSON."""
    schemas = tool_schemas()
    shown = _questions("shown", seed, size.demonstrations)
    rows = [shown_calls(one, schemas) for one in shown]
    return _learn("calls", CALLS, rows, folder, seed, size)


def code(folder: Path, seed: int, size: Size, _: int) -> Results:
    """By code."""
    system = system_message(CodeAgentSection(**CODE), tool_schemas())
    shown = _questions("shown", seed, size.demonstrations)
    rows = [shown_code(one, system) for one in shown]
    return _learn("code", CODE, rows, folder, seed, size)


def _learn(
    name: str, agent: Mapping[str, Any], rows: Sequence[Row], folder: Path, seed: int, size: Size
) -> Results:
    tasks = {
        split: write_rows(
            folder / f"{split}.jsonl",
            (one.task(f"{split} {n}") for n, one in enumerate(_questions(split, seed, count))),
        )
        for split, count in (("train", size.questions), ("eval", size.held_out))
    }
    words = [" ".join([*COLOURS, *ITEMS, *WORDS, *STEMS]), *map(json.dumps, rows)]
    base = make_policy(folder / "base", size, words, seed)
    texts = list(itertools.islice(reading(seed), size.reading))
    reader = imitate(base, texts, folder / "reader", seed, batch=16, learning_rate=4e-3)
    policy = taught(reader, rows, folder / "sft", size, seed)
    before, after = reinforce(agent, policy, tasks, folder / "rl", size, seed, max_new_tokens=REPLY)
    return {f"{name}, SFT": before, f"{name}, SFT and RL": after}


def _questions(purpose: str, seed: int, count: int) -> list[Question]:
    return list(itertools.islice(questions(f"{purpose} {seed}"), count))


ARMS = [Arm("calls", calls), Arm("code", code)]

if __name__ == "__main__":
    sys.exit(main(__doc__, Path(__file__), ARMS, (*KINDS, "all"), 0, SIZE))
