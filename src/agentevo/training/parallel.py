"""Several processes train one model, each on its part of every minibatch (data parallelism).

Whoever starts the processes initialises torch.distributed. Each rank holds the whole model, and is
given the same samples in the same order; `passes.micro_batches` hands it its own part. Losses are
parts of the whole minibatch's, so what a single process adds up over micro-batches is added up over
ranks: gradients here, tables and metrics where they are made. All ranks then take the same step.

A rank that raises leaves the others waiting for as long as the process group's timeout allows.
Without torch.distributed everything here does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import distributed

T = TypeVar("T")


def rank() -> int:
    """Of this process, from 0."""
    return distributed.get_rank() if num_ranks() > 1 else 0


def num_ranks() -> int:
    return (
        distributed.get_world_size()
        if distributed.is_available() and distributed.is_initialized()
        else 1
    )


def gathered(value: T) -> list[T]:
    """The value of each rank, in order of ranks; called by all of them. Values are pickled: for
    tables and metrics, not for weights."""
    if num_ranks() == 1:
        return [value]
    found: list[T | None] = [None] * num_ranks()
    distributed.all_gather_object(found, value)
    return found  # type: ignore[return-value]


def summed(values: Mapping[str, float]) -> dict[str, float]:
    """Sums over ranks, by name; a rank may lack some."""
    found: dict[str, float] = {}
    for one in gathered(values):
        for key, value in one.items():
            found[key] = found.get(key, 0.0) + value
    return found


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replaces each gradient by its sum over ranks. A parameter that no rank has used keeps
    none."""
    if num_ranks() == 1:
        return
    parameters = list(parameters)
    if not parameters:
        return
    used = torch.tensor(
        [p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device
    )
    distributed.all_reduce(used)
    waiting = []
    for parameter, count in zip(parameters, used.tolist(), strict=True):
        if count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(
                    parameter, dtype=torch.promote_types(parameter.dtype, torch.float32)
                )
            waiting.append(distributed.all_reduce(parameter.grad, async_op=True))
    for work in waiting:
        work.wait()
