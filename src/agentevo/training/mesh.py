"""The device meshes of a training, which assign processes to parts of the work.

All meshes contain the same processes in the same order, the innermost dimension first: tensor,
context, pipeline, shard, replicas.

    world    dp x pp x cp x tp     dp = replicas x shard; each dp rank has its part of a minibatch
    data     replicate x shard     FSDP shards parameters and sums gradients over it
    experts  sharing x ep          the experts of a mixture are spread over ep; dp = sharing x ep
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
    """The meshes over all processes, for one `trainer.parallel` section."""

    section: ParallelSection
    world: DeviceMesh
    data: DeviceMesh
    """It has only the dimension `shard` if there are no replicas."""
    experts: DeviceMesh | None
    """None if each process has all experts."""
    both: DeviceMesh | None
    """The product of the expert group and the tensor group. None unless both are used."""
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
    """Creates the meshes, and makes "dp" the data-parallel dimension (`use_mesh`). Each process
    calls this function once. Raises ConfigError if the sizes don't divide the number of
    processes."""
    try:
        replicas = section.replicas(distributed.get_world_size())
    except ValueError as error:
        raise ConfigError(str(error)) from error

    ranks_per_dp = section.pipeline * section.context * section.tensor
    dp_size = replicas * section.shard
    world_mesh = init_device_mesh(
        device_type,
        (dp_size, section.pipeline, section.context, section.tensor),
        mesh_dim_names=(DATA_PARALLEL, PIPELINE, CONTEXT, TENSOR),
    )
    data = init_device_mesh(
        device_type,
        (replicas, section.shard, ranks_per_dp),
        mesh_dim_names=(REPLICATE, SHARD, "inner"),
    )

    experts = both = None
    if section.expert > 1:
        experts = init_device_mesh(
            device_type,
            (dp_size // section.expert, section.expert, ranks_per_dp),
            mesh_dim_names=(SHARING, EXPERT, "inner"),
        )

    if section.expert > 1 and section.tensor > 1:
        all_ranks = torch.arange(dp_size * ranks_per_dp)
        split = all_ranks.view(-1, section.expert, section.context, section.tensor)
        groups = split.transpose(1, 2).flatten(2).flatten(0, 1)
        both = DeviceMesh(device_type, groups, mesh_dim_names=("others", EXPERT))

    use_mesh(world_mesh)
    stage = Stage.of(world_mesh, PIPELINE) if section.pipeline > 1 else None
    data = data[SHARD] if replicas == 1 else data[REPLICATE, SHARD]
    return Meshes(section, world_mesh, data, experts, both, stage)
