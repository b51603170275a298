"""A shop's prices, for the database: a price is set to a number, or to the price of another item,
which must be read first. The reward depends on the final state."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.agents.tool_servers.lessons.lesson import LessonCall

THINGS = [
    "apple",
    "bread",
    "cheese",
    "egg",
    "fig",
    "honey",
    "lemon",
    "melon",
    "onion",
    "pear",
    "plum",
    "rice",
    "salt",
    "soup",
    "sugar",
    "tea",
]
DONE = "Done."


class Shop:
    """See the module."""

    tool = "database"
    instructions = "The table goods has the columns name and price. Do what is asked, then say so."
    rewards: tuple[str, ...] = ()

    def draw(self, draw: random.Random) -> dict[str, Any]:
        """See Lesson.draw."""
        names = draw.sample(THINGS, 4)
        prices = draw.sample(range(1, 10), 4)
        rows = ", ".join(f"('{name}', {price})" for name, price in zip(names, prices, strict=True))
        setup = f"CREATE TABLE goods (name TEXT, price INT); INSERT INTO goods VALUES {rows};"

        name, other_item = names[:2]
        if draw.random() < 0.5:
            price = draw.choice([number for number in range(1, 10) if number != prices[0]])
            query = f"Set the price of {name} to {price}."
        else:
            price = prices[1]
            query = f"Give {name} the price of {other_item}."

        solution = f"UPDATE goods SET price = {price} WHERE name = '{name}'"
        return {"query": query, "setup": setup, "solved_by": solution, "other": other_item}

    def step(self, task: Mapping[str, Any], results: Sequence[str]) -> LessonCall | str:
        """See Lesson.step."""
        changed = any(result.startswith("Done") for result in results)
        if changed:
            return DONE
        if task["query"].startswith("Give") and not results:
            sql = f"SELECT price FROM goods WHERE name = '{task['other']}'"
            return LessonCall("query", {"sql": sql})
        return LessonCall("execute", {"sql": task["solved_by"]})

    def corpus(self) -> list[dict[str, str]]:
        """See Lesson.corpus."""
        return []
