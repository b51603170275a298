"""An invented world: 2,000 people and towns that no model has heard of, what a passage says of
each, and questions over one and two of them.

    What is the home of FeSa?                 one passage says it
    What is the fruit of the home of FeSa?    one says where that is, another what grows there

Each syllable of a name is a token, and the name is one word for the search.

A fifth of the world is held out. Its people and towns know one another alone, so no question that
is trained on, and no answer, has anybody of them.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIZE = 2000
HELD_OUT = 0.2
"""Share of the entities that only held-out questions are about."""
TOWNS = 0.2
"""Share of the entities that are towns; the others are people."""
TOP_K = 1
"""Passages that a search finds."""
VALUES = {
    "craft": "weaver potter baker smith mason tanner cooper sailor",
    "animal": "goat horse mule cat dog goose sheep cow",
    "fruit": "plum pear apple cherry fig grape peach quince",
    "stone": "granite marble slate chalk flint basalt quartz gneiss",
}
ATTRIBUTES = {"person": ("craft", "animal"), "town": ("fruit", "stone")}
RELATIONS = {"person": {"home": "town"}, "town": {"mayor": "person"}}
"""One of each, so that a passage says one name besides its own: to choose among several by the word
before them is what policies of this size do not learn in a minute."""
_PLACES = 2
"""A name has so many syllables."""
_SYLLABLES = 45
"""Each syllable is one of so many."""


@dataclass(eq=False)
class Entity:
    """A person or a town."""

    name: str
    kind: str
    held_out: bool
    attributes: dict[str, str] = field(default_factory=dict)
    relations: dict[str, Entity] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, str]:
        """What its passage says."""
        return self.attributes | {name: other.name for name, other in self.relations.items()}

    @property
    def passage(self) -> dict[str, str]:
        """A line of the corpus. The text names the entity again, so that it is found before those
        that mention it."""
        said = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        return {"title": self.name, "text": f"Of {self.name}: {said}."}


@dataclass(frozen=True)
class Question:
    """`path`: the entities whose passages lead to the answer, in order."""

    path: tuple[Entity, ...]
    wanted: str
    """What of the last entity is asked for."""
    link: str = ""
    """The relation between the two entities."""

    @property
    def text(self) -> str:
        through = f"the {self.link} of " if self.link else ""
        return f"What is the {self.wanted} of {through}{self.path[0].name}?"

    @property
    def answer(self) -> str:
        return self.path[-1].facts[self.wanted]

    @property
    def wanted_of_each(self) -> tuple[str, ...]:
        """What of each entity of the path leads on."""
        return (self.link, self.wanted) if self.link else (self.wanted,)

    @property
    def num_hops(self) -> int:
        return len(self.path)

    def task(self) -> dict[str, Any]:
        """A row of a task file."""
        return {
            "id": f"{self.num_hops}hop: {self.text}",
            "query": self.text,
            "answer": self.answer,
            "hops": self.num_hops,
        }


class World:
    """All entities. The same seed and size give the same world."""

    def __init__(self, seed: int, size: int = SIZE) -> None:
        draw = random.Random(f"world {seed}")
        names = _names(draw, size)
        held_out = round(size * HELD_OUT)
        towns = round(1 / TOWNS)
        self.entities = [
            Entity(name, "person" if number % towns else "town", number < held_out)
            for number, name in enumerate(names)
        ]
        for entity in self.entities:
            for name in ATTRIBUTES[entity.kind]:
                entity.attributes[name] = draw.choice(VALUES[name].split())

        for part in (True, False):
            self._relate([one for one in self.entities if one.held_out is part], draw)

    @staticmethod
    def _relate(entities: list[Entity], draw: random.Random) -> None:
        """Relations within a part of the world, nobody's with himself."""
        of_kind = {kind: [one for one in entities if one.kind == kind] for kind in ATTRIBUTES}
        for entity in entities:
            for name, kind in RELATIONS[entity.kind].items():
                entity.relations[name] = draw.choice(
                    [one for one in of_kind[kind] if one is not entity]
                )

    def questions(self, *, held_out: bool, seed: int) -> Iterator[Question]:
        """Different ones, over one hop and over two in turn; a small world's come to an end."""
        draw = random.Random(f"questions {held_out} {seed}")
        about = [one for one in self.entities if one.held_out is held_out]
        asked: set[str] = set()
        number = misses = 0
        while misses < 1000:
            first = draw.choice(about)
            question = Question((first,), draw.choice(list(first.facts)))
            if number % 2:
                link, second = draw.choice(list(first.relations.items()))
                question = Question((first, second), draw.choice(list(second.facts)), link)

            misses = misses + 1 if question.text in asked else 0
            if not misses:
                asked.add(question.text)
                number += 1
                yield question

    def write_corpus(self, path: Path) -> Path:
        """The file that the tool `search` reads."""
        path.write_text("".join(json.dumps(one.passage) + "\n" for one in self.entities))
        return path


def _names(draw: random.Random, count: int) -> list[str]:
    """Different names of two syllables. Each syllable is in many names: a held-out name is new,
    and its syllables are not."""
    syllables = [first + second for first in "bcdfghjklmnprstvwz" for second in "aeiou"]
    chosen = draw.sample(syllables, _PLACES * _SYLLABLES)
    of_place = [chosen[place::_PLACES] for place in range(_PLACES)]
    names = ["".join(map(str.capitalize, parts)) for parts in itertools.product(*of_place)]
    if count > len(names):
        raise ValueError(f"there are {len(names)} names, not {count}: make the world smaller")
    return draw.sample(names, count)


def reading(world: World, seed: int) -> Iterator[dict[str, Any]]:
    """Conversations about nobody, without end, from which a policy learns to read: facts that are
    drawn at random, and the same facts in another order."""
    draw = random.Random(f"reading {seed}")
    names = [one.name for one in world.entities if not one.held_out]
    kinds = [(*ATTRIBUTES[kind], *RELATIONS[kind]) for kind in ATTRIBUTES]
    while True:
        facts = [
            f"{key} {draw.choice(VALUES[key].split() if key in VALUES else names)}"
            for key in draw.choice(kinds)
        ]
        draw.shuffle(facts)
        again = draw.sample(facts, len(facts))
        yield {
            "messages": [
                {"role": "user", "content": f"Of {draw.choice(names)}: {', '.join(facts)}."},
                {"role": "assistant", "content": f" {', '.join(again)}."},
            ]
        }
