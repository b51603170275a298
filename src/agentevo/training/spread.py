"""A freshly loaded and prepared model -> this process's part of it, as trainer.parallel says.

FSDP comes after this and shards what is left here. Experts that are spread by
`trainer.parallel.expert` differ between data-parallel ranks: FSDP must not shard these parameters
over them (those whose layout has `sharing`).
"""

from __future__ import annotations

from transformers import PreTrainedModel

from agentevo.errors import ConfigError
from agentevo.training.collectives import Ranks
from agentevo.training.mesh import CONTEXT, EXPERT, SHARING, TENSOR, Meshes
from agentevo.training.sharding.context_parallel import context_parallel
from agentevo.training.sharding.expert_parallel import expert_parallel
from agentevo.training.sharding.tensor_parallel import tensor_parallel


def spread(model: PreTrainedModel, meshes: Meshes) -> None:
    """Has these processes compute the model together, in place; called by all of them with the same
    weights, before an optimizer is made. Raises ConfigError or TrainingError where the model can't
    be divided so."""
    section = meshes.section
    if section.tensor > 1 and section.expert > 1:
        raise ConfigError(
            f"trainer.parallel: tensor={section.tensor} spreads experts over its processes "
            f"already: set expert=1 (not {section.expert})"
        )
    if section.tensor > 1:
        tensor_parallel(model, Ranks.of(meshes.whole, TENSOR))
    if section.context > 1:
        context_parallel(model, Ranks.of(meshes.whole, CONTEXT))
    if meshes.experts is not None:
        sharing = Ranks.of(meshes.experts, SHARING)
        expert_parallel(model, Ranks.of(meshes.experts, EXPERT), (sharing,))
