"""Computes the log-probs that a model predicts, without its logits if possible.

A pass stops at the output layer: a hook takes the hidden states [R, H] that arrive there and passes
none to the layer. Everything before the layer is the model's own computation, so this works for
every architecture and with adapters. The effect of the model on its logits (a scale or a cap, under
any name in its config) is measured. The model receives known numbers in float64 in place of the
layer's output, and its result shows scale and cap. This is measured once for each model, and again
if the model's settings have changed.

An output layer that is more than one product (adapters on it, quantised, sharded, with hooks of
others), and a model that changes its logits in another way, are not handled: then the logits are
computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agentevo.models.compute.linear import FastLinear, PackedWeights
from agentevo.models.compute.rows import row_settings, run_groups, shares_states
from agentevo.models.token_rows import LOWEST, banned_tokens, causal_model, num_token_rows
from agentevo.models.vision.features import ImageEncoder, ImageFeatures, image_arguments
from agentevo.models.vision.keys import FeatureRows
from agentevo.training.kernels.linear_logprobs import linear_logprobs, linear_logprobs_and_squares
from agentevo.training.kernels.logprobs import selected_logprobs, sum_of_squares
from agentevo.training.kernels.stages import run_stage, sending_stage
from agentevo.training.kernels.token_masks import mask_scores
from agentevo.training.kernels.vocabulary import VocabularyLinear, slice_of

if TYPE_CHECKING:
    from agentevo.training.batching.packing import PackedBatch
    from agentevo.training.batching.row_groups import RowPasses

PROBES = (0.5, -1.0, 3.0, -12.0, 0.0, 40.0, 1e30)
"""The logits that the model receives for the measurement. The first one shows the scale, the last
one the cap, and all together show whether the model does anything else."""
HIGHEST_CAP = 1e9
_KNOWN: WeakKeyDictionary[nn.Module, tuple[object, OutputTail | None]] = WeakKeyDictionary()
"""Model -> its settings at the last measurement, and the measured tail."""


def token_logprobs(model: PreTrainedModel, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [M] of the batch's trained tokens, and entropies [R] of the nodes that predict
    them, in nats; differentiable."""
    if (stage := sending_stage(model)) is not None:
        return run_stage(model, stage, batch)

    output = linear_output(model, batch)
    if output is None:
        return selected_logprobs(
            allowed_logits(model, batch), batch.rows, batch.targets, batch.temperature
        )

    return linear_logprobs(**_arguments(output, model, batch))


