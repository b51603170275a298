"""Compares questions as text, to keep held-out tasks out of training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

from agentevo.types import QUERY_MESSAGES, Task


def question_key(text: str) -> bytes | None:
    """A digest (16 bytes) of a question that ignores white space and case. None for a text without
    a character."""
    plain = " ".join(text.split()).casefold()
    if not plain:
        return None
    return hashlib.blake2b(plain.encode("utf-8", "replace"), digest_size=16).digest()


def question_of(task: Task) -> str:
    """The question that the task asks; empty if it has none."""
    if task.query is not None:
        return task.query
    questions = list(questions_in(task.metadata.get(QUERY_MESSAGES) or ()))
    return questions[-1] if questions else ""


def questions_in(messages: Iterable[object]) -> Iterator[str]:
    """The user's messages of a conversation."""
    for message in messages:
        if isinstance(message, Mapping) and message.get("role") == "user":
            yield str(message.get("content") or "")
