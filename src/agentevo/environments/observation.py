"""What an environment shows the player: a text, or text with images.

    "Box left of you."                                          a text
    Observation("Box left of you.", [frame])                    images, then the text
    [{"type": "text", "text": "Before"}, {"type": "image", "image": frame}]     content blocks
    {"obs_str": "Now: <image>", "multi_modal_data": {"<image>": [frame]}}       VAGEN's form

An image is anything that data/images.py reads, except paths: pixels of Pillow or numpy (uint8
[H, W, 3]), a file's bytes, a data URL, or a block of OpenAI, Anthropic or MCP.

Invariants. All four forms become a text, or a tuple of texts and `Picture`s in the player's order.
Only VAGEN's form has marks: elsewhere `<image>` in a text is text, such as that of a web page. The
form is checked at once, and pixels are decoded only where the policy sees them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from agentevo.data.images import is_image_part
from agentevo.data.message_images import MARK
from agentevo.errors import EnvironmentFailure, ImageError
from agentevo.types import ImagePart
from agentevo.types.content import Content, content_of

_TEXT_KEY = "obs_str"
_IMAGE_KEYS = ("multi_modal_data", "multi_modal_input")
"""VAGEN's key for the images, and that of its later versions."""
_FORMS = (
    "return a text, agentevo.Observation(text, images), a list of content blocks, or "
    '{"obs_str": "... <image>", "multi_modal_data": {"<image>": [...]}}'
)
_SPLIT = re.compile(f"({re.escape(MARK)})")


@dataclass(frozen=True)
class Observation:
    """What the player sees: the images, then the text."""

    text: str = ""
    images: Sequence[Any] = ()
    """Each as pixels of Pillow or numpy (uint8 [H, W, 3]), as a file's bytes or as a data URL."""


class Picture(NamedTuple):
    """An image of an observation, not decoded yet."""

    source: Any


Shown = str | Observation | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""An observation as environments return it."""
Seen = str | tuple[str | Picture, ...]
"""An observation after its form was read."""


def read_observation(observation: object, method: str) -> Seen:
    """The observation that the environment's `method` returned. Raises EnvironmentFailure for any
    form that the module does not list."""
    where = f"the observation of the environment's {method}()"
    if isinstance(observation, str):
        return without_half_pairs(observation)
    if isinstance(observation, Observation):
        return _joined([*_pictures(observation.images, where), _text(observation.text, where)])
    if isinstance(observation, Mapping) and _TEXT_KEY in observation:
        return _of_marks(observation, where)
    if isinstance(observation, list | tuple) and observation:
        return _joined([_of_block(block, where) for block in observation])

    what = f"a {type(observation).__name__}"
    if isinstance(observation, Mapping):
        what += f" with the keys {', '.join(map(str, observation)) or '(none)'}"
    elif isinstance(observation, list | tuple):
        what = f"an empty {type(observation).__name__}"
    raise EnvironmentFailure(f"{where} is {what}: {_FORMS}")


def has_form(observation: object) -> bool:
    """Whether a Gymnasium environment's observation has one of the forms with images, and is no
    value of a space."""
    if isinstance(observation, Mapping):
        return isinstance(observation.get(_TEXT_KEY), str)
    if isinstance(observation, list | tuple):
        return bool(observation) and all(
            isinstance(block, Mapping) and (is_image_part(block) or block.get("type") == "text")
            for block in observation
        )
    return isinstance(observation, Observation)


def blocks_of(seen: Seen) -> list[Mapping[str, Any]]:
    """The observation as content blocks."""
    parts = (seen,) if isinstance(seen, str) else seen
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else part.source
        if is_image_part(part.source)
        else {"type": "image", "image": part.source}
        for part in parts
    ]


def text_or_picture(
    kind: Literal["text", "image", "both"], write: Callable[[], str], draw: Callable[[], bytes]
) -> str | Observation:
    """The state as a text, as a picture (the bytes of a file), or as a picture and a text."""
    if kind == "text":
        return write()
    return Observation(write() if kind == "both" else "", [draw()])


def text_of(seen: Seen) -> str:
    """The text of an observation, without its images."""
    return seen if isinstance(seen, str) else "".join(p for p in seen if isinstance(p, str))


def read_pictures(seen: Seen, add_image: Callable[[Any, str], ImagePart], method: str) -> Content:
    """The observation as the content of a message. `add_image` decodes and keeps an image, as
    Policy.add_image does. Raises EnvironmentFailure for an image that can't be used."""
    if isinstance(seen, str):
        return seen

    parts: list[str | ImagePart] = []
    num_images = 0
    for part in seen:
        if isinstance(part, str):
            parts.append(part)
            continue

        num_images += 1
        where = f"image {num_images} of the environment's {method}()"
        try:
            parts.append(add_image(part.source, where))
        except ImageError as error:
            raise EnvironmentFailure(str(error)) from error
    return content_of(parts)


