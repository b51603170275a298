"""A freshly loaded and prepared model -> this process's part of it, as trainer.parallel says: it is
cut by tensor, context and expert parallelism first, and FSDP shards the rest. Stages of a pipeline
are cut no further.

Experts that are spread differ between data-parallel ranks: FSDP shards them only over the ranks
that have the same ones.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from agentevo.config import ParallelSection
from agentevo.errors import TrainingError
from agentevo.models.compute.rows import row_settings
from agentevo.models.compute.sharded import check_shard, make_plain, place, shard
from agentevo.models.vision.parts import processor_of
from agentevo.training.collectives import Ranks
from agentevo.training.mesh import CONTEXT, EXPERT, SHARING, TENSOR, Meshes
from agentevo.training.sharding.context_parallel import check_context, context_parallel
from agentevo.training.sharding.expert_parallel import (
    Within,
    check_experts,
    expert_parallel,
    is_stack,
)
from agentevo.training.sharding.pipeline import check_pipeline, pipeline_parallel
from agentevo.training.sharding.tensor_parallel import check_tensor, tensor_parallel
from agentevo.training.workload import keep_flops


def check_spread(model: PreTrainedModel, section: ParallelSection) -> None:
    """Raises ModelError or TrainingError for a model that `spread` can't divide so. It changes
    nothing and needs no other process."""
    parts = [
        key for key in ("tensor", "context", "expert", "pipeline") if getattr(section, key) > 1
    ]
    if parts and processor_of(model) is not None:
        raise TrainingError(
            f"trainer.parallel.{parts[0]}={getattr(section, parts[0])}: a model that is shown "
            "images is divided among processes by trainer.parallel.shard only: set this to 1"
        )
    if parts and (settings := row_settings(model)) is not None:
        raise TrainingError(
            f"trainer.parallel.{parts[0]} needs trainer.compute=tree, and this model computes rows "
            f"({settings.reason}): use trainer.parallel.data or shard"
        )
    if section.shard > 1 and (settings := row_settings(model)) is not None and not settings.pads:
        raise TrainingError(
            "trainer.parallel.shard needs the same number of passes on all processes, but this "
            "model computes rows of different length one by one: set it to 1"
        )
    if section.pipeline > 1:
        check_pipeline(model, section.pipeline)
    if section.tensor > 1:
        check_tensor(model, Ranks.imagine(section.tensor))
    if section.context > 1:
        check_context(model, section.context, section.tensor)
    if section.expert > 1:
        check_experts(model, section.expert, section.tensor)
    if section.shard > 1:
        check_shard(model)


def spread(model: PreTrainedModel, meshes: Meshes) -> PreTrainedModel:
    """Has these processes compute the model together, in place; called by all of them with the same
    weights, before an optimizer is made. Each process moves its part of a model that was loaded on
    the CPU to its device. A model other than the policy may have no experts to spread. Raises
    ModelError or TrainingError if the model can't be divided so."""
    section = meshes.section
    if not section.is_spread:
        return model

    keep_flops(model)
    if section.shard > 1:
        make_plain(model)  # before it is cut: slices are known by the layers that have them
    if meshes.pipeline is not None:
        pipeline_parallel(model, meshes.pipeline)

    tensor = Ranks.of(meshes.world, TENSOR) if section.tensor > 1 else None
    if tensor is not None:
        tensor_parallel(model, tensor, experts=meshes.experts is None)
    if section.context > 1:
        context_parallel(model, Ranks.of(meshes.world, CONTEXT))

    stacks: list[str] = []
    if meshes.experts is not None and any(is_stack(module) for module in model.modules()):
        within = None
        if tensor is not None and meshes.both is not None:
            within = Within(tensor, Ranks.of(meshes.both, EXPERT))
        sharing = (Ranks.of(meshes.experts, SHARING),)
        stacks = expert_parallel(model, Ranks.of(meshes.experts, EXPERT), sharing, within)

    if section.shard == 1:
        place(model, torch.device(meshes.world.device_type))
        return model

    expert_meshes = {} if meshes.experts is None else dict.fromkeys(stacks, meshes.experts[SHARING])
    return shard(model, meshes.data, expert_meshes)
