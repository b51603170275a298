"""The first phase of publishing: converts new weights to the engine's form and checks all of them,
before the engine changes.

Invariant: copying `VerifiedWeights` into the model that they were verified for can't fail halfway.
Names, shapes, device and dtype are the model's, and every number is finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from agentevo.errors import EngineError
from agentevo.inference.engine import Weights
from agentevo.models.compute.thread_settings import own_torch_state
from agentevo.runtime.event_loop import in_thread


class VerifiedWeights(dict[str, torch.Tensor]):
    """Weights that `verify_weights` has accepted: parameter name -> tensor on the parameter's
    device and of its dtype. `model`: the model that they fit."""

    def __init__(self, model: PreTrainedModel, tensors: Weights) -> None:
        super().__init__(tensors)
        self.model = model

    @own_torch_state()
    @torch.no_grad()
    def swap_in(self) -> None:
        """The second phase of publishing: copies the weights into the model."""
        parameters = dict(self.model.named_parameters())
        for name, tensor in self.items():
            parameters[name].copy_(tensor)


class PublishingEngine:
    """What engines have in common: they check weights before they serve them, and count publishes.
    `like`: the model whose names and shapes the weights have."""

    def __init__(self, like: PreTrainedModel) -> None:
        self._like = like
        self._publishes = self._refused_publishes = 0
        self._swap_s = 0.0

    def verify(self, weights: Weights) -> VerifiedWeights:
        """See UpdatableEngine.verify and `verify_weights`."""
        try:
            return verify_weights(self._like, weights)
        except EngineError:
            self._refused_publishes += 1
            raise

    async def _verify_in_thread(self, weights: Weights) -> VerifiedWeights:
        if isinstance(weights, VerifiedWeights):
            return weights
        return await in_thread(self.verify, weights)

    @contextmanager
    def _counting_publish(self) -> Iterator[None]:
        """Counts the block as a publish, or as a refused one if it raises."""
        is_published = False
        try:
            yield
            is_published = True
        finally:
            self._publishes += is_published
            self._refused_publishes += not is_published

    def _publish_stats(self) -> dict[str, float]:
        return {
            "engine/publishes": self._publishes,
            "engine/refused_publishes": self._refused_publishes,
            "engine/swap_s": self._swap_s,
        }


def check_publish(
    version: int, serving: int, weights: VerifiedWeights | None, model: PreTrainedModel
) -> None:
    """Raises EngineError for a version that is not newer than the serving one, and for weights that
    were verified for another model than the engine's. `weights` None: they were changed in
    place."""
    if version <= serving:
        raise EngineError(
            f"weights version {version} is not newer than {serving}: versions only grow"
        )

    if weights is not None and weights.model is not model:
        raise EngineError(
            "weights refused, nothing changed: they were verified for another engine's model: "
            "verify them on this engine"
        )


def verify_weights(model: PreTrainedModel, weights: Weights) -> VerifiedWeights:
    """Checks weights for a model. Raises EngineError for unknown or missing names, other shapes,
    and numbers that are not finite (also after rounding to the model's dtype). Untrained parameters
    may be missing. Changes nothing. Any thread may call it."""
    check_shapes(model, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    parameters = dict(model.named_parameters())
    fitted = dict[str, torch.Tensor]()
    for name, tensor in weights.items():
        fitted[name] = tensor.detach().to(parameters[name])
        if not torch.isfinite(fitted[name]).all():
            raise EngineError(f"weights refused, nothing changed: {name} holds NaN or infinity")

    return VerifiedWeights(model, fitted)


def check_shapes(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises EngineError for unknown or missing names, and for shapes that differ from the
    model's."""
    parameters = dict(model.named_parameters())
    unknown = sorted(set(shapes) - set(parameters))
    missing = sorted(
        {name for name, parameter in parameters.items() if parameter.requires_grad} - set(shapes)
    )
    if unknown or missing:
        raise EngineError(
            f"weights refused, nothing changed: unknown {unknown[:3]}, missing {missing[:3]}: "
            "publish the model's own parameter names"
        )

    for name, shape in shapes.items():
        if shape != parameters[name].shape:
            raise EngineError(
                f"weights refused, nothing changed: {name} has shape {shape}, the engine "
                f"{tuple(parameters[name].shape)}"
            )
