"""Attempts at one task for judges to look at."""

from __future__ import annotations

from agentevo.types import Message, Task, Trajectory, Turn

TASK = Task(id="t", query="How much is it worth?", answer="7")
ASKED = Message("user", TASK.query)


def turn(index, *messages, parent=None, tools=""):
    return Turn(
        index=index,
        parent=parent,
        prompt_ids=[1],
        completion_ids=[2],
        logprobs=[-1.0],
        versions=[0],
        finish_reason="stop",
        messages=list(messages),
        tools=tools,
    )


def attempt(name, *turns, **fields):
    return Trajectory(id=name, task_id="t", group_id="t/train@1", turns=list(turns), **fields)


def said(name, text, **fields):
    return attempt(name, turn(0, ASKED, Message("assistant", text)), **fields)


def group(*worths):
    return [said(f"a{n}", f"It is worth {worth:g}") for n, worth in enumerate(worths)]
