"""Rows with pictures, sounds or films. Models read only text here, and the text of such a row can't
answer its question: it is a bad row, and is never trained on as if it had none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentevo.data.row_report import RowError

_COLUMNS = ("images", "videos", "audios")
"""Where verl, LLaMA-Factory, ms-swift and TRL keep all of a row."""
_COLUMN_OF_ONE = ("image", "video", "audio")
"""A text there may be anything, such as the name of a container's image."""
_FILE_KEYS = {"bytes", "path", "url", "array"}
_CONVERSATIONS = ("messages", "conversations", "prompt", "query", "chosen", "rejected")
_KIND = re.compile("image|picture|video|audio|file")
_FILES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".gif",
    ".webp",
    ".bmp",
    ".mp4",
    ".webm",
    ".wav",
    ".mp3",
    ".flac",
)


def check_no_media(row: Mapping[str, Any]) -> None:
    """Raises RowError for a row with anything but text to look at or to listen to."""
    for key in (*_COLUMNS, *_COLUMN_OF_ONE):
        if _is_media(row.get(key), key in _COLUMNS):
            raise RowError(
                "media",
                f"the column {key} holds what is looked at or listened to, and models read text "
                "alone here: leave the row out, or the column where the text says all of it",
            )

    for key in _CONVERSATIONS:
        messages = row.get(key)
        for number, message in enumerate(messages if isinstance(messages, list) else (), start=1):
            kind = _other_kind(message)
            if kind is not None:
                raise RowError(
                    "media",
                    f"{key}: message {number} has a part of type {kind!r}, and models read text "
                    "alone here: leave the row out",
                )


def _is_media(value: Any, is_column_of_all: bool) -> bool:
    if value is None or isinstance(value, bool | int | float):
        return False
    if isinstance(value, str):
        if is_column_of_all:
            return bool(value.strip(" []"))
        return value.startswith("data:") or value.lower().endswith(_FILES)
    if isinstance(value, Mapping) and not is_column_of_all:
        return not _FILE_KEYS.isdisjoint(value)
    if isinstance(value, list | tuple) and not is_column_of_all:
        return any(_is_media(item, False) for item in value)
    return not isinstance(value, list | tuple | Mapping) or len(value) > 0


def _other_kind(message: Any) -> str | None:
    """The type of a part that is no text."""
    content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return None
    kinds = [part.get("type") for part in content if isinstance(part, Mapping)]
    return next((str(kind) for kind in kinds if _KIND.search(str(kind))), None)
