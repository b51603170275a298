"""The task that every framework's example solves: a treasure hunt with one tool.

Some boxes hold a note that names the next box, one holds a treasure, all others are empty. The
agent is told where to begin, opens boxes, and answers with the treasure. A hunt takes two to four
turns, and what to do next stands in the newest result of the tool alone.
"""

from __future__ import annotations

import random
from typing import Any

COLOURS = ["red", "blue", "green", "black", "white", "brown", "pink", "golden"]
TREASURES = ["pearl", "coin", "ring", "crown", "ruby", "map", "lamp", "key"]
INSTRUCTIONS = "Follow the notes from box to box. Then answer with the treasure, in one word."
MAX_TURNS = 6
"""Calls of the model that an agent is allowed."""


def make_tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """Hunts over one to three boxes."""
    draw = random.Random(seed)
    tasks = []
    for number in range(count):
        boxes = draw.sample(COLOURS, draw.randint(1, 3))
        treasure = draw.choice(TREASURES)
        tasks.append(
            {
                "id": f"hunt-{seed}-{number}",
                "query": f"Begin with the {boxes[0]} box.",
                "answer": treasure,
                "boxes": boxes,
                "treasure": treasure,
            }
        )

    return tasks


class Hunt:
    """One attempt: the tool, and what the answer is worth."""

    def __init__(self, task: Any) -> None:
        self._boxes = list(task.metadata["boxes"])
        self._treasure = str(task.metadata["treasure"])

    def open_box(self, colour: str) -> str:
        """Opens the box of a colour.

        Args:
            colour: The colour of the box.
        """
        if colour not in self._boxes:
            return "The box is empty."
        later = self._boxes[self._boxes.index(colour) + 1 :]
        return f"A note: open the {later[0]} box." if later else f"You find a {self._treasure}."

    def reward(self, answer: Any) -> float:
        """1 for the treasure in one word, else 0."""
        return float(str(answer).strip().lower() == self._treasure)


OPEN_BOX = {
    "name": "open_box",
    "description": "Opens the box of a colour.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"type": "string"}},
        "required": ["colour"],
    },
}
"""The tool's schema, for clients that take no function."""
