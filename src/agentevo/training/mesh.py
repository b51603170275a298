"""The device meshes of a training: they assign processes to parts of the work.

All meshes contain the same processes in the same order, the innermost dimension first: tensor,
context, pipeline, shard, replicas.

    whole    dp x pp x cp x tp     dp = replicas x shard: each has its own part of a minibatch
    data     replicate x shard     over which FSDP shards and adds up
    experts  sharing x ep          of the mixtures that trainer.parallel.expert spreads, where dp is
                                   sharing x ep
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentevo.config import ParallelSection
from agentevo.errors import ConfigError
from agentevo.training.kernels.stages import Stage
from agentevo.training.parallel import CONTEXT, DATA_PARALLEL, PIPELINE, use_mesh

TENSOR = "tp"
EXPERT = "ep"
SHARING = "sharing"
REPLICATE = "replicate"
SHARD = "shard"


@dataclass(frozen=True, eq=False)
class Meshes:
    """See the module."""

    section: ParallelSection
    world: DeviceMesh
    data: DeviceMesh
    """It has one dimension, `shard`, where there are no replicas."""
    experts: DeviceMesh | None
    """None if experts are not spread."""
    both: DeviceMesh | None
    """With tensor parallelism: the experts' dimension and the tensor group, combined."""
    pipeline: Stage | None
    """None if each process has all layers."""

    def coordinates(self) -> Iterator[tuple[str, int, int]]:
        """The name of each dimension, this process's coordinate in it, and its size."""
        for mesh in (self.world, self.data, self.experts):
            names = () if mesh is None else mesh.mesh_dim_names or ()
            for name in names:
                assert mesh is not None
                yield name, mesh.get_local_rank(name), mesh[name].size()


def make_meshes(section: ParallelSection, device_type: str) -> Meshes:
    """The meshes over all processes; "dp" is in use from then on (`use_mesh`). Each process calls
    it once. Raises ConfigError if the sizes don't divide their number."""
    try:
        replicas = section.replicas(distributed.get_world_size())
    except ValueError as error:
        raise ConfigError(str(error)) from error

    inner = section.pipeline * section.context * section.tensor
    ranks = replicas * section.shard
    world_mesh = init_device_mesh(
        device_type,
        (ranks, section.pipeline, section.context, section.tensor),
        mesh_dim_names=(DATA_PARALLEL, PIPELINE, CONTEXT, TENSOR),
    )
    data = init_device_mesh(
        device_type,
        (replicas, section.shard, inner),
        mesh_dim_names=(REPLICATE, SHARD, "inner"),
    )

    experts = both = None
    if section.expert > 1:
        experts = init_device_mesh(
            device_type,
            (ranks // section.expert, section.expert, inner),
            mesh_dim_names=(SHARING, EXPERT, "inner"),
        )

    if section.expert > 1 and section.tensor > 1:
        every = torch.arange(ranks * inner)
        split = every.view(-1, section.expert, section.context, section.tensor)
        groups = split.transpose(1, 2).flatten(2).flatten(0, 1)
        both = DeviceMesh(device_type, groups, mesh_dim_names=("others", EXPERT))

    use_mesh(world_mesh)
    stage = Stage.of(world_mesh, PIPELINE) if section.pipeline > 1 else None
    data = data[SHARD] if replicas == 1 else data[REPLICATE, SHARD]
    return Meshes(section, world_mesh, data, experts, both, stage)
