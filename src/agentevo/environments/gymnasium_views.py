"""What the player sees of a Gymnasium environment's state: a text, pictures before it, or an
observation in a form with images (observation.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from agentevo.environments.gymnasium_frames import checked_pixels
from agentevo.environments.observation import Observation, Shown, blocks_of, read_observation
from agentevo.errors import EnvironmentFailure

HIGHLIGHT = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def as_text(observation: object) -> str:
    """An observation of any Gymnasium space as text."""
    if isinstance(observation, dict):
        return "\n".join(f"{key}: {as_text(value)}" for key, value in observation.items())
    if isinstance(observation, tuple | list):
        return ", ".join(as_text(value) for value in observation)

    if isinstance(observation, np.ndarray):
        if observation.ndim == 0:
            return as_text(observation.item())
        return ("\n" if observation.ndim > 1 else " ").join(as_text(row) for row in observation)

    if isinstance(observation, float | np.floating):
        return f"{float(observation):.4g}"

    return str(observation)


def picture_as_text(picture: str) -> str:
    """A rendering without terminal colours. Coloured cells are in brackets."""
    return ESCAPE.sub("", HIGHLIGHT.sub(r"[\1]", picture)).rstrip("\n")


class GymnasiumView(NamedTuple):
    """What the player sees of a state."""

    text: str = ""
    images: tuple[np.ndarray, ...] = ()  # each uint8 [H, W, 3]
    form: Any = None
    """The observation itself, if it has a form with images."""

    def differs(self, other: GymnasiumView) -> bool:
        """Whether the player can see a difference. Unknown for a form, so true."""
        if self.text != other.text or self.form is not None:
            return True
        if len(self.images) != len(other.images):
            return True
        pairs = zip(self.images, other.images, strict=True)
        return not all(np.array_equal(image, before) for image, before in pairs)

    def with_problem(self, problem: str) -> Shown:
        """The view after the reason why the last action was invalid, which may be empty."""
        text = f"{problem}\n{self.text}" if problem else self.text
        if self.form is not None:
            reason = [{"type": "text", "text": f"{problem}\n"}] if problem else []
            return [*reason, *blocks_of(read_observation(self.form, "step"))]
        return Observation(text, list(self.images)) if self.images else text


def view_fields(
    name: str,
    observation: object,
    text_fields: Sequence[str],
    image_fields: Sequence[str],
    size: tuple[int, int] | None,
) -> GymnasiumView:
    """The fields of an observation of the environment `name`: one text alone, several as lines
    `field: value`, and the images, resized to the (width, height) `size`. Without `text_fields`,
    all but the images are written. Raises EnvironmentFailure for a field that is missing, and for
    an image of another form."""
    if not isinstance(observation, Mapping):
        raise EnvironmentFailure(
            f"gymnasium: an observation of {name} is a {type(observation).__name__}, which has no "
            "fields"
        )

    shown = text_fields or [field for field in observation if field not in image_fields]
    for field in (*shown, *image_fields):
        if field not in observation:
            raise EnvironmentFailure(
                f"gymnasium: an observation of {name} has no field {field!r}, only "
                f"{', '.join(observation)}"
            )

    what = f"gymnasium: the field {{!r}} of an observation of {name}"
    images = [checked_pixels(what.format(key), observation[key], size) for key in image_fields]
    texts = {field: observation[field] for field in shown}
    return GymnasiumView(as_text(texts[shown[0]] if len(shown) == 1 else texts), tuple(images))
