"""Experts of a mixture spread over processes: each has a slice of every layer's stacked experts.

Within a tensor group all processes have the same tokens: each computes the contribution of its
experts, and the outputs are summed (`spread_over_tensor`). In a group of data-parallel ranks every
process has its own tokens: all of them travel to the experts that the router chose and back, by two
uneven all-to-all exchanges (`expert_parallel`). With both, a tensor group divides the experts of
its place in the expert group once more, and each process sends the tokens of its own experts. Every
process has the whole routers, so routing equals that of one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any
from weakref import WeakSet

import torch
from torch import distributed, nn
from transformers import PreTrainedModel

from agentevo.errors import TrainingError
from agentevo.training.collectives import Ranks, add_over_group, copy_to_group, exchange_rows
from agentevo.training.sharding.layouts import ShardLayout, lay_out

STACKS = ("gate_up_proj", "down_proj")
CHOICE = ("chosen", "weights")
"""What a stack's `forward` takes beside the hidden states: see `_Dispatch`."""
_JOINT: WeakSet[nn.Module] = WeakSet()
"""Stacks whose tokens travel between data-parallel ranks."""


def any_joint() -> bool:
    """Whether tokens of a model on this process travel between data-parallel ranks, so that passes
    need all of them."""
    return len(_JOINT) > 0


def is_stack(module: nn.Module) -> bool:
    """Whether the module is transformers' experts of one layer, stacked in two parameters."""
    return all(
        isinstance(module._parameters.get(name), nn.Parameter)
        and module._parameters[name].dim() == 3  # type: ignore[union-attr]
        for name in STACKS
    )


def expert_parallel(
    model: PreTrainedModel,
    ranks: Ranks,
    sharing: tuple[Ranks, ...] = (),
    within: Within | None = None,
) -> list[str]:
    """Spreads the model's experts over the group, in place; returns the names of the stacks.
    `sharing`: the data-parallel ranks that have the same experts as this one; `within`: the tensor
    group that divides them again. Raises TrainingError, with the model as it was, where there are
    none or their number can't be divided."""
    stacks = check_experts(model, ranks.size, 1 if within is None else within.tensor.size)
    owners = ranks if within is None else within.both
    for stack in stacks.values():
        first = _cut(stack, owners, sharing)
        stack.forward = _Dispatch(stack, ranks, first, None if within is None else within.tensor)
        _JOINT.add(stack)
    return list(stacks)


def check_experts(model: PreTrainedModel, size: int, tensor: int = 1) -> dict[str, nn.Module]:
    """The model's stacks by name. Raises TrainingError if there are none, or if so many
    processes can't share them, each with `tensor` processes that divide its part again."""
    if hasattr(model, "peft_config"):
        raise TrainingError(
            "trainer.parallel.expert is not possible with adapters (model.lora): set it to 1, "
            "and shard the base with trainer.parallel.shard"
        )

    stacks = {name: module for name, module in model.named_modules() if is_stack(module)}
    if not stacks:
        raise TrainingError(
            f"trainer.parallel.expert={size}: {type(model).__name__} has no experts that are "
            f"stacked in one parameter: set it to 1"
        )

    for stack in stacks.values():
        _check(stack, size * tensor, "expert" if tensor == 1 else "expert x tensor")

    return stacks


@dataclass(frozen=True)
class Within:
    """A tensor group whose processes divide the experts of one place in the expert group."""

    tensor: Ranks
    both: Ranks
    """The processes of expert and tensor groups, the latter's side by side: they hold all of a
    layer's experts, in this order."""


def spread_over_tensor(stack: nn.Module, ranks: Ranks) -> None:
    """Spreads one layer's experts over a tensor group, where all processes have the same
    tokens."""
    _check(stack, ranks.size, "tensor")
    first = _cut(stack, ranks, None)
    stack.register_forward_pre_hook(partial(_own_experts, ranks, first))
    stack.register_forward_hook(lambda module, args, out: add_over_group(out, ranks))


