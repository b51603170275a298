"""Experts of a mixture spread over processes: each has a slice of every layer's stacked experts.

Within a tensor group all processes have the same tokens: each computes what its experts add to
them, and the outputs are summed (`spread_over_tensor`). In a group of data-parallel ranks every
process has tokens of its own: they travel to the experts that the router chose and back, as many as
there are, by two uneven all-to-all exchanges (`expert_parallel`). Routers are whole everywhere, so
that routing is that of one process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from transformers import PreTrainedModel

from agentevo.errors import TrainingError
from agentevo.training.collectives import Ranks, added, copied, routed
from agentevo.training.sharding.layouts import Layout, lay_out

STACKS = ("gate_up_proj", "down_proj")


def is_stack(module: nn.Module) -> bool:
    """Whether the module is transformers' experts of one layer, stacked in two parameters."""
    return all(
        isinstance(module._parameters.get(name), nn.Parameter)
        and module._parameters[name].dim() == 3  # type: ignore[union-attr]
        for name in STACKS
    )


def expert_parallel(model: PreTrainedModel, ranks: Ranks, sharing: tuple[Ranks, ...] = ()) -> int:
    """Spreads the model's experts over the group, in place; returns in how many layers. `sharing`:
    the data-parallel ranks that have the same experts as this one. Raises TrainingError, with the
    model as it was, where there are none or their number can't be divided."""
    stacks = [module for module in model.modules() if is_stack(module)]
    if not stacks:
        raise TrainingError(
            f"trainer.parallel.expert={ranks.size}: {type(model).__name__} has no experts that lie "
            "stacked in one parameter: set it to 1"
        )
    for stack in stacks:
        _check(stack, ranks, "expert")
    for stack in stacks:
        _cut(stack, ranks, sharing)
        stack.forward = _Dispatch(stack, ranks)
    return len(stacks)


def spread_over_tensor(stack: nn.Module, ranks: Ranks) -> None:
    """Spreads one layer's experts over a tensor group, where all processes have the same
    tokens."""
    _check(stack, ranks, "tensor")
    first = _cut(stack, ranks, None)
    stack.register_forward_pre_hook(partial(_own_experts, ranks, first))
    stack.register_forward_hook(lambda module, args, out: added(out, ranks))


def _check(stack: Any, ranks: Ranks, key: str) -> None:
    number = len(stack.down_proj)
    if number % ranks.size:
        raise TrainingError(
            f"trainer.parallel.{key}={ranks.size} does not divide the {number} experts of a layer: "
            "choose a divisor"
        )
    if any(name not in STACKS for name, _ in stack.named_parameters()):
        raise TrainingError(
            f"trainer.parallel.{key} is not possible with {type(stack).__name__}, whose experts "
            f"have more than {' and '.join(STACKS)}: set it to 1"
        )


def _cut(stack: Any, ranks: Ranks, sharing: tuple[Ranks, ...] | None) -> int:
    """Cuts this process's experts out; returns the number of the first."""
    count = len(stack.down_proj) // ranks.size
    for name in STACKS:
        lay_out(stack, name, Layout(ranks, 0, (count,) * ranks.size, sharing))
    stack.num_experts, stack._is_expert_parallel = count, True
    return ranks.rank * count


def _own_experts(
    ranks: Ranks, first: int, stack: Any, args: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Arguments of the experts: those of others become the number that stands for none."""
    hidden, chosen, weights = args
    beyond = (chosen < first) | (chosen >= first + stack.num_experts)
    return (
        copied(hidden, ranks),
        (chosen - first).masked_fill(beyond, stack.num_experts),
        copied(weights, ranks).masked_fill(beyond, 0),
    )


class _Dispatch:
    """Stands in for the `forward` of one layer's experts."""

    def __init__(self, stack: nn.Module, ranks: Ranks) -> None:
        self.stack, self.ranks = stack, ranks

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, H], chosen experts and their weights [T, K] -> [T, H]."""
        stack: Any = self.stack
        num_chosen, local = chosen.shape[1], stack.num_experts
        # Step 1: the pairs of token and expert, in order of the process that has the expert.
        experts, order = torch.sort(chosen.flatten(), stable=True)
        given_counts = torch.bincount(experts // local, minlength=self.ranks.size)
        taken_counts = torch.empty_like(given_counts)
        distributed.all_to_all_single(taken_counts, given_counts, group=self.ranks.group)
        given, taken = given_counts.tolist(), taken_counts.tolist()
        # Step 2: their hidden states and experts travel there, each pair is computed by itself.
        sent = routed(hidden[order // num_chosen], given, taken, self.ranks)
        theirs = routed(experts, given, taken, self.ranks) - self.ranks.rank * local
        ones = torch.ones(len(sent), 1, dtype=weights.dtype, device=weights.device)
        out = type(stack).forward(stack, sent, theirs.unsqueeze(1), ones)
        # Step 3: back in their order, weighted, and added up for each token.
        back = routed(out, taken, given, self.ranks)
        own = torch.zeros_like(back).index_copy(0, order, back)
        return (own.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
