"""Walks on a map that nobody shows: where does one end that starts here and goes north, then west?

Twelve places, four directions, and always the same map, which a policy can only know by heart. An
answer is a sentence, in one of several wordings; which one a row has is chance.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

PLACES = (
    "old mill",
    "red barn",
    "stone bridge",
    "black lake",
    "green hill",
    "white church",
    "dark wood",
    "king inn",
    "sand beach",
    "iron gate",
    "long field",
    "blue tower",
)
DIRECTIONS = ("north", "east", "south", "west")
WORDINGS = (
    "the {}",
    "it ends at the {}",
    "you come to the {}",
    "at the {} it stops",
)
STEPS = 3
HELD_OUT = 0.25
"""Share of the walks that is never trained on."""
INSTRUCTION = "where does it end ?"


def _map() -> Mapping[tuple[str, str], str]:
    """Each direction leads from every place to another one."""
    rng = random.Random(0)
    ways = dict[tuple[str, str], str]()
    for direction in DIRECTIONS:
        order = list(PLACES)
        rng.shuffle(order)
        for place, after in zip(order, [*order[1:], order[0]], strict=True):
            ways[place, direction] = after

    return ways


WAYS = _map()


class Walk(NamedTuple):
    """From a place, in these directions."""

    start: str
    directions: tuple[str, ...]

    @property
    def places(self) -> list[str]:
        """Those that it comes to, in order."""
        places = [self.start]
        for direction in self.directions:
            places.append(WAYS[places[-1], direction])
        return places[1:]

    @property
    def query(self) -> str:
        ways = " ".join(f"then {direction}" for direction in self.directions)
        return f"start at the {self.start} {ways} {INSTRUCTION}"

    def answers(self) -> list[str]:
        """Every wording of the right one."""
        return [wording.format(self.places[-1]) for wording in WORDINGS]

    def thought(self) -> str:
        """The way, step by step."""
        steps = zip(self.directions, self.places, strict=True)
        return "<think> " + " ".join(f"{way} {place}" for way, place in steps) + " </think>"

    def reply(self, answer: str) -> str:
        """What to say for it."""
        return f"{self.thought()} <answer> {answer} </answer>"


def walks(*, held_out: bool, seed: object) -> Iterator[Walk]:
    """All of one part, in an order by the seed. Which part a walk is in depends on no seed."""
    every = [
        Walk(start, ways)
        for start in PLACES
        for ways in itertools.product(DIRECTIONS, repeat=STEPS)
    ]
    random.Random(1).shuffle(every)
    count = round(HELD_OUT * len(every))
    part = every[:count] if held_out else every[count:]
    random.Random(f"{seed}").shuffle(part)
    return iter(part)


def tasks(chosen: Sequence[Walk], *, wordings: int | None, seed: object) -> list[dict[str, Any]]:
    """Rows of a file. `wordings`: None for all, else so many of each answer, drawn by the seed."""
    rng = random.Random(f"tasks {seed}")
    rows = []
    for walk in chosen:
        answers = walk.answers()
        if wordings is not None:
            answers = rng.sample(answers, wordings)
        answer = answers[0] if len(answers) == 1 else answers
        rows.append({"id": f"walk:{walk.query}", "query": walk.query, "answer": answer})

    return rows


def demonstrations(chosen: Sequence[Walk], seed: object) -> list[dict[str, Any]]:
    """Conversations that show how to answer, each in one of the wordings."""
    rng = random.Random(f"shown {seed}")
    return [
        {
            "messages": [
                {"role": "user", "content": walk.query},
                {"role": "assistant", "content": walk.reply(rng.choice(walk.answers()))},
            ]
        }
        for walk in chosen
    ]


def words() -> list[str]:
    """Every word of the walks, with and without a blank before it."""
    said = [*PLACES, *DIRECTIONS, *WORDINGS, "start at the then", INSTRUCTION, "<think> <answer>"]
    return [" ".join(said), *" ".join(said).split()]
