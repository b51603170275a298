"""The images in results of tools.

    MCP             {"type": "image", "data": ..., "mimeType": ...}, a resource with a blob
    OpenAI, TRL     {"type": "image_url", ...}, {"type": "image", "image": ...} among texts
    Python          a PIL image, or a list of texts and images

A result has its texts and images in their order (`ToolResult.parts`). Its `text` has a note in
place of each image, for policies that read text alone, for logs, and for code that calls the tool.
An image that can't be read becomes a text with the reason: a server's answer fails no call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentevo.agents.tools.tool import ToolResult
from agentevo.data.images import image_size, image_source, is_image_part, is_pillow, read_image
from agentevo.errors import ImageError
from agentevo.types.images import ImageFile

_WHERE = "the image"
MAX_PIXELS = 2**28
"""The most pixels of the images of a server's result; decoding them takes a core about 10 s."""


def result_of_parts(
    parts: Sequence[str | ImageFile], *, is_error: bool = False, reward: float = 0.0
) -> ToolResult:
    """A result of texts and images in this order. Texts without an image between them are joined by
    a line break."""
    text = "\n".join(part if isinstance(part, str) else image_note(part) for part in parts)
    joined: list[str | ImageFile] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += f"\n{part}"
        else:
            joined.append(part)

    has_images = any(isinstance(part, ImageFile) for part in joined)
    return ToolResult(
        text=text, is_error=is_error, reward=reward, parts=tuple(joined) if has_images else ()
    )


def image_note(image: ImageFile) -> str:
    """What a policy reads that can't see the image."""
    width, height = image_size(image, _WHERE)
    return f"[image, {image.part.media_type}, {width} x {height} pixels]"


def read_or_tell(source: Any, describe: Callable[[], str]) -> str | ImageFile:
    """The image, or why it can't be read, as a text that `describe` begins."""
    try:
        return read_image(source, _WHERE)
    except ImageError as error:
        return f"[{describe()}, left out: {error}]"


def limit_pixels(parts: Iterable[str | ImageFile]) -> list[str | ImageFile]:
    """The parts, which are read one after the other, up to MAX_PIXELS of images."""
    read: list[str | ImageFile] = []
    num_pixels = 0
    for part in parts:
        read.append(part)
        if isinstance(part, ImageFile):
            width, height = image_size(part, _WHERE)
            num_pixels += width * height
        if num_pixels > MAX_PIXELS:
            read.append(f"[the rest is left out: the images have more than {MAX_PIXELS:,} pixels]")
            break

    return read


def has_image(returned: Any) -> bool:
    """Whether what a Python function returned may have an image that was not read."""
    values: Sequence[Any] = returned if isinstance(returned, list | tuple) else [returned]
    if isinstance(returned, ToolResult):
        values = returned.parts
    return any(is_pillow(value) or is_image_part(value) for value in values)


def parts_of_returned(returned: Any) -> list[str | ImageFile] | None:
    """The texts and images that a Python function returned. None if there is no image. Raises
    ImageError for an image that can't be read, and TypeError for another value beside an image."""
    values = returned if isinstance(returned, list | tuple) else [returned]
    if not any(map(_is_image, values)):
        return None
    return [_part_of_returned(value) for value in values]


def _part_of_returned(value: Any) -> str | ImageFile:
    if _is_image(value):
        return read_image(value, _WHERE)

    text = (
        value.get("text") if isinstance(value, Mapping) and value.get("type") == "text" else value
    )
    if isinstance(text, str):
        return text
    raise TypeError(
        f"the tool returned a list of an image and a {type(value).__name__}: return texts, images "
        'and {"type": "text", "text": ...}'
    )


def _is_image(value: Any) -> bool:
    """Whether a value is an image. A mapping that only names one, by a URL or a path, is data."""
    if isinstance(value, ImageFile) or is_pillow(value):
        return True
    if not is_image_part(value):
        return False

    try:
        source = image_source(value, _WHERE)
    except ImageError:
        return False
    return not isinstance(source, str) or source[:5].lower() == "data:"