def _check(stack: Any, size: int, key: str) -> None:
    number = len(stack.down_proj)
    if number % size:
        raise TrainingError(
            f"trainer.parallel.{key}={size} does not divide the {number} experts of a layer: "
            "choose a divisor"
        )

    if any(name not in STACKS for name, _ in stack.named_parameters()):
        raise TrainingError(
            f"trainer.parallel.{key} is not possible with {type(stack).__name__}, whose experts "
            f"have more than {' and '.join(STACKS)}: set it to 1"
        )

    if len(signature(type(stack).forward).parameters) != len(("self", "hidden", *CHOICE)):
        raise TrainingError(
            f"trainer.parallel.{key} is not possible with {type(stack).__name__}, whose experts "
            "take no chosen experts: set it to 1"
        )


def _cut(stack: Any, ranks: Ranks, sharing: tuple[Ranks, ...] | None) -> int:
    """Cuts this process's experts out; returns the number of the first."""
    count = len(stack.down_proj) // ranks.size
    for name in STACKS:
        lay_out(stack, name, ShardLayout(ranks, 0, (count,) * ranks.size, sharing))
    stack.num_experts = count
    stack._is_expert_parallel = True
    return ranks.rank * count


def _own_experts(
    ranks: Ranks, first: int, stack: Any, args: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Arguments of the experts: experts of other processes become the number that means none."""
    hidden, chosen, weights = args
    beyond = (chosen < first) | (chosen >= first + stack.num_experts)
    return (
        copy_to_group(hidden, ranks),
        (chosen - first).masked_fill(beyond, stack.num_experts),
        copy_to_group(weights, ranks).masked_fill(beyond, 0),
    )


class _Dispatch:
    """Replaces the `forward` of one layer's experts."""

    def __init__(self, stack: nn.Module, ranks: Ranks, first: int, tensor: Ranks | None) -> None:
        """`first`: the number of this process's first expert."""
        self.stack = stack
        self.ranks = ranks
        self.first = first
        self.tensor = tensor

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, H], chosen experts and their weights [T, K] -> [T, H]."""
        stack: Any = self.stack
        num_chosen = chosen.shape[1]

        of_place = stack.num_experts
        if self.tensor is not None:
            of_place *= self.tensor.size
            hidden = copy_to_group(hidden, self.tensor)
            weights = copy_to_group(weights, self.tensor)

        # Step 1: the pairs of token and expert, in order of the process that has the expert; of
        # those that a tensor group shares, this process's.
        experts, order = torch.sort(chosen.flatten(), stable=True)
        if self.tensor is not None:
            is_local = experts // stack.num_experts % self.tensor.size == self.tensor.rank
            experts = experts[is_local]
            order = order[is_local]

        send_counts = torch.bincount(experts // of_place, minlength=self.ranks.size)
        receive_counts = torch.empty_like(send_counts)
        distributed.all_to_all_single(receive_counts, send_counts, group=self.ranks.group)
        send_sizes = send_counts.tolist()
        receive_sizes = receive_counts.tolist()

        # Step 2: their hidden states and experts travel there; each pair is computed separately.
        sent = exchange_rows(hidden[order // num_chosen], send_sizes, receive_sizes, self.ranks)
        local_experts = exchange_rows(experts, send_sizes, receive_sizes, self.ranks) - self.first
        ones = torch.ones(len(sent), 1, dtype=weights.dtype, device=weights.device)
        out = type(stack).forward(stack, sent, local_experts.unsqueeze(1), ones)

        # Step 3: back in their order, weighted, and added up for each token.
        back = exchange_rows(out, receive_sizes, send_sizes, self.ranks)
        all_pairs = back.new_zeros(chosen.numel(), back.shape[1]).index_copy(0, order, back)
        out = (all_pairs.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
        return out if self.tensor is None else add_over_group(out, self.tensor)