def without_half_pairs(text: str) -> str:
    """The text, with a question mark for each half of a surrogate pair, which no tokenizer
    accepts. A text that repeats a model's output may have one."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _joined(parts: Sequence[str | Picture]) -> Seen:
    """The parts, with neighbouring texts as one. Without an image, the text."""
    joined: list[str | Picture] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)

    if any(isinstance(part, Picture) for part in joined):
        return tuple(joined)
    return text_of(tuple(joined))


def _text(text: object, where: str) -> str:
    if not isinstance(text, str):
        raise EnvironmentFailure(f"the text in {where} is a {type(text).__name__}: give a text")
    return without_half_pairs(text)


def _pictures(images: object, where: str) -> list[Picture]:
    if not isinstance(images, list | tuple):
        raise EnvironmentFailure(
            f"the images in {where} are a {type(images).__name__}: give a list, also for one image"
        )
    return [_picture(image, where) for image in images]


def _picture(source: Any, where: str) -> Picture:
    held = source.values() if isinstance(source, Mapping) else (source,)
    path = next((value for value in held if isinstance(value, os.PathLike)), None)
    if path is not None:
        raise EnvironmentFailure(
            f"an image in {where} is the path {path}, and paths are not read here: give its bytes "
            "(path.read_bytes())"
        )
    return Picture(source)


def _of_block(block: Any, where: str) -> str | Picture:
    if isinstance(block, Mapping) and block.get("type") == "text":
        return _text(block.get("text"), where)
    if is_image_part(block):
        return _picture(block, where)

    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    raise EnvironmentFailure(
        f"{where} is a list, and has {kind!r} in the place of a content block: give "
        '{"type": "text", "text": ...} and {"type": "image", "image": ...}'
    )


def _of_marks(observation: Mapping[str, Any], where: str) -> Seen:
    """VAGEN's form. Images without any mark come before the text."""
    text = _text(observation[_TEXT_KEY], where)
    images: list[Picture] = []
    for key in _IMAGE_KEYS:
        media = observation.get(key) or {}
        if not isinstance(media, Mapping):
            raise EnvironmentFailure(
                f'{where}: {key} is a {type(media).__name__}: give {{"{MARK}": [...]}}'
            )

        other = [name for name in media if name != MARK and media[name]]
        if other:
            raise EnvironmentFailure(
                f'{where}: {key} has {other[0]}, and only images are read: give {{"{MARK}": [...]}}'
            )

        images += _pictures(media.get(MARK) or [], where)

    if not images or MARK not in text:
        return _joined([*images, text])

    pieces = _SPLIT.split(text)
    if pieces.count(MARK) != len(images):
        raise EnvironmentFailure(
            f"{where}: {_TEXT_KEY} has {pieces.count(MARK)} of the mark {MARK}, and the list has "
            f"{len(images)} of its images: write one mark for each image"
        )

    waiting = iter(images)
    return _joined([next(waiting) if piece == MARK else piece for piece in pieces])
