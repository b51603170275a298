"""Computes a model by its own forward pass: each sequence is a row, and transformers makes the
masks and positions.

`use_rows` chooses this way for models that AgentEvo's attention would compute differently from
transformers (models/compute/trial.py): recurrent layers, convolutions, sparse attention, and models
without transformers' attention interface. Rows of different length are padded on the right, where
no token sees the padding. If padding changes a model's numbers, only rows of equal length share a
pass.

A prefix that several rows share is computed once where the model's state allows it: a pass over the
prefix, and a pass over the rest of the rows that continues from the prefix's state
(`RowGroup.parent`). Gradients flow back through the state. `use_rows` compares both computations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from agentevo.errors import ModelError
from agentevo.models.compute.activations import CheckpointedLayer
from agentevo.models.compute.image_trial import (
    ImageText,
    encode_detached,
    own_image_logits,
    trial_image_text,
)
from agentevo.models.compute.row_states import CACHE_NAMES, fork_state, state_of
from agentevo.models.compute.trial import (
    LAYER_TYPES,
    OTHER_TOKENS,
    evaluating,
    logprob_difference,
    model_name,
    trial_texts,
    trial_tolerance,
)
from agentevo.models.token_rows import causal_model
from agentevo.models.vision.features import (
    ImageFeatures,
    image_arguments,
    needs_types,
    position_ids,
    type_ids,
)
from agentevo.models.vision.parts import processor_of

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
    shares: bool
    """Whether a pass can continue from the state of a prefix, with its gradient."""


class RowGroup(NamedTuple):
    """The rows of one pass, and the n places whose output is needed."""

    input_ids: torch.Tensor
    """[B, L], padded on the right."""
    rows: torch.Tensor
    """[n] int64"""
    columns: torch.Tensor
    """[n] int64"""
    parent: int | None = None
    """The number of the pass from whose state all rows continue."""
    start: int = 0
    """The number of tokens of that state."""
    is_parent: bool = False
    """Whether other passes continue from the state of this one, which has one row."""
    positions: torch.Tensor | None = None
    """[A, B, L] int64: the positions of the tokens on A axes (models/vision/positions.py). None:
    the number of tokens before each."""
    types: torch.Tensor | None = None
    """[B, start + L] int64: 1 for a feature token of an image, otherwise 0, also for the tokens of
    the state. Needed for rows with images whose tokens see each other in both directions."""


def row_settings(model: nn.Module) -> RowSettings | None:
    """How the model computes rows. None for a model that computes the token tree."""
    inner: Any = causal_model(model)  # type: ignore[arg-type]
    settings: RowSettings | None = vars(inner).get(_KEY)
    return settings


def shares_prefixes(model: nn.Module, wanted: bool) -> bool:
    """Whether the model's passes compute a common prefix of several sequences once. `wanted`:
    whether the recipe wants it (`prefix_merging`)."""
    return wanted and (row_settings(model) is None or shares_states(model))


def shares_states(model: nn.Module) -> bool:
    """Whether the model computes rows that can continue from the state of a prefix. With
    checkpointed layers they can't: a layer that runs again would change its state again."""
    settings = row_settings(model)
    return (
        settings is not None
        and settings.shares
        and not any(
            isinstance(vars(module).get("forward"), CheckpointedLayer) for module in model.modules()
        )
    )


def describe_rows(model: nn.Module) -> str:
    """How and why the model computes rows; empty for a model that computes the token tree."""
    settings = row_settings(model)
    if settings is None:
        return ""

    prefixes = ", and shared prefixes once" if shares_states(model) else ""
    return f"rows by its own forward pass{prefixes}: {settings.reason}"


def use_rows(model: PreTrainedModel, reason: str) -> None:
    """Makes a model compute rows, in place. `reason`: why it does not compute the tree. Raises
    ModelError for a model in which a token sees later ones, whose positions do not begin at 0, or
    whose own pass fails."""
    inner = causal_model(model)
    if next(inner.parameters()).is_meta:
        vars(inner)[_KEY] = RowSettings(reason, pads=True, shares=False)
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

    images_pad = _check_images(model)
    kinds = set(getattr(inner.config.get_text_config(), "layer_types", None) or ())
    pads = (
        kinds <= PADDED_LAYERS
        and logprob_difference(in_company, alone) <= trial_tolerance(model)
        and images_pad
    )
    shares = pads and _continues_from_states(model) and _continues_after_images(model)
    vars(inner)[_KEY] = RowSettings(reason, pads, shares)


def _text_logits(
    model: PreTrainedModel, text: list[int], *others: list[int], with_positions: bool = False
) -> torch.Tensor:
    """The logits [T, V] of a text in a pass with other texts. `with_positions`: the model gets the
    positions from 0 on, if its `forward` takes them."""
    group = padded_group([text, *others], [(0, column) for column in range(len(text))], model)
    inputs: dict[str, Any] = {}
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


