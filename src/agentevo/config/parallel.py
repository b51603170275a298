"""The recipe's keys for several processes that train one model together."""

from __future__ import annotations

import os

from pydantic import Field

from agentevo.config.section import Section
from agentevo.errors import ConfigError


def world_size() -> int:
    """The processes that a launcher has started to train together: 1 where none has."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def check_alone(what: str) -> None:
    """Raises ConfigError where a launcher has started several processes of what is one."""
    if world_size() > 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size()}: {what} is one process: start it without torchrun"
        )


class ParallelSection(Section):
    """How the processes of a training share the work. shard x tensor x context must divide their
    number; what is left over are replicas, and each of shard x replicas processes has its own part
    of every minibatch."""

    shard: int = Field(default=1, ge=1)
    """Processes that each keep a part of every weight, of its gradient and of its moments (FSDP),
    and gather a layer's weights while they compute it."""
    tensor: int = Field(default=1, ge=1)
    """Processes that each compute a part of every large matrix product (tensor parallelism)."""
    context: int = Field(default=1, ge=1)
    """Processes that each compute a stretch of every sequence (context parallelism)."""
    expert: int = Field(default=1, ge=1)
    """Processes that each keep a part of the experts of a mixture; must divide shard x
    replicas."""

    def replicas(self, world: int) -> int:
        """How many copies of the model `world` processes hold. Raises ValueError, naming the
        keys, where the sizes don't fit."""
        inner = self.shard * self.tensor * self.context
        if world % inner:
            raise ValueError(
                f"trainer.parallel: shard={self.shard} x tensor={self.tensor} x "
                f"context={self.context} is {inner}, which does not divide the {world} "
                f"processes that train: start a multiple of {inner} "
                "(torchrun --nproc-per-node), or choose smaller sizes"
            )
        replicas = world // inner
        if (replicas * self.shard) % self.expert:
            raise ValueError(
                f"trainer.parallel.expert={self.expert} does not divide the "
                f"{replicas * self.shard} processes that have a part of the minibatch each "
                f"(shard={self.shard} x {replicas} replicas): choose another size"
            )
        return replicas
