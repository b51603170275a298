"""Rows with pictures, sounds or films. Models read only text here, and the text of such a row is
not enough to answer its question. So the row is a bad row, and its text is never trained on
alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentevo.data.row_report import RowError

_COLUMNS = ("images", "videos", "audios")
"""The columns that verl, LLaMA-Factory, ms-swift and TRL use for all media of a row."""
_COLUMN_OF_ONE = ("image", "video", "audio")
"""Columns in which a text can have another meaning, such as the name of a container image."""
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
    """Raises RowError for a row with pictures, sounds or films."""
    for key in (*_COLUMNS, *_COLUMN_OF_ONE):
        if _is_media(row.get(key), key in _COLUMNS):
            raise RowError(
                "media",
                f"the column {key} has pictures, sounds or films, and models read only text here: "
                "leave out the row, or leave out the column if the text is enough",
            )

    for key in _CONVERSATIONS:
        messages = row.get(key)
        for number, message in enumerate(messages if isinstance(messages, list) else (), start=1):
            kind = _other_kind(message)
            if kind is not None:
                raise RowError(
                    "media",
                    f"{key}: message {number} has a part of type {kind!r}, and models read only "
                    "text here: leave out the row",
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
    """The type of a message's part that is not a text. None if there is none."""
    content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return None
    kinds = [part.get("type") for part in content if isinstance(part, Mapping)]
    return next((str(kind) for kind in kinds if _KIND.search(str(kind))), None)
