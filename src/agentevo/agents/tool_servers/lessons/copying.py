"""Notes in files, for `files`: a word must be copied into a new file. The word is in a note, or in
the file that the note names. The reward depends on the final state."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.agents.tool_servers.lessons.lesson import LessonCall

FILES = [
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "frost",
    "grove",
    "haven",
    "iris",
    "juniper",
    "kelp",
    "lilac",
    "maple",
    "north",
    "olive",
    "petal",
]
WORDS = [
    "anchor",
    "basket",
    "candle",
    "drum",
    "engine",
    "feather",
    "guitar",
    "hammer",
]
DONE = "Done."


class Copying:
    """See the module."""

    tool = "files"
    instructions = "Do what is asked with the files, then say so."
    rewards: tuple[str, ...] = ()

    def draw(self, draw: random.Random) -> dict[str, Any]:
        """See Lesson.draw."""
        note, second_note, target = (f"{name}.txt" for name in draw.sample(FILES, 3))
        words = draw.sample(WORDS, 2)
        files = {note: f"The word is {words[0]}.", second_note: f"The word is {words[1]}."}
        word = words[0]
        if draw.random() < 0.5:
            files[note] = f"Look into {second_note}."
            word = words[1]

        query = f"Write the word that {note} leads to into {target}."
        return {"query": query, "files": files, "expected": {target: word}, "note": note}

    def step(self, task: Mapping[str, Any], results: Sequence[str]) -> LessonCall | str:
        """See Lesson.step."""
        newest = results[-1] if results else f"Look into {task['note']}."
        if newest.startswith("Wrote"):
            return DONE

        leads = re.fullmatch(r"Look into (.*)\.", newest)
        if leads:
            return LessonCall("read_file", {"path": leads[1]})

        word = newest.removeprefix("The word is ").removesuffix(".")
        (target,) = task["expected"]
        return LessonCall("write_file", {"path": target, "text": word})

    def corpus(self) -> list[dict[str, str]]:
        """See Lesson.corpus."""
        return []
