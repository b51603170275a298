"""`agentevo doctor RECIPE --devices N`: the meshes of N processes whose estimated memory
(memory_estimate.py) fits the devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from agentevo.config import ParallelSection, RunConfig
from agentevo.config.parallel import parallel_contradictions
from agentevo.errors import ConfigError, ModelError, TrainingError
from agentevo.runs.doctor.checks import GIB, Check
from agentevo.runs.doctor.memory_estimate import (
    TERMS,
    Sizes,
    engine_bytes,
    longest_pass,
    process_terms,
    sizes_of,
    total,
    unloaded_policy,
)
from agentevo.runs.orchestration.checks import check_processes
from agentevo.runtime.devices import find
from agentevo.runtime.devices import memory as device_bytes
from agentevo.training.distribute import check_spread

ROOM = 0.9
"""The share of a device's memory that a plan can use."""
SHOWN = 6
"""The maximum number of meshes in the table."""
MOST_DEVICES = 65_536
OF_A_NODE = 8
"""The number of devices per machine, if there are several machines. A tensor group stays within one
machine."""


def estimate_mesh(
    config: RunConfig, sizes: Sizes, mesh: ParallelSection, world: int, memory: float
) -> dict[str, float]:
    """Bytes of each term on the device that needs most, of `world` devices of `memory` bytes.
    Raises ConfigError, ModelError or TrainingError for a mesh that can't train the recipe."""
    trainer = config.trainer.model_copy(update={"parallel": mesh})
    config = config.model_copy(update={"trainer": trainer})
    check_processes(config, world=world)
    for problem in parallel_contradictions(config):
        raise ConfigError(problem)
    check_spread(sizes.model, mesh)

    first = process_terms(config, sizes) | {"engine": engine_bytes(config, sizes, memory)}
    return max(first, process_terms(config, sizes, mesh.pipeline - 1), key=total)


def estimate_meshes(
    config: RunConfig, sizes: Sizes, world: int, memory: float
) -> dict[ParallelSection, dict[str, float]]:
    """`estimate_mesh` of all meshes of `world` processes that can train the recipe, the cheapest
    communication first; of the recipe's mesh alone if it names one. If there is none, raises
    ConfigError with the reason of the last refusal."""
    mesh_in_recipe = config.trainer.parallel
    estimates = {}
    refusal = f"--devices {world}: no mesh has this number of processes"
    for mesh in [mesh_in_recipe] if mesh_in_recipe.is_spread else _list_meshes(world, sizes):
        try:
            estimates[mesh] = estimate_mesh(config, sizes, mesh, world, memory)
        except (ConfigError, ModelError, TrainingError) as error:
            refusal = str(error)

    if not estimates:
        raise ConfigError(refusal)
    return estimates


def _list_meshes(world: int, sizes: Sizes) -> Iterator[ParallelSection]:
    """In order of communication: FSDP prefetches weights, context groups exchange once a layer,
    tensor groups twice, stages of a pipeline wait. `expert` saves no memory beside `shard`."""
    num_heads = sizes.model.config.get_text_config().num_key_value_heads
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    of_heads = [n for n in divisors if num_heads % n == 0]
    within = [n for n in of_heads if n <= OF_A_NODE and sizes.shape.intermediate % n == 0]
    for tensor, context, shard in itertools.product(within, of_heads, divisors):
        if world % (shard * tensor * context) == 0:
            yield ParallelSection(shard=shard, tensor=tensor, context=context)

    for pipeline in (n for n in divisors if n > 1 and sizes.shape.num_layers % n == 0):
        yield ParallelSection(pipeline=pipeline)


def check_meshes(
    config: RunConfig, devices: int, device_memory: float | None, command: str
) -> Check:
    """`device_memory`: GiB of each device, by default that of the recipe's first one here.
    `command`: the recipe and the overrides of the command line. Raises ConfigError for a recipe
    that no mesh of this many devices can train."""
    if not 1 <= devices <= MOST_DEVICES:
        raise ConfigError(f"--devices {devices}: give 1 to {MOST_DEVICES:,}")

    memory = device_memory * GIB if device_memory else device_bytes(find(config.model.device))[1]
    sizes = sizes_of(unloaded_policy(config))
    estimates = estimate_meshes(config, sizes, devices, memory)
    fitting = [mesh for mesh, terms in estimates.items() if total(terms) <= ROOM * memory]
    shown = fitting or sorted(estimates, key=lambda mesh: total(estimates[mesh]))
    rows = {mesh.shared_by(devices) or "one process": estimates[mesh] for mesh in shown[:SHOWN]}
    finding = (
        f"{len(fitting)} of {len(estimates)} meshes fit {devices} devices of {memory / GIB:.1f} "
        f"GiB with micro-batches of {longest_pass(config, sizes):,} tokens; GiB on the device that "
        f"needs most:\n{_format_table(rows)}"
    )
    if not fitting:
        advice = "use more devices, adapters, or another key of docs/training.md, 'Limit memory'"
        return Check("meshes", "wrong", finding, advice)

    keys = [f"trainer.parallel.{key}={size}" for key, size in fitting[0].above_one.items()]
    program = "sft" if config.data.taught else "train"
    words = [program, command, *(key for key in keys if key not in command.split())]
    return Check("meshes", "good", finding, f"start the first one: {_launch(devices, words)}")


def _format_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    table = [["mesh", *TERMS, "total"]]
    for mesh, terms in rows.items():
        sizes = [*(terms[name] for name in TERMS), total(terms)]
        table.append([mesh, *(f"{size / GIB:.2f}" for size in sizes)])

    first, *others = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([" " * 7, mesh.ljust(first), *map(str.rjust, cells, others)])
        for mesh, *cells in table
    )


def _launch(world: int, words: list[str]) -> str:
    command = " ".join(["agentevo", *words])
    if world == 1:
        return command
    if world <= OF_A_NODE or world % OF_A_NODE:
        return f"torchrun --standalone --nproc-per-node={world} -m {command}"
    where = "--rdzv-backend=c10d --rdzv-endpoint=FIRST_MACHINE:29500"
    counts = f"--nnodes={world // OF_A_NODE} --nproc-per-node={OF_A_NODE}"
    return f"torchrun {counts} {where} -m {command}, on each machine (or by `agentevo launch`)"
