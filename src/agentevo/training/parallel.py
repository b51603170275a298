"""Several processes train one model, each on its part of every minibatch (data parallelism).

The code that starts the processes initialises torch.distributed. Where the processes do more with
one another (shard a layer, a sequence), it also makes a DeviceMesh and declares it once, by
`use_mesh`: ranks are then the coordinates of its dimension "dp", and processes that have the same
one are one rank, whose numbers count once. Without a mesh every process is a rank of its own, and
without torch.distributed there is one rank and everything here does nothing.

Each rank gets the same samples in the same order; `passes.micro_batches` selects its part. Losses
are parts of the whole minibatch's, so what a single process adds up over micro-batches is added up
over ranks: gradients here, tables and metrics in the code that makes them. All ranks then take the
same step. Processes of a context group (the mesh's dimension "cp") compute one rank's pass together
and each find its loss: a part of it, `loss_share`, counts, and gradients are summed over them, too.
FSDP itself has summed the gradients that it has sharded over data-parallel ranks. The stages of a
pipeline (the mesh's dimension "pp") are one rank, too, whose numbers are those of its last stage.

Only the first process of all uses store and disk: `on_first` runs the code that writes there
(checkpoints in `checkpoint.py`). In a run the loop is one process, which sends the others their
work (runs/orchestration/ranks.py).

A process that ends breaks its connections, and the others then fail; if one hangs, the others wait
until the process group's timeout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from agentevo.errors import AgentEvoError, TrainingError
from agentevo.training.collectives import Ranks
from agentevo.training.sharding.layouts import ShardLayout, add_parts, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
DATA_PARALLEL = "dp"
"""Name of the mesh's dimension over which minibatches are split."""
CONTEXT = "cp"
"""Name of the dimension along which processes compute a pass together, a stretch of it each."""
PIPELINE = "pp"
"""Name of the dimension along which processes divide the layers, a stretch each."""

_group: distributed.ProcessGroup | None = None
"""This process's data-parallel group; None for all processes. Only `use_mesh` sets it, in addition
to the default group that torch.distributed keeps."""
_context: Ranks | None = None
"""The processes that compute this one's passes with it; None for no others. Set by `use_mesh`."""

_pipeline: Ranks | None = None
"""The stages of this process's rank; None if it has all layers. Set by `use_mesh` alone."""


def use_mesh(mesh: DeviceMesh) -> None:
    """Makes the mesh's dimension "dp" the ranks from now on. Every process calls it once, after
    torch.distributed is initialised and before anything is trained. Raises TrainingError for a mesh
    without that dimension."""
    global _group, _context, _pipeline
    names = mesh.mesh_dim_names or ()
    if DATA_PARALLEL not in names:
        raise TrainingError(
            f"the device mesh has the dimensions {', '.join(names) or 'without names'}: name the "
            f"one over which minibatches are split {DATA_PARALLEL!r} (of size 1 if there is none)"
        )

    _group = mesh.get_group(DATA_PARALLEL)
    context = Ranks.of(mesh, CONTEXT) if CONTEXT in names else None
    _context = context if context is not None and context.size > 1 else None
    stages = Ranks.of(mesh, PIPELINE) if PIPELINE in names else None
    _pipeline = stages if stages is not None and stages.size > 1 else None


def stages() -> Ranks | None:
    """The stages of a pipeline; None if there is none."""
    return _pipeline


def loss_share() -> float:
    """How much of a loss this process counts for its rank."""
    return 1.0 if _context is None else 1.0 / _context.size


def rank() -> int:
    """The data-parallel rank of this process, from 0."""
    return distributed.get_rank(_group) if num_processes() > 1 else 0


def num_ranks() -> int:
    """The number of parts that a minibatch is split into."""
    return distributed.get_world_size(_group) if num_processes() > 1 else 1


