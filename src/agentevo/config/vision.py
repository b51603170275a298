"""Keys of models that see."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from agentevo.runtime.section import Section

VISION_PARTS: tuple[Literal["tower", "projector"], ...] = ("tower", "projector")
"""The parts of a model that sees, besides its language model."""


class VisionSection(Section):
    """How a model that sees is trained on images. For models with a vision tower only."""

    images: bool = True
    """Whether the model is shown images. With `false` it is a text model: Gemma 3 shares prefixes,
    and such models can be divided over processes (`trainer.parallel`). Their checkpoints still have
    the tower."""
    freeze: tuple[Literal["tower", "projector"], ...] = ()
    """Parts that stay as they are: the `tower`, which reads pixels, and the `projector`, which
    turns its results into the language model's features. Frozen parts need no gradients and no
    optimizer state. With adapters, every part without one is frozen anyway."""
    min_pixels: int | None = Field(default=None, ge=1)
    """Smaller images are scaled up to this number of pixels (Qwen models only). Default: the
    model's own."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Larger images are scaled down to this number of pixels (Qwen models only). It limits the
    tokens of an image. Default: the model's own. Both limits are saved with the checkpoints."""

    @model_validator(mode="after")
    def _limits_fit(self) -> Self:
        if (self.min_pixels or 0) > (self.max_pixels or math.inf):
            raise ValueError(
                f"min_pixels={self.min_pixels} is more than max_pixels={self.max_pixels}: "
                "exchange them"
            )
        return self

    @model_validator(mode="after")
    def _images_are_shown(self) -> Self:
        others = [name for name in self.chosen if name != "images"]
        if not self.images and others:
            raise ValueError(
                f"{others[0]} is for images, and images=false shows none: remove one of them"
            )
        return self

    @property
    def frozen(self) -> tuple[Literal["tower", "projector"], ...]:
        """The parts that stay as they are. A model that is shown no images trains neither."""
        return self.freeze if self.images else VISION_PARTS

    @property
    def chosen(self) -> list[str]:
        """The keys that are not at their defaults."""
        fields = type(self).model_fields
        return [name for name, field in fields.items() if getattr(self, name) != field.default]