def token_logprobs_and_squares(
    model: PreTrainedModel, batch: PackedBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [M] as in `token_logprobs`. Also, for each node that predicts, the sum of p^2 over
    the vocabulary [R], which is the probability that two samples agree. Without gradient."""
    if (stage := sending_stage(model)) is not None:
        return run_stage(model, stage, batch)

    output = linear_output(model, batch)
    if output is None:
        logits = allowed_logits(model, batch)
        logp, _ = selected_logprobs(logits, batch.rows, batch.targets, batch.temperature)
        return logp, sum_of_squares(logits, batch.temperature)

    return linear_logprobs_and_squares(**_arguments(output, model, batch))


def _arguments(output: LinearOutput, model: PreTrainedModel, batch: PackedBatch) -> dict[str, Any]:
    """The arguments of `linear_logprobs` for a batch."""
    return {
        "hidden": output.hidden,
        "weight": output.layer.weight,
        "bias": output.layer.bias,
        "rows": batch.rows,
        "targets": batch.targets,
        "temperature": batch.temperature,
        **output.tail._asdict(),
        "masks": batch.masks,
        "penalties": batch.penalties,
        "vocabulary_slice": slice_of(output.layer),
        "num_tokens": _limit(model),
        "banned": banned_tokens(model),
    }


def all_logits(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """The logits [R, V] of the nodes that predict, differentiable."""
    if (stage := sending_stage(model)) is not None:
        _, nodes = run_stage(model, stage, batch)
        return nodes[:, None].expand(-1, model.config.get_text_config().vocab_size)
    # [0] in place of `squeeze` would allocate another gradient as large as the logits.
    parts = [logits.squeeze(0) for logits in _run_passes(model, batch)]
    passes = _passes_of(model, batch)
    return parts[0] if passes is None else passes.join(parts)


def token_scores(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """The output [M] at the trained tokens themselves of a model that scores every token."""
    run: Any = model
    passes = _passes_of(model, batch, at_tokens=True)
    if passes is None:
        inputs = {name: value for name, value in batch.inputs.items() if name != "logits_to_keep"}
        inputs |= _image_inputs(model, batch)
        scores: torch.Tensor = run(**inputs).logits[0, batch.nodes, 0]
        return scores

    return passes.join([output.logits[0, :, 0] for output in _run_rows(model, batch, passes)])


def _passes_of(
    model: PreTrainedModel, batch: PackedBatch, *, at_tokens: bool = False
) -> RowPasses | None:
    """The passes of a model that computes rows; None for one that computes the batch's tree."""
    settings = row_settings(model)
    if settings is None:
        return None
    return batch.row_passes(settings.pads, shares=shares_states(model), at_tokens=at_tokens)


def _run_passes(model: PreTrainedModel, batch: PackedBatch) -> list[torch.Tensor]:
    """The logits [1, n, V] of each pass over the batch, differentiable."""
    run: Any = model
    passes = _passes_of(model, batch)
    if passes is None:
        return [run(**batch.inputs, **_image_inputs(model, batch)).logits]
    return [output.logits for output in _run_rows(model, batch, passes)]


def _run_rows(model: PreTrainedModel, batch: PackedBatch, passes: RowPasses) -> list[Any]:
    features = _features(model, batch)
    return run_groups(model, passes.groups, [_read(features, part) for part in passes.images])


def _features(model: PreTrainedModel, batch: PackedBatch) -> dict[str, ImageFeatures]:
    """Digest -> the features of the image, from one pass of the vision tower over the batch's
    images. The gradients of all places that show an image add up in its features."""
    images = batch.images
    if images is None:
        return {}
    features = ImageEncoder(model, images.provider.processor).encode(images.processed)
    return dict(zip(images.digests, features, strict=True))


def _image_inputs(model: PreTrainedModel, batch: PackedBatch) -> dict[str, Any]:
    """The arguments of the model's `forward` for the images of the batch's tree."""
    nodes = np.arange(batch.num_distinct)
    parts = [] if batch.images is None else batch.images.feature_rows(nodes)
    return image_arguments(model, batch.input_ids, _read(_features(model, batch), parts))


def _read(
    features: Mapping[str, ImageFeatures], parts: Sequence[FeatureRows]
) -> list[ImageFeatures]:
    return [features[part.digest].rows(part.start, part.stop) for part in parts]


def allowed_logits(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """`all_logits` under the batch's penalties, LOWEST for ids that are no tokens and for tokens
    that are banned or that a grammar forbids."""
    logits = all_logits(model, batch)
    if (num_tokens := _limit(model)) is not None:
        unused = torch.arange(logits.shape[-1], device=logits.device) >= num_tokens
        logits = logits.float().masked_fill(unused, LOWEST)
    if batch.penalties is not None:
        logits = batch.penalties.apply(logits.float())
    if banned := banned_tokens(model):
        columns = torch.tensor(banned, device=logits.device)
        logits = logits.float().index_fill(-1, columns, LOWEST)
    return logits if batch.masks is None else mask_scores(logits.float(), batch.masks)


def _limit(model: PreTrainedModel) -> int | None:
    """The number of ids that are tokens; None if all are."""
    num_tokens = num_token_rows(model)
    return num_tokens if num_tokens < model.config.get_text_config().vocab_size else None


class OutputTail(NamedTuple):
    """A model's logits as a function of its output layer's products x: scale * x, or cap *
    tanh(scale * x / cap)."""

    softcap: float | None
    logit_scale: float


class LinearOutput(NamedTuple):
    """The factors of the product that gives the logits."""

    hidden: torch.Tensor
    """[R, H]"""
    layer: nn.Linear
    tail: OutputTail


class OutputListener:
    """While it is open, records the input of the model's output layer in the passes over one
    batch."""

    def __init__(self, model: PreTrainedModel, batch: PackedBatch) -> None:
        self.layer: Any = causal_model(model).get_output_embeddings()
        self._passes = _passes_of(model, batch)
        self._recorded: list[torch.Tensor] = []

    def __enter__(self) -> OutputListener:
        self._hook = self.layer.register_forward_pre_hook(self._record)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _record(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._recorded.append(inputs[0].squeeze(0))
        return None

    @property
    def hidden(self) -> torch.Tensor:
        """The last hidden states [R, H] at the nodes that predict, of the newest passes."""
        if self._passes is None:
            return self._recorded[-1]
        return self._passes.join(self._recorded[-len(self._passes.groups) :])


class _Interceptor(OutputListener):
    """Intercepts the hidden states before the output layer, and returns `answer` [V] to the model
    as logits [1, 1, V]."""

    def __init__(self, model: PreTrainedModel, batch: PackedBatch, answer: torch.Tensor) -> None:
        super().__init__(model, batch)
        self.answer = answer

    def __enter__(self) -> OutputListener:
        self._answer_hook = self.layer.register_forward_hook(
            lambda *_: self.answer.to(self._recorded[-1].device).view(1, 1, -1)
        )
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        self._answer_hook.remove()

    def _record(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        super()._record(layer, inputs)
        return (inputs[0][..., :0, :], *inputs[1:])


def linear_output(model: PreTrainedModel, batch: PackedBatch) -> LinearOutput | None:
    """Runs the model's pass up to its output layer, differentiable. None if the logits are not just
    that layer's products, scaled and capped."""
    layer = causal_model(model).get_output_embeddings()
    is_known, tail = _known_tail(model)
    if not _is_one_product(layer) or (is_known and tail is None):
        return None

    answer = _zeros(layer) if is_known else _probes(layer)
    hidden, logits = _intercept(model, layer, batch, answer)
    if not is_known:
        tail = tail_of(answer, logits)
        _KNOWN[model] = (_settings(model), tail)

    fits = hidden.dtype == layer.weight.dtype and hidden.device == layer.weight.device
    return None if tail is None or not fits else LinearOutput(hidden, layer, tail)


def last_hidden(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """The hidden states [R, H] that go into the output layer at the nodes that predict,
    differentiable. If the layer is one product, no logits are computed."""
    layer = causal_model(model).get_output_embeddings()
    if _is_one_product(layer):
        return _intercept(model, layer, batch, _zeros(layer))[0]
    with OutputListener(model, batch) as listener:
        _run_passes(model, batch)
    return listener.hidden


def _intercept(
    model: PreTrainedModel, layer: nn.Module, batch: PackedBatch, answer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states [R, H], and the model's result for `answer` in place of logits."""
    if torch.is_grad_enabled() and isinstance(layer, PackedWeights):
        layer.drop()  # as its own pass with gradients would
    with _Interceptor(model, batch, answer) as interceptor:
        logits = _run_passes(model, batch)[0]
    return interceptor.hidden, logits


def _known_tail(model: PreTrainedModel) -> tuple[bool, OutputTail | None]:
    """Whether the tail was measured under the model's current settings, and the tail."""
    settings, tail = _KNOWN.get(model, (None, None))
    return (True, tail) if settings is not None and settings == _settings(model) else (False, None)


def _settings(model: PreTrainedModel) -> object:
    """Everything that a tail could depend on: the numbers in config and model, and the replaced
    `forward` methods and hooks in the model's pass."""
    inner = causal_model(model)
    holders = (inner.config.get_text_config(), inner)
    numbers = [
        {key: value for key, value in vars(holder).items() if type(value) in (int, float)}
        for holder in holders
    ]
    hooks = [
        (vars(module).get("forward"), *module._forward_hooks.values()) for module in (model, inner)
    ]
    return numbers, hooks


def tail_of(probes: torch.Tensor, logits: torch.Tensor) -> OutputTail | None:
    """The tail that turns probes [V], PROBES repeated, into logits [1, 1, V]; None if it is neither
    scale nor cap."""
    if logits.numel() != len(probes):
        return None

    answers = logits.detach().to("cpu", torch.float64).flatten()
    first = float(answers[0])
    last = float(answers[len(PROBES) - 1])
    softcap = last if 0 < last < HIGHEST_CAP else None
    if softcap is not None and not abs(first) < softcap:
        return None

    bent = first if softcap is None else softcap * math.atanh(first / softcap)
    tail = OutputTail(softcap, bent / PROBES[0])
    scaled = probes * tail.logit_scale
    expected = scaled if softcap is None else softcap * torch.tanh(scaled / softcap)
    return tail if torch.allclose(answers, expected, rtol=1e-6, atol=1e-6) else None


def _probes(layer: Any) -> torch.Tensor:
    """PROBES, repeated to [V] float64."""
    num_tokens = layer.weight.shape[0]
    return torch.tensor(PROBES, dtype=torch.float64).repeat(-(-num_tokens // len(PROBES)))[
        :num_tokens
    ]


def _zeros(layer: Any) -> torch.Tensor:
    """Zeros [V], if nothing has to be measured."""
    return torch.zeros(len(layer.weight), device=layer.weight.device)


def _is_one_product(layer: nn.Module) -> bool:
    """Whether the layer is a plain linear layer that is large enough to be measured and not
    modified by other code."""
    if (
        type(layer) not in (nn.Linear, FastLinear, VocabularyLinear)
        or layer._forward_hooks
        or layer._backward_hooks
        or "forward" in vars(layer)
    ):
        return False

    weight: Any = layer._parameters["weight"]
    return type(weight) in (nn.Parameter, DTensor) and weight.shape[0] >= len(PROBES)