def num_processes() -> int:
    """All processes that train this model together, those of one rank among them; each has a
    device."""
    return (
        distributed.get_world_size()
        if distributed.is_available() and distributed.is_initialized()
        else 1
    )


def on_first(work: Callable[[], T]) -> T:
    """Does the work on the first process of all, and returns its result on every process; all of
    them call it. If it raises an AgentEvoError or OSError, all raise."""
    if num_processes() == 1:
        return work()

    outcome: list[T | Exception | None] = [None]
    if distributed.get_rank() == 0:
        try:
            outcome = [work()]
        except (AgentEvoError, OSError) as error:
            outcome = [error]

    distributed.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]

    return cast(T, outcome[0])


def gather(value: T) -> list[T]:
    """The value of each rank, in order of ranks; all of them call it. A pipeline's value is that of
    its last stage, which knows log-probs and losses. Values are pickled: for tables and metrics,
    not for weights."""
    values: list[T | None] = [value]
    if num_ranks() > 1:
        values *= num_ranks()
        distributed.all_gather_object(values, value, group=_group)

    if _pipeline is not None:
        last = _pipeline.size - 1
        distributed.broadcast_object_list(values, group=_pipeline.group, group_src=last)

    return values  # type: ignore[return-value]


def anywhere(flag: bool) -> bool:
    """Whether the flag is true on any process, including those of one rank; all processes call
    it."""
    if num_processes() == 1:
        return flag
    flags: list[bool | None] = [None] * num_processes()
    distributed.all_gather_object(flags, flag)
    return any(flags)


def sum_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """The sum over ranks of each named number; a rank may lack some."""
    sums: dict[str, float] = {}
    for of_rank in gather(values):
        for key, value in of_rank.items():
            sums[key] = sums.get(key, 0.0) + value
    return sums


def sum_gradients(
    parameters: Iterable[torch.nn.Parameter],
    layouts: Mapping[torch.nn.Parameter, ShardLayout] = MappingProxyType({}),
) -> None:
    """Replaces each gradient by its sum over all processes that have a share of it; called by all
    of them. A parameter that none of them has used has no gradient."""
    parameters = list(parameters)
    if num_processes() == 1 or not parameters:
        return

    of_all = []
    of_some = defaultdict(list)
    for parameter in parameters:
        layout = layouts.get(parameter)
        if isinstance(parameter, DTensor):
            continue

        if layout is None or layout.sharing is None:
            of_all.append(parameter)
            continue

        for ranks in layout.sharing:
            of_some[ranks.group].append(parameter)

    if num_ranks() > 1:
        _sum_over(of_all, _group)

    for group, shared in of_some.items():
        _sum_over(shared, group)

    if _context is not None:
        _sum_over(parameters, _context.group)
    if _pipeline is not None:
        _used_gradients(
            parameters, _pipeline.group
        )  # slices of length 0 are stepped with the others

    parameter_ids = {id(parameter) for parameter in parameters}
    add_parts({p: layout for p, layout in layouts.items() if id(p) in parameter_ids})


def _sum_over(parameters: list[torch.nn.Parameter], group: distributed.ProcessGroup | None) -> None:
    if not parameters:
        return

    waiting = [
        distributed.all_reduce(local(gradient), group=group, async_op=True)
        for gradient in _used_gradients(parameters, group)
    ]
    for work in waiting:
        work.wait()


def _used_gradients(
    parameters: list[torch.nn.Parameter], group: distributed.ProcessGroup | None
) -> list[torch.Tensor]:
    """The gradients that any process of the group has computed, zeros on the processes that have
    not."""
    flags = [p.grad is not None for p in parameters]
    used = torch.tensor(flags, dtype=torch.int32, device=parameters[0].device)
    distributed.all_reduce(used, group=group)

    gradients = []
    for parameter, count in zip(parameters, used.tolist(), strict=True):
        if count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(
                    parameter, dtype=torch.promote_types(parameter.dtype, torch.float32)
                )
            gradients.append(parameter.grad)

    return gradients
