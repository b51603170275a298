"""Several processes that train together, started by torchrun: the first one runs the run, the
others take its trainer's calls.

    first    train -> run_training -> LeadingTrainer.step(samples) -+-> Trainer.step
    others   train -> follow                                        +-> Trainer.step

Sampling, evaluation, store, folder, control requests and the decision to stop are the first
process's alone. What it does with its trainer it tells the others beforehand, arguments included,
and all do it together. A sharded model is trained beside a whole one on the first process, which
serves, is published and is saved; after every update the shards are gathered into that, tensor by
tensor. So a checkpoint is the same whatever trained it, and a resume may have other processes.

A process that fails ends, which breaks its connections: those that wait for it fail at once, and
the launcher ends the rest. Others than the first leave SIGINT and SIGTERM to it, which stops
cleanly and sends them home.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from torch import distributed
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentevo import devices
from agentevo.config import RunConfig
from agentevo.config.parallel import world_size
from agentevo.models.grammar import Grammars
from agentevo.models.sharded import gather_into, is_sharded, shard
from agentevo.orchestration.components import load_policy, load_token_reward_model
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.learner import PreparedBatch
from agentevo.training.mesh import Meshes, make_meshes
from agentevo.training.optimization import Optimization
from agentevo.training.trainer import Trainer
from agentevo.types import Sample, Trajectory

COMPUTING = timedelta(minutes=10)
"""The longest that a process waits for the others within one call."""
SAMPLING = timedelta(days=7)
"""The longest that others wait for the first process's next call; its end they see at once."""


class Ranks:
    """This process among those that train together."""

    def __init__(self, meshes: Meshes, calls: distributed.ProcessGroup) -> None:
        self._meshes, self._calls = meshes, calls

    def tell(self, name: str, *arguments: Any, **options: Any) -> None:
        """On the first process: the others make this call, too."""
        distributed.broadcast_object_list([(name, arguments, options)], 0, group=self._calls)

    def told(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """On the others: the next call."""
        told: list[Any] = [None]
        distributed.broadcast_object_list(told, 0, group=self._calls)
        return cast(tuple[str, tuple[Any, ...], dict[str, Any]], told[0])

    def trainer(
        self, config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> Trainer:
        """This process's trainer of its model, which it shards where the recipe says so."""
        if config.trainer.parallel.shard > 1:
            model = shard(model, self._meshes.data)
        return policy_trainer(config, model, tokenizer)


def follows() -> bool:
    """Whether this process is one of several and not the first."""
    return world_size() > 1 and os.environ.get("RANK", "0") != "0"


@contextmanager
def joined(config: RunConfig) -> Iterator[Ranks | None]:
    """Among the others that the launcher has started; None where there are none."""
    if world_size() == 1:
        yield None
        return
    device = devices.find(config.model.device)
    devices.take(device, int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group(devices.collectives(device), timeout=COMPUTING)
    try:
        meshes = make_meshes(config.trainer.parallel, device.type)
        calls = distributed.new_group(backend="gloo", timeout=SAMPLING)
        ranks = Ranks(meshes, calls)
        yield ranks
        if distributed.get_rank() == 0:
            ranks.tell("end")
    finally:
        distributed.destroy_process_group()


def follow(config: RunConfig) -> None:
    """Makes the first process's calls until it ends; blocks."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with joined(config) as ranks:
        assert ranks is not None, "only one of several processes follows"
        trainer: Trainer | None = None
        while True:
            name, arguments, options = ranks.told()
            if name == "end":
                return
            if name == "start":
                (checkpoint,) = arguments
                loaded = load_policy(config, checkpoint)
                trainer = ranks.trainer(config, loaded.model, loaded.tokenizer)
                continue
            assert trainer is not None, f"{name} before start"
            if name == "load_state_dict":
                arguments = (saved_state(config, *arguments),)
            getattr(trainer, name)(*arguments, **options)
            if name == "step" and is_sharded(trainer.model):
                gather_into(trainer.model, None)


def saved_state(config: RunConfig, checkpoint: Path) -> dict[str, Any]:
    """The trainer's state in a checkpoint."""
    folder = Checkpoints(checkpoint.parent, config.checkpoint.keep_last, alone=True)
    return folder.load(checkpoint)[0]


class LeadingTrainer:
    """The first process's trainer: a RolloutTrainer whose calls all processes make together."""

    def __init__(
        self,
        ranks: Ranks,
        config: RunConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        checkpoint: Path | None,
    ) -> None:
        """`model` is the one that serves; `checkpoint` what it was loaded from."""
        self._ranks, self._serving, self._checkpoint = ranks, model, checkpoint
        ranks.tell("start", checkpoint)
        trained = copy.deepcopy(model) if config.trainer.parallel.shard > 1 else model
        self._trainer = ranks.trainer(config, trained, tokenizer)

    @property
    def optimization(self) -> Optimization:
        return self._trainer.optimization

    @property
    def steps(self) -> int:
        return self._trainer.steps

    def begin(self) -> None:
        """See Learner.begin."""
        self._ranks.tell("begin")
        self._trainer.begin()

    def prepare(
        self,
        trajectories: Sequence[Trajectory],
        baselines: Mapping[str, float] = MappingProxyType({}),
        *,
        version: int | None = None,
        bound: int | None = None,
    ) -> PreparedBatch:
        """See RolloutTrainer.prepare."""
        given: Any = (list(trajectories), dict(baselines))
        self._ranks.tell("prepare", *given, version=version, bound=bound)
        return self._trainer.prepare(*given, version=version, bound=bound)

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """See Learner.step."""
        self._ranks.tell("step", samples)
        metrics = self._trainer.step(samples)
        if is_sharded(self._trainer.model):
            gather_into(self._trainer.model, self._serving)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """See Learner.state_dict."""
        self._ranks.tell("state_dict")
        return self._trainer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Learner.load_state_dict; the others read the checkpoint's file themselves."""
        self._ranks.tell("load_state_dict", self._checkpoint)
        self._trainer.load_state_dict(state)


def policy_trainer(
    config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Trainer:
    """The trainer of a policy that learns by advantages, as the recipe says."""
    return Trainer(
        model,
        config.trainer,
        config.algorithm,
        critic=config.critic,
        process_reward=config.process_reward,
        reward_model=load_token_reward_model(config, model, tokenizer),
        memory=config.memory,
        grammars=Grammars.of(model, tokenizer),
    )
