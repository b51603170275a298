"""A family of questions with a dial: which keys of a telephone spell a word, `dag` -> `324`.

A longer word is harder: all of its keys have to be right. The proposer is given letters, and says
how many of them it asks for.
"""

from __future__ import annotations

import random

import agentevo

KEYS = dict(zip("abdegh", "223344", strict=True))
LONGEST = 3


def spelt(word: str) -> str:
    """The keys of a word."""
    return "".join(KEYS[letter] for letter in word)


def drawn(rng: random.Random, length: int) -> str:
    """A word of so many letters."""
    return "".join(rng.choice(list(KEYS)) for _ in range(length))


@agentevo.question_family("keypad")
class Keypad:
    """The first 1 to LONGEST letters of a word that is drawn for each prompt."""

    def prompt(self, rng: random.Random) -> str:
        """LONGEST letters, such as `dag?`."""
        return f"{drawn(rng, LONGEST)}?"

    def read(self, text: str, prompt: str) -> agentevo.Question:
        """A reply is how many of them."""
        if text not in [str(number) for number in range(1, LONGEST + 1)]:
            raise ValueError(f"no number from 1 to {LONGEST}")
        word = prompt[: int(text)]
        return agentevo.Question(word, spelt(word), difficulty=len(word))
