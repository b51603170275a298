"""transformers' cache objects, the memory of models that compute rows (rows.py).

A state is such an object after some tokens of one or several sequences, a row each: keys and
values, convolutions' last inputs, recurrent states. A later pass continues from it and changes it.
`fork_state` copies a state for several sequences that continue from the same tokens. Gradients flow
through the copies, so a prefix that sequences share is computed once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from agentevo.errors import ModelError

LENGTH_AXES = {"keys": -2, "values": -2, "indexer_keys": 1}
"""Attribute of a cache's layer -> the axis of its tensor along which tokens lie. The other tensors
have the same size for any number of tokens."""
CACHE_NAMES = ("past_key_values", "cache_params")
"""The names of the argument, and of the result, that hold the state."""


def state_of(outputs: Any, accepted: Collection[str]) -> Any:
    """The state after a pass; None if there is none. `accepted`: the arguments of the model's
    `forward`."""
    name = next((name for name in CACHE_NAMES if name in accepted), None)
    return None if name is None else getattr(outputs, name, None)


def fork_state(state: Any, count: int, length: int) -> Any:
    """A new state of `length` tokens with `count` copies of the row of a state, differentiable. A
    pass that continues from it leaves the first state unchanged. Raises ModelError for a state that
    drops keys outside of a window: the trial's texts are too short to compare such a model."""
    if any(getattr(layer, "is_sliding", False) for layer in state.layers):
        raise ModelError("states with sliding windows can't be shared")

    def repeat(tensors: list[torch.Tensor], axis: int | None) -> torch.Tensor:
        (tensor,) = tensors
        if axis is None:
            return tensor[[0] * count]
        return tensor.expand(count, *tensor.shape[1:])  # later tokens are put behind a copy

    forked = combine_states([state], length, repeat)
    for layer in forked.layers:
        # A pass reads its recurrent state and then overwrites it, which would change what the
        # backward pass needs. A layer without this mark writes into a new tensor.
        initialized = getattr(layer, "is_recurrent_states_initialized", {})
        layer.is_recurrent_states_initialized = dict.fromkeys(initialized, False)

    return forked


class StateTensor(NamedTuple):
    """A tensor of a state that has a row per sequence."""

    holder: dict[Any, Any]
    key: Any
    tensor: torch.Tensor
    axis: int | None
    """The axis of its tokens."""


def state_tensors(state: Any) -> Iterator[StateTensor]:
    for layer in state.layers:
        attributes = vars(layer)
        for name, value in list(attributes.items()):
            if isinstance(value, torch.Tensor):
                if value.dim() and value.numel():
                    yield StateTensor(attributes, name, value, LENGTH_AXES.get(name))
            elif isinstance(value, dict):
                for key, tensor in value.items():
                    if isinstance(tensor, torch.Tensor) and tensor.dim():
                        yield StateTensor(value, key, tensor, None)


def combine_states(
    states: Sequence[Any],
    length: int,
    combine: Callable[[list[torch.Tensor], int | None], torch.Tensor],
) -> Any:
    """A new state of `length` tokens. `combine` makes each tensor of it from those of the states
    and from the axis of their tokens."""
    combined = copy.copy(states[0])
    combined.layers = [_copy_layer(layer) for layer in states[0].layers]
    for target, *sources in zip(state_tensors(combined), *map(state_tensors, states), strict=True):
        target.holder[target.key] = combine([source.tensor for source in sources], target.axis)

    for layer in combined.layers:
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length

    return combined


def _copy_layer(layer: Any) -> Any:
    copied = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(copied, name, dict(value))
    return copied
