"""Which process has which part of the work: the device meshes of a training.

All meshes count the same processes in the same order, the innermost dimension first: tensor,
context, shard, replicas.

    whole    dp x cp x tp          dp = replicas x shard: each has its own part of a minibatch
    data     replicate x shard     over which FSDP shards and adds up
    experts  dp / ep x ep          of the mixtures that trainer.parallel.expert spreads
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentevo.config import ParallelSection
from agentevo.errors import ConfigError
from agentevo.training.parallel import CONTEXT, DATA_PARALLEL, use_mesh

TENSOR, EXPERT, SHARING = "tp", "ep", "sharing"
REPLICATE, SHARD = "replicate", "shard"


@dataclass(frozen=True, eq=False)
class Meshes:
    """See the module."""

    section: ParallelSection
    whole: DeviceMesh
    data: DeviceMesh
    """Of one dimension, `shard`, where there are no replicas."""
    experts: DeviceMesh | None
    """None where experts are not spread."""


def make_meshes(section: ParallelSection, device_type: str) -> Meshes:
    """The meshes over all processes, of which "dp" is in use from then on (`use_mesh`); called
    once by each of them. Raises ConfigError where the sizes don't divide their number."""
    try:
        replicas = section.replicas(distributed.get_world_size())
    except ValueError as error:
        raise ConfigError(str(error)) from error
    inner = section.context * section.tensor
    ranks = replicas * section.shard
    whole = init_device_mesh(
        device_type,
        (ranks, section.context, section.tensor),
        mesh_dim_names=(DATA_PARALLEL, CONTEXT, TENSOR),
    )
    data = init_device_mesh(
        device_type,
        (replicas, section.shard, inner),
        mesh_dim_names=(REPLICATE, SHARD, "inner"),
    )
    experts = None
    if section.expert > 1:
        experts = init_device_mesh(
            device_type,
            (ranks // section.expert, section.expert, inner),
            mesh_dim_names=(SHARING, EXPERT, "inner"),
        )
    use_mesh(whole)
    return Meshes(section, whole, data[SHARD] if replicas == 1 else data[REPLICATE, SHARD], experts)
