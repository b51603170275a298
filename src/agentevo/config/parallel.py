"""The recipe's keys for several processes that train one model together."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pydantic import Field

from agentevo.config.routing import needs_routers
from agentevo.errors import ConfigError
from agentevo.runtime.section import Section

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig


def world_size() -> int:
    """The number of processes that a launcher has started to train together: 1 without a
    launcher."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def follows() -> bool:
    """Whether this process trains together with others and is not the first of them."""
    return world_size() > 1 and os.environ.get("RANK", "0") != "0"


def check_alone(command: str) -> None:
    """Raises ConfigError if a launcher started several processes of a single-process command."""
    if world_size() > 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size()}: {command} runs in one process: start it without torchrun"
        )


class ParallelSection(Section):
    """The division of the work among the training processes. shard x tensor x context x pipeline
    must divide the number of processes; the quotient is the number of replicas. Each of shard x
    replicas processes (or pipelines) gets its own part of every minibatch."""

    shard: int = Field(default=1, ge=1)
    """Processes that each keep a part of every weight, of its gradient and of its moments (FSDP),
    and gather a layer's weights while they compute it."""
    tensor: int = Field(default=1, ge=1)
    """Processes that each compute a part of every large matrix product (tensor parallelism)."""
    context: int = Field(default=1, ge=1)
    """Processes that each compute a section of every sequence (context parallelism)."""
    expert: int = Field(default=1, ge=1)
    """Processes that each keep a part of the experts of a mixture; must divide shard x
    replicas."""
    pipeline: int = Field(default=1, ge=1)
    """Processes that each keep some consecutive layers, through which micro-batches pass one after
    the other (pipeline parallelism); must divide the layers. No other of these sizes may be above
    1 then."""

    @property
    def is_spread(self) -> bool:
        """Whether no process has the whole model."""
        return bool(self.above_one)

    @property
    def above_one(self) -> dict[str, int]:
        """Key -> size, for the sizes above 1."""
        return {key: size for key, size in self.model_dump().items() if size > 1}

    def shared_by(self, world: int) -> str:
        """How `world` processes share the work, such as shard=2 x replicas=2; empty for a single
        process. Raises the ValueError of `replicas`."""
        replicas = self.replicas(world)
        sizes = self.above_one | ({"replicas": replicas} if replicas > 1 else {})
        return " x ".join(f"{key}={size}" for key, size in sizes.items())

    def replicas(self, world: int) -> int:
        """The number of copies of the model among `world` processes. Raises ValueError with the
        keys if the sizes don't divide the processes."""
        model_processes = self.shard * self.tensor * self.context * self.pipeline
        if world % model_processes:
            raise ValueError(
                f"trainer.parallel: shard={self.shard} x tensor={self.tensor} x "
                f"context={self.context} x pipeline={self.pipeline} is {model_processes}, which "
                f"does not divide the {world} processes that train: start a multiple of "
                f"{model_processes} (torchrun --nproc-per-node), or choose smaller sizes"
            )

        replicas = world // model_processes
        if (replicas * self.shard) % self.expert:
            raise ValueError(
                f"trainer.parallel.expert={self.expert} does not divide the "
                f"{replicas * self.shard} processes that have a part of the minibatch each "
                f"(shard={self.shard} x {replicas} replicas): choose another size"
            )

        return replicas


def parallel_contradictions(config: RunConfig) -> list[str]:
    """Texts about settings that trainer.parallel never supports, each with a remedy."""
    parallel = config.trainer.parallel
    problems = list[str]()
    if config.memory.optimizer == "adamw_8bit" and parallel.is_spread:
        problems.append(
            "memory.optimizer=adamw_8bit: 256 moments of 8 bits share one scale, and "
            "trainer.parallel splits them over several processes: set memory.optimizer=adamw, "
            "whose moments can be split"
        )

    if config.model.lora.enabled and max(parallel.tensor, parallel.expert) > 1:
        problems.append(
            "model.lora: trainer.parallel.tensor and expert can't split adapters: set both to 1, "
            "and split the base model by trainer.parallel.shard, long sequences by context"
        )

    return problems + _pipeline_contradictions(config) if parallel.pipeline > 1 else problems


def _pipeline_contradictions(config: RunConfig) -> list[str]:
    """Texts about settings that pipeline stages do not support."""
    parallel = config.trainer.parallel
    needs = config.algorithm.needs

    problems = list[str]()
    other_sizes = {key: size for key, size in parallel.above_one.items() if key != "pipeline"}
    if other_sizes:
        sizes_text = " and ".join(f"{key}={size}" for key, size in other_sizes.items())
        problems.append(
            f"trainer.parallel.pipeline={parallel.pipeline} together with {sizes_text}: pipeline "
            "stages can't be split further: set the others to 1 (more processes become replicas "
            "of the pipeline), or pipeline to 1"
        )

    features = {
        "adapters (model.lora)": config.model.lora.enabled,
        f"a critic (algorithm.name={config.algorithm.name})": "values" in needs,
        f"a process reward (algorithm.name={config.algorithm.name})": "process_rewards" in needs,
        "a token reward model (reward_model.name)": config.reward_model.name is not None,
        "recorded or replayed routing (trainer.routing_replay, engine.routed_experts)": (
            needs_routers(config)
        ),
    }
    problems += [
        f"{feature} together with trainer.parallel.pipeline={parallel.pipeline}: pipeline stages "
        "compute only the policy and the reference: set pipeline to 1, and split the models by "
        "trainer.parallel.shard"
        for feature, is_enabled in features.items()
        if is_enabled
    ]
    if config.memory.offload_activations:
        problems.append(
            "memory.offload_activations together with trainer.parallel.pipeline: offloading the "
            "activations of several micro-batches in pipeline stages is untested: set it to "
            "false, and memory.checkpointing=full"
        )

    return problems
