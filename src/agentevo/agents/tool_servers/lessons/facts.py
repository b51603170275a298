"""Questions about an invented world, for `search`: where a person lives, or what that city is known
for. The second kind needs two searches. The answer is a word."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.agents.tool_servers.lessons.lesson import LessonCall

_ENDS = ("dra", "lin", "mo", "nar", "ris")
FIRST = [start + ending for start in ("A", "Be", "Co", "Do") for ending in _ENDS]
LAST = [start + ending for start in ("Pe", "Qui", "Ro", "Sa") for ending in _ENDS]
CITIES = [
    "Arlon",
    "Bremo",
    "Calva",
    "Dorin",
    "Elsen",
    "Forta",
    "Galen",
    "Hoven",
    "Istra",
    "Jarno",
    "Kelso",
    "Lindo",
]
GOODS = [
    "bells",
    "boats",
    "books",
    "boots",
    "cheese",
    "clocks",
    "glass",
    "gloves",
    "hats",
    "honey",
    "knives",
    "lace",
]
WORLD = 17
"""The seed of the world, which is the same for all tasks."""
_LIVES = re.compile(r"lives in (\w+)")
_KNOWN = re.compile(r"known for (\w+)")


class Facts:
    """See the module."""

    tool = "search"
    instructions = "Search for what you need to know. Then answer with one word."
    rewards = ("exact_match",)

    def __init__(self) -> None:
        draw = random.Random(WORLD)
        self._homes = {
            f"{first_name} {last_name}": draw.choice(CITIES)
            for first_name in FIRST
            for last_name in LAST
        }
        self._goods = dict(zip(CITIES, draw.sample(GOODS, len(CITIES)), strict=True))

    def draw(self, draw: random.Random) -> dict[str, Any]:
        """See Lesson.draw."""
        person = draw.choice(list(self._homes))
        city = self._homes[person]
        if draw.random() < 0.5:
            query = f"In which city does {person} live?"
            answer = city
        else:
            query = f"What is the city known for where {person} lives?"
            answer = self._goods[city]

        return {"query": query, "answer": answer, "person": person}

    def step(self, task: Mapping[str, Any], results: Sequence[str]) -> LessonCall | str:
        """See Lesson.step."""
        if not results:
            return LessonCall("search", {"query": task["person"]})

        match = _KNOWN.search(results[-1]) or _LIVES.search(results[-1])
        if match is None:
            return "nothing"
        if len(results) == 1 and task["query"].startswith("What"):
            return LessonCall("search", {"query": f"{match[1]} known"})
        return match[1]

    def corpus(self) -> list[dict[str, str]]:
        """See Lesson.corpus."""
        people = [
            {"title": person, "text": f"{person} lives in {city}."}
            for person, city in self._homes.items()
        ]
        cities = [
            {"title": city, "text": f"{city} is known for {thing}."}
            for city, thing in self._goods.items()
        ]
        rows = people + cities
        return [{"id": str(number), **row} for number, row in enumerate(rows)]
