"""Advantages by name: how much better each trained token was than expected.

`bind_advantage` makes one from its name and hyper-parameters. Called with tables, it checks them
and computes by one function of `group_relative` (a number per trajectory), or of `returns` or
`turn_comparison` (a recursion over tokens or turns). Invariants: values at masked-out places have
no influence; results are 0 there; all statistics are in float64; nothing depends on padding or on
the order of rows and groups beyond rounding; no result is NaN or infinite (numbers are bounded to
+-1e100 inside and to the range of the dtype outside).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from agentevo.algorithms.advantage_inputs import AdvantageTables, Inputs, check_tables
from agentevo.algorithms.entries import FUNCTION, EntryTable, Value, check_function
from agentevo.algorithms.group_relative import SCORES, AdvantageEntry
from agentevo.algorithms.lazy_torch import torch
from agentevo.algorithms.returns import RECURSIONS, make_stream
from agentevo.algorithms.turn_comparison import COMPARISONS

if TYPE_CHECKING:
    from torch import Tensor

ADVANTAGES = EntryTable("advantage", AdvantageEntry, SCORES, RECURSIONS, COMPARISONS)


@ADVANTAGES.entry(
    name=FUNCTION,
    meaning="the advantage that your own function computes (algorithm.advantage_function)",
    formula="A = advantage(inputs), of each trajectory or of each token",
    source="your function; docs/algorithms.md",
)
def _call_function(inputs: Inputs, *, function: Callable[[Inputs], Tensor]) -> Tensor:
    return function(inputs)


@dataclass(frozen=True)
class Advantage:
    """An estimator with its hyper-parameters, checked when it was bound."""

    name: str
    hyper: Mapping[str, Any]
    needs: tuple[str, ...]
    """Names of the optional `AdvantageTables` that the estimator needs."""
    function: Callable[[Inputs], Tensor] | None = None
    """Computes the estimator FUNCTION: a number per trajectory [N], or per token [S, T]."""

    @property
    def is_recursion(self) -> bool:
        """Whether the estimator is a recursion over tokens or turns, and not one number per
        trajectory."""
        return self.name in RECURSIONS or self.name in COMPARISONS

    def monte_carlo(self) -> Advantage:
        """The same estimator with lambda 1, so that it does not depend on a critic."""
        ones = {key: 1.0 for key in ("lam", "turn_lam") if key in self.hyper}
        return replace(self, hyper={**self.hyper, **ones})

    def __call__(self, tables: AdvantageTables) -> tuple[Tensor, Tensor]:
        """Advantages and returns, both [S, T] in dtype and on the device of `token_rewards`,
        without gradient, 0 where the mask is 0. Returns are the targets of a critic (recursions) or
        the advantages again.

        The score of a trajectory with several rows is the sum over all of them. Recursions run
        through the trajectory in the order of its turns if `turn_ids` are given; without them each
        row is a separate sequence. Raises ValueError for a wrong shape or missing table, and for
        NaN or infinity at a trained place.
        """
        for needed in self.needs:
            if getattr(tables, needed) is None:
                raise ValueError(
                    f"advantage {self.name} needs {needed}: give it, or choose an estimator that "
                    "does without"
                )

        inputs = check_tables(tables)
        rewards = tables.token_rewards
        bound = self.hyper if self.function is None else {"function": self.function}
        compute = partial(ADVANTAGES[self.name].function, **bound)
        if not self.is_recursion:
            values = _fitting(compute(inputs), rewards)
            if values.dim() == 1:
                values = values[inputs.trajectory][:, None]
            result = torch.where(inputs.mask, values, 0.0)
            return result, result.clone()

        stream = make_stream(inputs)
        advantages, targets = (
            rewards.new_zeros(rewards.numel())
            .index_copy_(0, stream.index, _fitting(part, rewards))
            .view(rewards.shape)
            for part in compute(inputs, stream)
        )
        return advantages, targets


def bind_advantage(
    name: str, hyper: Mapping[str, Value], *, function: Callable[[Inputs], Tensor] | None = None
) -> Advantage:
    """The estimator of that name; hyper-parameters that are not given are its entry's. Raises
    ValueError for an unknown name, for wrong hyper-parameters, and for FUNCTION without one."""
    settings = ADVANTAGES.resolve(name, hyper)
    check_function("advantage", name, function)
    return Advantage(name, settings, ADVANTAGES[name].needs, function)


def _fitting(values: Tensor, like: Tensor) -> Tensor:
    limit = torch.finfo(like.dtype).max
    wide = values.to(torch.promote_types(values.dtype, like.dtype))  # which holds the limit
    return wide.clamp(-limit, limit).to(like.dtype)
