"""Thoughts in a generation prompt: opened, for the policy to finish, or empty."""

from __future__ import annotations

import re

from agentevo.models.tool_calls.parser import THOUGHTS

OPENS_THINKING = re.compile(r"<think>\s*$")
_EMPTY_THOUGHTS = [rf"{re.escape(begin)}\s*{re.escape(end)}" for begin, end in THOUGHTS.items()]
EMPTY_THOUGHT = re.compile(rf"(?:{'|'.join(_EMPTY_THOUGHTS)})\s*\Z")


def thought_of(text: str, reasoning: str | None, opening: str) -> tuple[str, str]:
    """Splits the assistant's text after a generation prompt that opened its thinking with `opening`
    into (thought, answer). The thought ends with </think>, and is empty if there is none. Lines
    separate them unless the opening itself ends without one (DeepSeek)."""
    thinking, closed, answer = text.partition("</think>")
    if closed and not reasoning:
        thought = thinking.removeprefix("<think>")
        if thought != thinking and opening.endswith("\n"):
            thought = thought.removeprefix("\n")
        return thought + closed, answer

    if not opening[-1:].isspace():
        return f"{reasoning or ''}</think>", answer if closed else text

    rest = answer.lstrip("\n") if closed else text
    return f"{(reasoning or '').strip(chr(10))}\n</think>\n\n", rest
