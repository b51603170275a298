"""The memory of models that compute rows (models/compute/rows.py): transformers' own cache objects.

A state is such an object after some tokens of one sequence: keys and values, convolutions' last
inputs, recurrent states. A later pass continues from it and changes it. `StateStack` puts the
states of several sequences into one object, so that one pass computes a token of each. Keys and
values of shorter sequences are padded on the left, as in transformers' own batched generation.

What a model supports is measured once (`state_support`): whether a state continues, whether it
continues by several tokens at once, and whether states can be stacked. What it does not support is
computed in another way: token by token, one sequence after another, or from the first token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from agentevo.inference.embedded.mamba_steps import bounded_steps
from agentevo.models.compute.row_states import (
    CACHE_NAMES,
    combine_states,
    state_of,
    state_tensors,
)
from agentevo.models.compute.rows import RowGroup, accepted_inputs, padded_group, run_rows
from agentevo.models.compute.trial import (
    evaluating,
    logprob_difference,
    trial_texts,
    trial_tolerance,
)
from agentevo.models.token_rows import causal_model
from agentevo.models.vision.features import ImageFeatures

if TYPE_CHECKING:
    from agentevo.inference.embedded.state_scheduler import StateSequence

TYPICAL_TOKENS = 1024
"""The length of a sequence over which the fixed part of a state is spread, to count memory in
tokens."""


@dataclass(frozen=True)
class StateSupport:
    """What a model's states support."""

    continues: bool
    """Whether a pass continues from a state. If not, every pass computes its sequences from the
    first token."""
    appends: bool
    """Whether a pass continues from a state by several tokens."""
    stacks: bool
    """Whether states of different length can be computed in one pass."""
    fixed_bytes: int
    """The size of a state without its tokens."""
    bytes_per_token: int

    @property
    def unit_bytes(self) -> float:
        """The memory that counts as one token."""
        return max(self.bytes_per_token + self.fixed_bytes / TYPICAL_TOKENS, 1.0)

    def size(self, tokens: int) -> int:
        """The memory of a state, counted in tokens."""
        return int((self.fixed_bytes + self.bytes_per_token * tokens) / self.unit_bytes) + 1


@dataclass(eq=False)
class StateStack:
    """The states of several sequences in one object, a row each."""

    members: list[StateSequence] = field(default_factory=list)
    state: Any = None
    width: int = 0
    """The number of tokens of the longest member."""

    @property
    def has_padding(self) -> bool:
        """Whether a member is shorter than another one."""
        return any(sequence.cached != self.width for sequence in self.members)

    def put(self, members: Sequence[StateSequence]) -> None:
        """Makes these sequences the members. New members give their states to the stack."""
        if [*members] == self.members:
            return

        kept = [sequence for sequence in self.members if sequence in members]
        new = [sequence for sequence in members if sequence not in self.members]
        parts = [sequence.state for sequence in new]
        if kept:
            rows = [self.members.index(sequence) for sequence in kept]
            parts.insert(0, select_rows(self.state, rows, self.width))

        self.width = max((sequence.cached for sequence in members), default=0)
        self.state = _join_states(parts, self.width) if parts else None
        self.members = [*kept, *new]
        for sequence in new:
            sequence.state = None

    def take(self, sequence: StateSequence) -> Any:
        """A copy of a member's state."""
        row = select_rows(self.state, [self.members.index(sequence)], self.width)
        return _keep_last(row, sequence.cached)


