"""Generated files, and questions that reading them answers: the total or the largest number of some
rows of a table, or which note has a word. And the tools for that, which an agent calls as JSON or
as functions of its code.

Every question has files of its own, which are drawn anew for it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import agentevo

COLOURS = ["red", "green", "blue", "white", "black"]
ITEMS = [
    "plum",
    "pear",
    "apple",
    "cherry",
    "fig",
    "grape",
    "peach",
    "quince",
    "melon",
    "lemon",
    "berry",
    "olive",
]
WORDS = [
    "lantern",
    "anchor",
    "saddle",
    "candle",
    "mirror",
    "kettle",
    "basket",
    "hammer",
    "ribbon",
    "whistle",
    "barrel",
    "carpet",
]
STEMS = ["north", "south", "east", "west", "upper", "lower", "old", "new"]
"""Names of files."""
ROWS = (5, 8)
"""Fewest and most rows of a table."""
NOTES = (3, 5)
"""Fewest and most notes in a folder."""
KINDS = ("total", "largest", "find")


@agentevo.tool("folder")
class Folder:
    """The files of one task."""

    def __init__(self, task: Any) -> None:
        self._files = dict(task.metadata["folder"])

    def list_files(self) -> list[str]:
        """The names of all files."""
        return list(self._files)

    def read_file(self, name: str) -> str:
        """What a file holds.

        Args:
            name: The name of the file.
        """
        if name not in self._files:
            raise agentevo.ToolError(f"there is no file {name}")
        return self._files[name]

    def total(self, numbers: list[int]) -> int:
        """The sum of numbers.

        Args:
            numbers: The numbers.
        """
        return sum(numbers)

    def largest(self, numbers: list[int]) -> int:
        """The largest of numbers.

        Args:
            numbers: The numbers, one at least.
        """
        if not numbers:
            raise agentevo.ToolError("there are no numbers")
        return max(numbers)


@dataclass(frozen=True)
class Question:
    """`about`: the file of a table and the colour of its rows, or the word of a note."""

    kind: str
    about: tuple[str, ...]
    files: dict[str, str]

    @property
    def text(self) -> str:
        if self.kind == "find":
            return f"Which file has the word {self.about[0]}?"
        return f"What is the {self.kind} price of the {self.about[1]} rows of {self.about[0]}?"

    @property
    def numbers(self) -> list[int]:
        """The prices that a question of a table is about."""
        rows = [line.split(",") for line in self.files[self.about[0]].splitlines()[1:]]
        return [int(price) for _, colour, price in rows if colour == self.about[1]]

    @property
    def answer(self) -> str:
        if self.kind == "find":
            return next(name for name, text in self.files.items() if self.about[0] in text.split())
        return str(sum(self.numbers) if self.kind == "total" else max(self.numbers))

    def task(self, name: str) -> dict[str, Any]:
        """A row of a task file."""
        return {
            "id": f"{self.kind}: {name}",
            "query": self.text,
            "answer": self.answer,
            "folder": self.files,
        }


def questions(seed: str) -> Iterator[Question]:
    """Without end; of each kind in turn."""
    draw = random.Random(f"files {seed}")
    while True:
        for kind in KINDS:
            yield _finding(draw) if kind == "find" else _of_a_table(kind, draw)


def reading(seed: int) -> Iterator[dict[str, Any]]:
    """Conversations without end, from which a policy learns to read before it is shown anything: a
    number, a file or a word, or some with a name each, and the same again in another order."""
    draw = random.Random(f"reading {seed}")
    words = [*COLOURS, *ITEMS, *WORDS, *STEMS]
    while True:
        count = draw.choice((1, 1, 3, 5))
        said = [
            draw.choice((str(draw.randint(1, 250)), _file(draw), draw.choice(WORDS)))
            for _ in range(count)
        ]
        if count > 1:
            names = draw.sample(words, count)
            said = [f"{name} {one}" for name, one in zip(names, said, strict=True)]

        again = draw.sample(said, count)
        yield {
            "messages": [
                {"role": "user", "content": f"{', '.join(said)}."},
                {"role": "assistant", "content": f" {', '.join(again)}."},
            ]
        }


def _file(draw: random.Random) -> str:
    return f"{draw.choice(STEMS)}.{draw.choice(('csv', 'txt'))}"


def _of_a_table(kind: str, draw: random.Random) -> Question:
    colours = draw.sample(COLOURS, 3)
    rows = [
        (item, draw.choice(colours), draw.randint(1, 49))
        for item in draw.sample(ITEMS, draw.randint(*ROWS))
    ]
    lines = ["item,colour,price", *(f"{item},{colour},{price}" for item, colour, price in rows)]
    file = f"{draw.choice(STEMS)}.csv"
    return Question(kind, (file, draw.choice(rows)[1]), {file: "\n".join(lines)})


def _finding(draw: random.Random) -> Question:
    stems = draw.sample(STEMS, draw.randint(*NOTES))
    words = iter(draw.sample(WORDS, 2 * len(stems)))
    files = {f"{stem}.txt": f"a {next(words)} and a {next(words)}" for stem in stems}
    text = files[draw.choice(list(files))]
    return Question("find", (text.split()[draw.choice((1, 4))],), files)
