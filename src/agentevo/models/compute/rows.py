"""Computes a model by its own forward pass: each sequence is a row, and transformers makes the
masks and positions.

`use_rows` chooses this way for models that AgentEvo's attention would compute differently from
transformers (models/compute/trial.py): recurrent layers, convolutions, sparse attention, and models
without transformers' attention interface. Rows of different length are padded on the right, where
no token sees the padding. If padding changes a model's numbers, only rows of equal length share a
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from agentevo.errors import ModelError
from agentevo.models.compute.trial import (
    LAYER_TYPES,
    evaluating,
    logprob_difference,
    trial_texts,
    trial_tolerance,
)
from agentevo.models.token_rows import causal_model

PADDED_LAYERS = LAYER_TYPES | {
    "attention",
    "conv",
    "hybrid",
    "linear_attention",
    "mamba",
    "mlp",
    "moe",
    "recurrent",
}
"""The layer types for which the trial's short text shows whether padding changes a number. Sparse
attention chooses tokens only in texts that are longer than its choice."""
UNSOUND = {
    "MoshiForCausalLM": "beyond its window, transformers' cache drops tokens that its pass sees",
}
"""Class -> why transformers computes it in two ways that differ. The trial's short text does not
show it."""
_KEY = "_agentevo_rows"
"""The attribute of a model that computes rows. Copies of the model keep it."""


@dataclass(frozen=True)
class RowSettings:
    """How a model computes rows."""

    reason: str
    """Why it does not compute the token tree."""
    pads: bool
    """Whether rows of different length can share a pass."""


class RowGroup(NamedTuple):
    """The rows of one pass, and the n places whose output is needed."""

    input_ids: torch.Tensor
    """[B, L], padded on the right."""
    rows: torch.Tensor
    """[n] int64"""
    columns: torch.Tensor
    """[n] int64"""


def row_settings(model: nn.Module) -> RowSettings | None:
    """How the model computes rows. None for a model that computes the token tree."""
    inner: Any = causal_model(model)  # type: ignore[arg-type]
    settings: RowSettings | None = vars(inner).get(_KEY)
    return settings


def shares_prefixes(model: nn.Module, wanted: bool) -> bool:
    """Whether the model's passes compute a common prefix of several sequences once. `wanted`:
    whether the recipe wants it (`prefix_merging`)."""
    return wanted and row_settings(model) is None


def use_rows(model: PreTrainedModel, reason: str) -> None:
    """Makes a model compute rows, in place. `reason`: why it does not compute the tree. Raises
    ModelError for a model in which a token sees later ones, whose positions do not begin at 0, or
    whose own pass fails."""
    inner = causal_model(model)
    if next(inner.parameters()).is_meta:
        vars(inner)[_KEY] = RowSettings(reason, pads=True)
        return

    name = type(inner).__name__
    text, *other_texts = trial_texts(model)
    longer = [*text[:3], *other_texts[0], *other_texts[1]]
    with evaluating(model), torch.enable_grad():  # as in `trial.py`, for packed weights
        try:
            alone = _text_logits(model, text)
            changed = _text_logits(model, [*text[:-1], other_texts[0][0]])
            in_company = _text_logits(model, text, longer)
            placed = _text_logits(model, text, with_positions=True)
            _check_gradient(alone, model)
        except Exception as error:
            cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ModelError(
                f"{name}: transformers' own pass fails ({cause}): choose another model"
            ) from error

    alone, changed, in_company, placed = (
        logits.detach() for logits in (alone, changed, in_company, placed)
    )
    # Both passes have the same shape, so a causal model rounds alike.
    if not logprob_difference(changed[:-1], alone[:-1]) <= trial_tolerance(model) / 10:
        raise ModelError(
            f"{name}: a token sees those after it (is_decoder in its config.json is false, or it "
            "is no causal language model): choose a decoder"
        )

    if not logprob_difference(placed, alone) <= trial_tolerance(model):
        raise ModelError(
            f"{name}: its positions do not begin at 0, or are counted without padding tokens, so a "
            "token's position in the engine would not be the one in training: choose a decoder"
        )

    if name in UNSOUND:
        raise ModelError(f"{name}: {UNSOUND[name]}: choose another model")

    kinds = set(getattr(inner.config.get_text_config(), "layer_types", None) or ())
    pads = kinds <= PADDED_LAYERS and (
        logprob_difference(in_company, alone) <= trial_tolerance(model)
    )
    vars(inner)[_KEY] = RowSettings(reason, pads)


def _text_logits(
    model: PreTrainedModel, text: list[int], *others: list[int], with_positions: bool = False
) -> torch.Tensor:
    """The logits [T, V] of a text in a pass with other texts. `with_positions`: the model gets the
    positions from 0 on, if its `forward` takes them."""
    group = padded_group([text, *others], [(0, column) for column in range(len(text))], model)
    inputs = {}
    if with_positions and "position_ids" in accepted_inputs(model):
        inputs["position_ids"] = torch.arange(len(text), device=group.rows.device).unsqueeze(0)

    logits: torch.Tensor = run_rows(model, group, **inputs).logits
    if logits.shape[:2] != (1, len(text)):
        raise ValueError(f"logits of the shape {list(logits.shape)} for {len(text)} tokens")
    return logits[0].float()


def _check_gradient(logits: torch.Tensor, model: PreTrainedModel) -> None:
    """Raises whatever the model's backward pass raises, and ValueError if a pass with gradients
    leaves its tensors in the modules: then the model can't be copied."""
    trained = next((p for p in model.parameters() if p.requires_grad), None)
    if trained is None or not logits.requires_grad:
        return

    torch.autograd.grad(logits.sum(), trained, allow_unused=True)
    for module_name, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                raise ValueError(f"a pass leaves its state in {module_name}.{name}")


def padded_group(
    texts: list[list[int]], places: list[tuple[int, int]], model: PreTrainedModel
) -> RowGroup:
    """The texts as a group on the model's device, with the output at these (row, column) places."""
    device = next(model.parameters()).device
    width = max(map(len, texts))
    ids = [[*text, *[0] * (width - len(text))] for text in texts]
    rows, columns = torch.tensor(places, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
    return RowGroup(torch.tensor(ids, device=device), rows, columns)


def accepted_inputs(model: PreTrainedModel) -> frozenset[str]:
    """The names of the arguments of the model's `forward`."""
    return _argument_names(type(causal_model(model)).forward)


@cache
def _argument_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(function).parameters)


def run_rows(model: PreTrainedModel, group: RowGroup, **inputs: Any) -> Any:
    """One pass of the model, differentiable. The logits of its result are [1, n, V], at the group's
    places; the output layer computes only these."""
    inputs = {"input_ids": group.input_ids, "use_cache": False, **inputs}
    layer = causal_model(model).get_output_embeddings()
    run: Any = model
    if layer is None:  # scores of tokens, as reward models give
        outputs = run(**inputs)
        outputs.logits = outputs.logits[group.rows, group.columns].unsqueeze(0)
        return outputs

    with _taking(layer, group):
        return run(**inputs)


@contextmanager
def _taking(layer: nn.Module, group: RowGroup) -> Iterator[None]:
    """While the context is open, the output layer gets only the hidden states [1, n, H] of the
    group's places."""

    def take(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0][group.rows, group.columns].unsqueeze(0), *inputs[1:])

    hook = layer.register_forward_pre_hook(take, prepend=True)
    try:
        yield
    finally:
        hook.remove()
