"""Frames of Gymnasium environments that render as `rgb_array`.

No display is needed: SDL, which pygame draws with, gets its dummy drivers unless the process has
others. Other renderers need their own switch, such as MUJOCO_GL=egl.
"""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np

from agentevo.errors import ConfigError, EnvironmentFailure

RENDER_MODE = "rgb_array"
_NO_DISPLAY = {
    "SDL_VIDEODRIVER": "dummy",
    "SDL_AUDIODRIVER": "dummy",
    "PYGAME_HIDE_SUPPORT_PROMPT": "1",  # a greeting on the standard output
}
_rendered: set[str] = set()
"""The environments that have rendered a frame in this process."""


def check_frames(name: str, world: gymnasium.Env[Any, Any], reset: Any) -> None:
    """Renders one frame, once per process and `name`. `reset()` starts an episode. Raises
    ConfigError if the world can't render: a missing package, no display, another form."""
    if name in _rendered:
        return

    for variable, value in _NO_DISPLAY.items():
        os.environ.setdefault(variable, value)

    modes = world.metadata.get("render_modes") or ()
    if RENDER_MODE not in modes:
        raise ConfigError(
            f"gymnasium: {name} renders as {', '.join(modes) or 'nothing'}, and not as "
            f"{RENDER_MODE}: set environment.observation=auto"
        )

    try:
        reset()
        render_frame(name, world, None)
    except Exception as error:  # whatever a renderer raises without its package or a display
        raise ConfigError(
            f"gymnasium: {name} can't be rendered ({type(error).__name__}: {error}): install what "
            'it draws with, such as pygame by pip install "gymnasium[toy-text]" or '
            '"gymnasium[classic-control]"; MuJoCo needs MUJOCO_GL=egl without a display'
        ) from error

    _rendered.add(name)


def render_frame(
    name: str, world: gymnasium.Env[Any, Any], size: tuple[int, int] | None
) -> np.ndarray:
    """The frame as a copy, see `checked_pixels`."""
    return checked_pixels(f"gymnasium: a frame of {name}", world.render(), size)


def checked_pixels(what: str, pixels: Any, size: tuple[int, int] | None) -> np.ndarray:
    """The pixels as a copy, uint8 [H, W, 3], resized to the (width, height) `size`. Raises
    EnvironmentFailure for another form."""
    import PIL.Image

    is_array = isinstance(pixels, np.ndarray)
    if not is_array or pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        form = (
            f"{list(pixels.shape)} of {pixels.dtype}" if is_array else f"a {type(pixels).__name__}"
        )
        raise EnvironmentFailure(f"{what} is {form}, not uint8 [H, W, 3]")

    if size is None or size == pixels.shape[1::-1]:
        return pixels.copy()
    image = PIL.Image.fromarray(pixels).resize(size, PIL.Image.Resampling.BOX)
    return np.asarray(image)
