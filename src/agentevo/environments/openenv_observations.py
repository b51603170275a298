"""The observation of an OpenEnv server as the player sees it.

A single field is shown alone, several as `name: value` lines. The recipe's `image_fields` are
images: a file in base64, a data URL, or rows of pixels (integers [H][W][3] from 0 to 255), as
BrowserGym's screenshots have. They come before the text. A field may also be a list of content
blocks, which are shown in place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentevo.data.images import is_image_part, read_image
from agentevo.environments.observation import has_form
from agentevo.errors import EnvironmentFailure, ImageError, shown

_OWN_FIELDS = ("metadata", "done", "reward")
Blocks = list[Mapping[str, Any]]


def shown_observation(
    observation: Mapping[str, Any],
    fields: Sequence[str],
    image_fields: Sequence[str],
    *,
    is_last: bool,
) -> str | Blocks:
    """The observation as text, or as content blocks if it has images. `fields` are those that are
    shown besides the images; if empty, all are. `is_last`: the episode has ended, and needs no
    images. Raises EnvironmentFailure for a missing field, and for a value that is no image."""
    blocks: Blocks = []
    for name in image_fields:
        value = _field(observation, name)
        if value is not None:
            blocks.append(_image(name, value))
        elif not is_last:
            raise EnvironmentFailure(
                f"openenv: the observation's field {name!r} has no image: make the server send "
                "images, or leave the field out of environment.image_fields"
            )

    shown_fields = (
        {name: _field(observation, name) for name in fields}
        if fields
        else {
            name: value
            for name, value in observation.items()
            if name not in _OWN_FIELDS and value is not None
        }
    )
    blocks += _lines(
        {name: value for name, value in shown_fields.items() if name not in image_fields}
    )

    if any(is_image_part(block) for block in blocks):
        return blocks
    return "".join(block["text"] for block in blocks)


def _field(observation: Mapping[str, Any], name: str) -> Any:
    if name not in observation:
        raise EnvironmentFailure(
            f"openenv: the observation has no field {name!r}, only {', '.join(observation)}"
        )
    return observation[name]


def _lines(fields: Mapping[str, Any]) -> Blocks:
    if len(fields) == 1:
        return _blocks(next(iter(fields.values())))

    blocks: Blocks = []
    for name, value in fields.items():
        line_break = "\n" if blocks else ""
        blocks += [_text(f"{line_break}{name}: "), *_blocks(value)]
    return blocks


def _blocks(value: Any) -> Blocks:
    if isinstance(value, list) and has_form(value) and any(map(is_image_part, value)):
        return value
    return [_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image(name: str, value: Any) -> Mapping[str, Any]:
    """The value of an image field as a content block."""
    if isinstance(value, str):
        key = "image" if value[:5].lower() == "data:" else "base64"
        return {"type": "image", key: value}
    if is_image_part(value):
        return value

    if isinstance(value, list):
        where = f"openenv: the observation's field {name!r}"
        try:
            return {"type": "image", "bytes": read_image(_pixels(value), where).data}
        except ImageError as error:
            raise EnvironmentFailure(str(error)) from error

    raise EnvironmentFailure(
        f"openenv: the observation's field {name!r} is {shown(value)}, not an image: send a file "
        "in base64, a data URL or rows of pixels"
    )


def _pixels(rows: list[Any]) -> np.ndarray:
    """The rows as an array, of uint8 if they are numbers that fit. Raises ImageError."""
    try:
        pixels = np.array(rows)
    except (ValueError, TypeError) as error:
        raise ImageError(f"rows of pixels differ in length ({error}): send all of them") from error

    if pixels.dtype.kind == "i" and pixels.size and pixels.min() >= 0 and pixels.max() <= 255:
        return pixels.astype(np.uint8)
    return pixels
