"""Edits of a text without a writer: a sentence is left out, moved, or added from a list. No
sentence is rephrased, and the seed determines the edit."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

_END = re.compile(r"(?<=[.!?])\s+|\n+")


def sentences_of(text: str) -> list[str]:
    """The sentences and lines of a text, without the space between them."""
    return [sentence for sentence in (part.strip() for part in _END.split(text)) if sentence]


def edit(text: str, phrases: Sequence[str], draw: random.Random) -> tuple[str, str] | None:
    """Another text, and a description of the edit. None if no edit is possible. The space between
    sentences (line breaks) is kept only if a sentence is added."""
    sentences = sentences_of(text)
    absent = [phrase for phrase in phrases if phrase not in text]
    kinds = (["add"] * 2 if absent else []) + (["drop", "move"] if len(sentences) > 1 else [])
    if not kinds:
        return None

    kind = draw.choice(kinds)
    if kind == "add":
        phrase = draw.choice(absent)
        if not text:
            return phrase, f"says: {phrase}"
        first = draw.random() < 0.5
        new = f"{phrase}\n{text}" if first else f"{text}\n{phrase}"
        return new, f"says {'first' if first else 'last'}: {phrase}"

    place = draw.randrange(len(sentences))
    sentence = sentences.pop(place)
    if kind == "drop":
        return "\n".join(sentences), f"without: {sentence[:100]}"

    target = draw.choice([number for number in range(len(sentences) + 1) if number != place])
    sentences.insert(target, sentence)
    return "\n".join(sentences), f"moved: {sentence[:100]}"