def _check_images(model: PreTrainedModel) -> bool:
    """Whether a row with images gets the same numbers beside a longer row. Raises ModelError if it
    gets other ones alone than transformers' own pass gives it. Models that are shown no images are
    not tried."""
    processor = processor_of(model)
    if processor is None:
        return True

    text = trial_image_text(model, processor)
    longer = trial_texts(model)[1] * (1 + len(text.ids) // OTHER_TOKENS)
    places = [(0, column) for column in range(len(text.ids))]
    with evaluating(model):
        reference = own_image_logits(model, processor, text)
        features = encode_detached(model, processor, text.images)
        with torch.enable_grad():
            alone, in_company = (
                run_rows(model, image_group(model, text, others, places), features).logits[0]
                for others in ((), (longer,))
            )

    difference = logprob_difference(alone.detach().float(), reference)
    if not difference <= trial_tolerance(model):
        raise ModelError(
            f"{model_name(model)}: with its own positions, a text with images gets other log-probs "
            f"than transformers' own pass gives it (by {difference:.2g} of their spread): choose "
            "another model"
        )
    return logprob_difference(in_company.detach().float(), reference) <= trial_tolerance(model)


def image_group(
    model: PreTrainedModel,
    text: ImageText,
    others: Sequence[list[int]],
    places: list[tuple[int, int]],
) -> RowGroup:
    """A group of the text with images, and of others without."""
    group = padded_group([text.ids, *others], places, model)
    count, width = group.input_ids.shape
    axes, length = text.positions.shape
    positions = torch.arange(width).expand(axes, count, -1).clone()
    positions[:, 0, :length] = text.positions
    types = torch.zeros(count, width, dtype=torch.int64)
    types[0, :length] = text.types
    device = group.input_ids.device
    return group._replace(positions=positions.to(device), types=types.to(device))


def _continues_after_images(model: PreTrainedModel) -> bool:
    """Whether passes that continue from a state with an image give the logits of the rows alone,
    and the gradient of that image's features."""
    processor = processor_of(model)
    if processor is None:
        return True

    text = trial_image_text(model, processor)
    other = trial_texts(model)[1]
    half, length = text.half, len(text.ids)
    with evaluating(model), torch.enable_grad():
        first, second = encode_detached(model, processor, text.images)
        first.pooled.requires_grad_()
        rows = [text.ids[half:], other]
        places = [(row, column) for row, ids in enumerate(rows) for column in range(len(ids))]
        start = replace(
            text,
            ids=text.ids[:half],
            positions=text.positions[:, :half],
            types=text.types[:half],
        )
        rest = padded_group(rows, places, model)._replace(parent=0, start=half)
        width = rest.input_ids.shape[1]
        after = int(text.positions[:, half - 1].max()) + 1
        positions = torch.arange(after, after + width).expand(len(text.positions), 2, -1).clone()
        positions[:, 0, : length - half] = text.positions[:, half:]
        types = torch.zeros(2, half + width, dtype=torch.int64)
        types[0, :length] = text.types
        types[1, :half] = text.types[:half]
        device = rest.input_ids.device
        rest = rest._replace(positions=positions.to(device), types=types.to(device))
        parent = image_group(model, start, (), [])._replace(is_parent=True)
        branch = replace(
            text,
            ids=[*text.ids[:half], *other],
            positions=torch.cat([text.positions[:, :half], positions[:, 1, : len(other)]], dim=1),
            types=types[1, : half + len(other)],
        )
        try:
            shared = run_groups(model, [parent, rest], [[first], [second]])[1].logits[0]
            alone = torch.cat(
                [
                    run_rows(
                        model,
                        image_group(model, row, (), [(0, n) for n in range(half, len(row.ids))]),
                        features,
                    ).logits[0]
                    for row, features in ((text, [first, second]), (branch, [first]))
                ]
            )
            (gradient,) = torch.autograd.grad(shared.float().square().sum(), first.pooled)
            (expected,) = torch.autograd.grad(alone.float().square().sum(), first.pooled)
        except Exception:  # noqa: BLE001 (whatever the model's own code raises: it can't do this)
            return False

    difference = float((gradient - expected).norm() / expected.norm())
    tolerance = trial_tolerance(model)
    logits_agree = logprob_difference(shared.detach().float(), alone.detach().float()) <= tolerance
    return logits_agree and difference <= tolerance


def _continues_from_states(model: PreTrainedModel) -> bool:
    """Whether passes that continue from states give the logits of the rows alone, and the gradient
    of their prefixes. Texts of different length branch off at two places."""
    (*text,), first, second = trial_texts(model)
    half = len(text) // 2
    branches = [first, second[:5]]
    places = [(row, column) for row, ids in enumerate(branches) for column in range(len(ids))]
    groups = [
        padded_group([text[:half]], [], model)._replace(is_parent=True),
        padded_group([text[half:]], [], model)._replace(parent=0, start=half, is_parent=True),
        padded_group(branches, places, model)._replace(parent=1, start=len(text)),
        padded_group([second], [(0, n) for n in range(len(second))], model)._replace(
            parent=0, start=half
        ),
    ]
    rows = [[*text, *first], [*text, *second[:5]], [*text[:half], *second]]
    starts = [len(text), len(text), half]
    alone = [
        padded_group([ids], [(0, n) for n in range(start, len(ids))], model)
        for ids, start in zip(rows, starts, strict=True)
    ]
    with evaluating(model), torch.enable_grad():
        try:
            logits, gradients = _logits_and_gradients(model, groups)
            expected, of_rows = _logits_and_gradients(model, alone)
        except Exception:  # noqa: BLE001 (whatever the model's own code raises: it can't do this)
            return False

    gradient = torch.cat(gradients[:2], dim=1)[0]
    expected_gradient = of_rows[0][0, : len(text)] + of_rows[1][0, : len(text)]
    expected_gradient[:half] += of_rows[2][0, :half]
    difference = float((gradient - expected_gradient).norm() / expected_gradient.norm())
    tolerance = trial_tolerance(model)
    return logprob_difference(logits, expected) <= tolerance and difference <= tolerance


def _logits_and_gradients(
    model: PreTrainedModel, groups: Sequence[RowGroup]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The logits [n, V] of all passes, and the gradients [B, L, H] of the sum of their squares in
    the embeddings of each pass."""
    embeddings: list[torch.Tensor] = []

    def record(layer: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    hook = causal_model(model).get_input_embeddings().register_forward_hook(record)
    try:
        outputs = run_groups(model, groups)
    finally:
        hook.remove()

    logits = torch.cat([output.logits[0] for output in outputs]).float()
    gradients = torch.autograd.grad(logits.square().sum(), embeddings)
    return logits.detach(), [gradient.float() for gradient in gradients]


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


def run_groups(
    model: PreTrainedModel,
    groups: Sequence[RowGroup],
    features: Sequence[Sequence[ImageFeatures]] | None = None,
) -> list[Any]:
    """The results of the passes, as those of `run_rows`. A parent comes before the passes that
    continue from it. `features`: those of each pass; None if there are no images."""
    accepted = accepted_inputs(model)
    states: dict[int, Any] = {}
    outputs = []
    for number, group in enumerate(groups):
        inputs: dict[str, Any] = {"use_cache": group.is_parent or group.parent is not None}
        if group.parent is not None:
            count, length = group.input_ids.shape
            state = fork_state(states[group.parent], count, group.start)
            inputs |= {name: state for name in CACHE_NAMES if name in accepted}
            if "position_ids" in accepted and group.positions is None:
                places = torch.arange(length, device=group.input_ids.device) + group.start
                inputs["position_ids"] = places.expand(count, -1)

        seen = () if features is None else features[number]
        outputs.append(run_rows(model, group, seen, **inputs))
        if group.is_parent:
            states[number] = state_of(outputs[-1], accepted)

    return outputs


def run_rows(
    model: PreTrainedModel,
    group: RowGroup,
    features: Sequence[ImageFeatures] = (),
    **inputs: Any,
) -> Any:
    """One pass of the model, differentiable. The logits of its result are [1, n, V], at the group's
    places; the output layer computes only these. `features`: those of the feature tokens, row by
    row. Raises ModelError for another number of features than the rows have tokens for them."""
    inputs = {
        "input_ids": group.input_ids,
        "use_cache": False,
        **_vision_inputs(model, group, features),
        **inputs,
    }
    layer = causal_model(model).get_output_embeddings()
    run: Any = model
    if layer is None:  # scores of tokens, as reward models give
        outputs = run(**inputs)
        outputs.logits = outputs.logits[group.rows, group.columns].unsqueeze(0)
        return outputs

    with _taking(layer, group):
        return run(**inputs)


def _vision_inputs(
    model: PreTrainedModel, group: RowGroup, features: Sequence[ImageFeatures]
) -> dict[str, Any]:
    """The arguments for positions, types and features; empty for a plain text."""
    inputs = image_arguments(model, group.input_ids, features)
    if group.positions is not None:
        inputs["position_ids"] = position_ids(group.positions)
    if group.types is not None:
        inputs |= type_ids(model, group.types)
    elif features and needs_types(model):
        raise ModelError(f"{model_name(model)}: rows with images need the types of their tokens")
    return inputs


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
