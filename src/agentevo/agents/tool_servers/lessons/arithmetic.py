"""Sums of small numbers, for the calculator; the answer is the number."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.agents.tool_servers.calculator import calculator
from agentevo.agents.tool_servers.lessons.lesson import LessonCall

_WORDS = {"*": "times", "+": "plus", "-": "minus"}


class Arithmetic:
    """See the module."""

    tool = "calculator"
    instructions = "Compute with the calculator. Then answer with the number alone."
    rewards = ("numeric",)

    def draw(self, draw: random.Random) -> dict[str, Any]:
        """See Lesson.draw."""
        first, second, third = (draw.randint(2, 9) for _ in range(3))
        first_sign = draw.choice("*+-")
        second_sign = draw.choice("+-")
        expression = f"{first} {first_sign} {second} {second_sign} {third}"
        query = f"What is {first} {_WORDS[first_sign]} {second} {_WORDS[second_sign]} {third}?"
        return {"query": query, "answer": calculator(expression), "expression": expression}

    def step(self, task: Mapping[str, Any], results: Sequence[str]) -> LessonCall | str:
        """See Lesson.step."""
        return (
            results[0] if results else LessonCall("calculator", {"expression": task["expression"]})
        )

    def corpus(self) -> list[dict[str, str]]:
        """See Lesson.corpus."""
        return []