def mask_of(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """[B, width + 1] int64 for stacked states of these lengths [B, 1], of which `width` is the
    longest: 1 for the tokens of each sequence and for the next one, 0 for padding."""
    return (torch.arange(width + 1, device=lengths.device) >= width - lengths).long()


def run_states(
    model: PreTrainedModel,
    group: RowGroup,
    state: Any,
    positions: torch.Tensor,
    mask: torch.Tensor | None = None,
    features: Sequence[ImageFeatures] = (),
) -> tuple[torch.Tensor, Any]:
    """One pass that continues from `state`, which may be changed. `positions` [B, L], or [A, B, L]
    on several axes. `mask`: of stacked states with padding. `features`: those of the pass's feature
    tokens. Returns the logits [n, V] at the group's places, which are in order, and the new
    state."""
    accepted = accepted_inputs(model)
    offered: dict[str, Any] = {"position_ids": positions, "attention_mask": mask}
    offered |= dict.fromkeys(CACHE_NAMES, state)
    inputs = {
        name: value for name, value in offered.items() if name in accepted and value is not None
    }
    inputs["use_cache"] = True
    rows, columns = group.input_ids.shape
    if columns > 1:
        outputs = run_rows(model, group, features, **inputs)
        return outputs.logits[0], state_of(outputs, accepted)

    with bounded_steps(model):
        if len(group.rows) < rows or features or group.types is not None:
            outputs = run_rows(model, group, features, **inputs)
            return outputs.logits[0], state_of(outputs, accepted)

        run: Any = model
        outputs = run(input_ids=group.input_ids, **inputs)  # every place is needed
        return outputs.logits[:, 0], state_of(outputs, accepted)


def copy_state(state: Any) -> Any:
    """A state that shares no memory with the first one."""
    return copy.deepcopy(state)


_SUPPORT: WeakKeyDictionary[torch.nn.Module, StateSupport] = WeakKeyDictionary()


def state_support(model: PreTrainedModel) -> StateSupport:
    """What the model's states support, measured with short texts."""
    inner = causal_model(model)
    if inner not in _SUPPORT:
        with evaluating(model), torch.inference_mode():
            _SUPPORT[inner] = _measure(model)
    return _SUPPORT[inner]


def _measure(model: PreTrainedModel) -> StateSupport:
    text, other, another = trial_texts(model)
    longer = [*other, *another]
    tolerance = trial_tolerance(model)
    expected, expected_longer = (
        run_rows(model, padded_group([ids], [(0, n) for n in range(len(ids))], model)).logits[0]
        for ids in (text, longer)
    )

    def agrees(make_logits: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
        try:
            logits = make_logits()
        except Exception:  # noqa: BLE001 (whatever the model's own code raises: it can't do this)
            return False
        return logprob_difference(logits.float(), expected.float()) <= tolerance

    def append(count: int) -> torch.Tensor:
        state = _pass(model, text[:-count], None)[1]
        # A model that keeps its state in its modules mixes it up with that of another sequence.
        _pass(model, longer, None)
        return _pass(model, text[-count:], state, len(text) - count)[0]

    def stack() -> torch.Tensor:
        states = [_pass(model, ids[:-1], None)[1] for ids in (text, longer)]
        lengths = [len(text) - 1, len(longer) - 1]
        return _pass_stacked(model, [text[-1], longer[-1]], states, lengths)

    if not agrees(partial(append, 1), expected[-1:]):
        return StateSupport(False, False, False, 0, 0)

    state = _pass(model, text, None)[1]
    if not hasattr(state, "layers"):
        return StateSupport(False, False, False, 0, 0)

    fixed_bytes, token_bytes = _sizes(state)
    return StateSupport(
        continues=True,
        appends=agrees(partial(append, 6), expected[-6:]),
        stacks=agrees(stack, torch.stack([expected[-1], expected_longer[-1]])),
        fixed_bytes=fixed_bytes,
        bytes_per_token=token_bytes,
    )


def _pass(
    model: PreTrainedModel, ids: list[int], state: Any, first: int = 0
) -> tuple[torch.Tensor, Any]:
    """The logits [T, V] of the tokens, which continue from a state of `first` tokens, and the new
    state."""
    group = padded_group([ids], [(0, column) for column in range(len(ids))], model)
    positions = torch.arange(first, first + len(ids), device=group.input_ids.device).unsqueeze(0)
    return run_states(model, group, state, positions)


def _pass_stacked(
    model: PreTrainedModel, ids: list[int], states: list[Any], lengths: list[int]
) -> torch.Tensor:
    """The logits [B, V] of the next token of each sequence."""
    width = max(lengths)
    stacked = _join_states(states, width)
    group = padded_group([[id] for id in ids], [(row, 0) for row in range(len(ids))], model)
    positions = torch.tensor(lengths, device=group.input_ids.device).unsqueeze(1)
    mask = mask_of(positions, width) if _sizes(stacked)[1] else None
    return run_states(model, group, stacked, positions, mask)[0]


def _sizes(state: Any) -> tuple[int, int]:
    """The bytes of a state: the fixed part, and those of each token."""
    fixed = token = 0
    for place in state_tensors(state):
        tensor = place.tensor
        size = tensor.numel() * tensor.element_size()
        if place.axis is None:
            fixed += size
        else:
            token += size // tensor.shape[place.axis]
    return fixed, token


def select_rows(state: Any, rows: list[int], length: int) -> Any:
    """A new state of these rows."""
    return combine_states([state], length, lambda tensors, axis: tensors[0][rows])


def _keep_last(state: Any, length: int) -> Any:
    """A state of one row with its last `length` tokens."""

    def keep(tensors: list[torch.Tensor], axis: int | None) -> torch.Tensor:
        (tensor,) = tensors
        if axis is None or tensor.shape[axis] <= length:
            return tensor
        return tensor.narrow(axis, tensor.shape[axis] - length, length).clone()

    return combine_states([state], length, keep)


def _join_states(states: Sequence[Any], width: int) -> Any:
    """A new state with the rows of all states, of `width` tokens. Shorter tensors are padded on the
    left, and longer ones, which are padded already, lose padding."""

    def join(tensors: list[torch.Tensor], axis: int | None) -> torch.Tensor:
        if axis is None:
            return torch.cat(tensors)
        size = min(width, max(tensor.shape[axis] for tensor in tensors))
        return torch.cat([_resize(tensor, axis, size) for tensor in tensors])

    return combine_states(states, width, join)


def _resize(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """The last `size` entries along an axis, after zeros if there are fewer."""
    missing = size - tensor.shape[axis]
    if missing <= 0:
        return tensor.narrow(axis, -missing, size)
    shape = list(tensor.shape)
    shape[axis] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim=axis)
