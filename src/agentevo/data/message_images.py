"""Puts the images of rows and messages in their places, as parts by digest.

    {"query": "<image>What is it?", "images": [...]}           verl, TRL, VAGEN: a mark in the text
    {"messages": [{"content": [{"type": "image"}, ...]}], "images": [...]}     TRL: an empty part
    {"query": "What is it?", "image": {"bytes": ..., "path": ...}}   no mark: before the question
    {"messages": [{"content": [{"type": "image_url", ...}, ...]}]}   the part has the image itself

The marks of a row are as many as its column has images, and they are replaced in order. A mark in a
row without such a column is text, like any other word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from agentevo.data.images import LIMITS, ImageLimits, data_url, is_image_part, read_image
from agentevo.data.row_report import RowError
from agentevo.errors import ImageError
from agentevo.types import ImagePart, Message
from agentevo.types.images import ImageFile

MARK = "<image>"
COLUMNS = ("images", "image")
"""The columns that hold the images of a row."""
_FILE_KEYS = {"bytes", "path", "url", "array", "base64", "image_url", "source"}
_FILES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".jfif",
    ".gif",
    ".webp",
    ".bmp",
    ".tif",
    ".tiff",
    ".avif",
    ".heic",
    ".svg",
    ".mp4",
    ".webm",
    ".wav",
    ".mp3",
    ".flac",
)
_BEGINNINGS = ("data:", "http://", "https://", "file://", "iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
"""How texts of data URLs, of addresses, and of PNG, JPEG, GIF and WebP in base64 begin."""
_SPLIT = re.compile(f"({re.escape(MARK)})")


def is_media(value: Any, is_column_of_all: bool) -> bool:
    """Whether the value of a row's column is pictures, sounds or films. `is_column_of_all`: the
    column has no other meaning."""
    if value is None or isinstance(value, bool | int | float):
        return False
    if isinstance(value, str):
        if is_column_of_all:
            return bool(value.strip(" []"))
        return value.startswith(_BEGINNINGS) or value.lower().endswith(_FILES)
    if isinstance(value, Mapping) and not is_column_of_all:
        return not _FILE_KEYS.isdisjoint(value)
    if isinstance(value, list | tuple) and not is_column_of_all:
        return any(is_media(item, False) for item in value)
    return not isinstance(value, list | tuple | Mapping) or len(value) > 0


def folder_of(source: str) -> Path | None:
    """The folder to which paths of images in a file or folder of rows are relative."""
    path = Path(source).expanduser()
    return path.parent if path.is_file() else path if path.is_dir() else None


class ImageCollector:
    """Reads images and keeps each once, for the store."""

    def __init__(
        self,
        *,
        folder: Path | None = None,
        limits: ImageLimits = LIMITS,
        files: MutableMapping[str, ImageFile] | None = None,
    ) -> None:
        """`folder`: allows texts that are paths, relative to it. `files`: keeps the images, by
        default in memory."""
        self.folder = folder
        self.files: MutableMapping[str, ImageFile] = {} if files is None else files
        """Maps a digest to the image."""
        self._limits = limits

    def add(self, image: ImageFile) -> None:
        """Keeps an image that was read before."""
        if image.part.sha256 not in self.files:
            self.files[image.part.sha256] = image

    def read(self, source: Any, where: str) -> ImagePart:
        """The image in any form of data/images.py, as a part by digest. Raises ImageError."""
        image = read_image(source, where, folder=self.folder, limits=self._limits, known=self.files)
        self.add(image)
        return image.part


def inline_images(message: Message, files: Mapping[str, ImageFile]) -> dict[str, Any]:
    """The message as JSON can represent it, with each image as a data URL in OpenAI's form. `files`
    maps a digest to the image."""
    row: dict[str, Any] = msgspec.to_builtins(message)
    if not isinstance(message.content, str):
        row["content"] = [
            part_with_data(files[part.sha256])
            if isinstance(part, ImagePart)
            else msgspec.to_builtins(part)
            for part in message.content
        ]
    return row


def part_with_data(image: ImageFile) -> dict[str, Any]:
    """The image as a part in OpenAI's form, with a data URL. Raises ImageError for content that is
    no image."""
    url = data_url(image, f"the image {image.part.sha256[:12]}...")
    return {"type": "image_url", "image_url": {"url": url}}


def place_images(query: Any, columns: dict[str, Any], images: ImageCollector) -> Any:
    """The query of a row, as a list of messages whose images are parts by digest. A query without
    images is returned as it is. Removes the columns of images from `columns`. Raises RowError."""
    sources = _take_sources(columns)
    is_chat = isinstance(query, list) and all(isinstance(message, Mapping) for message in query)
    if not is_chat and not (sources and isinstance(query, str)):
        return query

    messages = [dict(message) for message in query] if is_chat else [_question(query)]
    has_parts = any(is_image_part(part) for message in messages for part in _parts(message))
    if not sources and not has_parts:
        return query

    try:
        parts = [images.read(source, f"image {n}") for n, source in enumerate(sources, start=1)]
        return _placed(messages, parts, images)
    except ImageError as error:
        raise RowError("image", str(error)) from error


def _take_sources(columns: dict[str, Any]) -> list[Any]:
    """The images of the row's columns."""
    sources: list[Any] = []
    for key in COLUMNS:
        if not is_media(columns.get(key), key == "images"):
            continue
        value = columns.pop(key)
        sources += value if isinstance(value, list | tuple) else [value]
    return sources


def _question(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _placed(
    messages: list[dict[str, Any]], parts: list[ImagePart], images: ImageCollector
) -> list[dict[str, Any]]:
    places = sum(_num_places(message) for message in messages)
    if parts and not places:
        asked = [message for message in messages if message.get("role") == "user"]
        if not asked:
            raise RowError("image", f"{len(parts)} images, and no message of the user to show them")
        asked[-1]["content"] = [
            *({"type": "image"} for _ in parts),
            *_split(asked[-1], marks=False),
        ]
        places = len(parts)

    if parts and places != len(parts):
        raise RowError(
            "image",
            f"{len(parts)} images, and {places} places for them ({MARK} or an empty part of type "
            "image): give one place for each, or none",
        )

    waiting = iter(parts)
    for number, message in enumerate(messages, start=1):
        content = _split(message, marks=bool(parts))
        if any(is_image_part(part) for part in content):
            where = f"message {number}"
            message["content"] = [_part(part, waiting, images, where) for part in content]

    return messages


def _num_places(message: Mapping[str, Any]) -> int:
    return sum(map(_is_empty, _split(message, marks=True)))


def _is_empty(part: Any) -> bool:
    """Whether a part stands for the next image of the row's column."""
    return is_image_part(part) and all(
        value is None for key, value in part.items() if key != "type"
    )


def _split(message: Mapping[str, Any], *, marks: bool) -> list[Any]:
    """The content as parts. With `marks`, a mark in a text is an empty part of an image."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else _parts(message)
    if not marks:
        return list(parts)

    split: list[Any] = []
    for part in parts:
        text = (
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        )
        if not isinstance(text, str) or MARK not in text:
            split.append(part)
            continue

        split += [
            {"type": "image"} if piece == MARK else {"type": "text", "text": piece}
            for piece in _SPLIT.split(text)
            if piece
        ]
    return split


def _part(part: Any, waiting: Iterable[ImagePart], images: ImageCollector, where: str) -> Any:
    """The part as JSON can represent it."""
    if not is_image_part(part) or "sha256" in part:
        return part

    if _is_empty(part):
        image = next(iter(waiting), None)
        if image is None:
            raise RowError("image", f"{where} has an empty part of type image: give its image")
    else:
        image = images.read(part, where)
    return {"type": "image", "sha256": image.sha256, "media_type": image.media_type}
