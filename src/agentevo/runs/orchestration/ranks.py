"""Several processes that train together, started by torchrun: the first one runs the run, the
others carry out its commands.

    first    train -> run_training -> RankTrainer.step(samples) -+-> Trainer.step
    others   train -> follow                                     +-> Trainer.step

Only the first process samples, evaluates, uses store and folder, answers control requests and
decides to stop. Before each call of one of its trainers (rank_trainers.py) it sends the others the
command (rank_commands.py), and all make the call together. A checkpoint's model is the same for any
number of processes, each process writes its own part of the trainer's state, and a resume may have
other processes.

A process that fails ends, which breaks its connections: the processes that wait for it fail
immediately with its error (rank_failures.py), and the launcher ends the rest. SIGTERM to any
process stops the first one cleanly, and that ends the others (rank_stops.py). Only the first
process handles Ctrl-C.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import distributed
from transformers import PreTrainedModel

from agentevo.config import RunConfig
from agentevo.config.parallel import world_size
from agentevo.inference.weights.part_deltas import PublishedParts
from agentevo.models.files.split_models import CompareParts, GiveChanges, GiveParts, KeepParts
from agentevo.runs.orchestration.components import load_policy
from agentevo.runs.orchestration.learners import AnyTrainer, make_learner, saved_state
from agentevo.runs.orchestration.rank_commands import (
    BeginTraining,
    ContributeState,
    FollowerCommand,
    GatherWeights,
    LoadPolicy,
    LoadTrainerState,
    MakeTrainer,
    MeasureHeldOut,
    PrepareAttempts,
    RankCommand,
    StopFollowing,
    TakeOptimizer,
    TrainerCommand,
    TrainStep,
    title_of,
)
from agentevo.runs.orchestration.rank_failures import Failures, RankLog
from agentevo.runs.orchestration.rank_stops import Stops, catch_sigterm
from agentevo.runtime import devices
from agentevo.training.checkpoint_parts import Contribution
from agentevo.training.distribute import spread
from agentevo.training.mesh import Meshes, make_meshes
from agentevo.training.sharding.layouts import gather_trained
from agentevo.training.sharding.saving import saved_parts, weight_parts
from agentevo.training.state_parts import split_state
from agentevo.training.supervised import SupervisedTrainer
from agentevo.training.trainer import Trainer

COMPUTING = timedelta(minutes=10)
"""The time limit of a process's wait for the others within one call."""
SAVING = timedelta(hours=1)
"""The same while a checkpoint is written, which depends on the slowest disk."""
SAMPLING = timedelta(days=7)
"""The time limit of the other processes' wait for the first process's next call. They notice its
end immediately."""


class RunRanks:
    """This process among those that train together."""

    def __init__(
        self,
        meshes: Meshes,
        calls: distributed.ProcessGroup,
        failures: Failures,
        stops: Stops,
        weights: distributed.ProcessGroup | None = None,
        saves: distributed.ProcessGroup | None = None,
    ) -> None:
        """Groups of all processes for data on the CPU: `calls` for calls of trainers, `weights` for
        weights on their way to the first process, and `saves` for checkpoints, whose traffic may
        overlap with both."""
        self.meshes = meshes
        self._calls = calls
        self._failures = failures
        self.stops = stops
        self.weights = weights
        self.saves = saves

    def send(self, command: RankCommand) -> None:
        """Called on the first process: the other processes carry out this command."""
        distributed.broadcast_object_list([command], 0, group=self._calls)

    def receive(self) -> RankCommand:
        """Called on the other processes: waits for the next command and returns it."""
        message: list[Any] = [None]
        distributed.broadcast_object_list(message, 0, group=self._calls)
        return cast(RankCommand, message[0])

    def share(self, model: PreTrainedModel) -> PreTrainedModel:
        """This process's part of a model that all have loaded."""
        return spread(model, self.meshes)

    def log(self, run_dir: Path) -> RankLog:
        """The log of this process from this point on."""
        failures = self._failures
        place = ", ".join(
            f"{name} {index} of {size}"
            for name, index, size in self.meshes.coordinates()
            if size > 1
        )
        failures.log = RankLog(run_dir, failures.rank, failures.world, place or "alone")
        return failures.log


@contextmanager
def join_ranks(config: RunConfig) -> Iterator[RunRanks | None]:
    """Joins the other processes that the launcher has started; yields None if there are none.
    Raises TrainingError with the reason for which another process has ended."""
    if world_size() == 1:
        yield None
        return

    device = devices.find(config.model.device)
    devices.use_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, world = next(distributed.rendezvous("env://", timeout=COMPUTING))
    failures = Failures(distributed.PrefixStore("failures", store), rank, world)

    distributed.init_process_group(
        devices.collectives(device),
        store=distributed.PrefixStore("groups", store),
        rank=rank,
        world_size=world,
        timeout=COMPUTING,
    )
    try:
        meshes = make_meshes(config.trainer.parallel, device.type)
        calls = distributed.new_group(backend="gloo", timeout=SAMPLING)
        weights, saves = (
            distributed.new_group(backend="gloo", timeout=limit) for limit in (COMPUTING, SAVING)
        )
        stops = Stops(distributed.PrefixStore("stops", store), rank)
        ranks = RunRanks(meshes, calls, failures, stops, weights, saves)
        try:
            yield ranks
        except (KeyboardInterrupt, SystemExit):
            with suppress(RuntimeError):  # they may be gone already
                _send_home(ranks, rank)
            raise

        _send_home(ranks, rank)
    except Exception as error:
        shown = failures.report(error)
        if shown is error:
            raise
        raise shown from error
    finally:
        distributed.destroy_process_group()


def _send_home(ranks: RunRanks, rank: int) -> None:
    if rank == 0:
        ranks.send(StopFollowing())


def follow(config: RunConfig) -> None:
    """Carries out the first process's commands until it ends; blocks."""
    with catch_sigterm() as when_sigterm, join_ranks(config) as ranks:
        assert ranks is not None, "only a process of a training with several processes can follow"

        when_sigterm(ranks.stops.announce)
        follower: _RankFollower | None = None
        while True:
            match ranks.receive():
                case StopFollowing():
                    if follower is not None:
                        follower.saves.end()
                    return
                case LoadPolicy(checkpoint):
                    follower = _RankFollower(ranks, config, checkpoint)
                case command:
                    assert follower is not None, f"{title_of(command)} before LoadPolicy"
                    follower.carry_out(command)


class _SharedSaves:
    """Used on processes other than the first: contributes to checkpoints, one at a time,
    immediately or while the next step runs. TrainingRun saves with the first process's own
    contribution."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def give(self, contribution: Contribution, *, copied: bool) -> None:
        """A thread gives a copied contribution. Raises the error of the previous one."""
        self.end()
        if not copied:
            contribution.give()
            return

        def work() -> None:
            try:
                contribution.give()
            except Exception as error:  # noqa: BLE001 (raised by `end`)
                self._failure = error

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Waits for the contribution in progress; raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure


class _RankFollower:
    """A process other than the first: its part of the model, and its trainers."""

    def __init__(self, ranks: RunRanks, config: RunConfig, checkpoint: Path | None) -> None:
        self._config = config
        self._ranks = ranks
        self.saves = _SharedSaves()
        self._log = ranks.log(config.run_dir)
        loaded = load_policy(config, checkpoint, for_part=True)
        self._model = ranks.share(loaded.model)
        self._tokenizer = loaded.tokenizer
        self._trainers: dict[str, AnyTrainer] = {}
        self._published = PublishedParts(partial(weight_parts, self._model), ranks.weights)

    def carry_out(self, command: FollowerCommand) -> None:
        with self._log.call(title_of(command)):
            match command:
                case MakeTrainer(kind):
                    self._trainers[kind.name] = make_learner(
                        self._config, kind, self._model, self._tokenizer, self._ranks.share
                    )
                case GatherWeights():
                    gather_trained(self._model, None)
                case GiveParts() | CompareParts() | GiveChanges() | KeepParts():
                    self._published.carry_out(command)
                case _:
                    self._train(self._trainers[command.name], command)

    def _train(self, trainer: AnyTrainer, command: TrainerCommand) -> None:
        match command:
            case BeginTraining():
                trainer.begin()
            case PrepareAttempts():
                assert isinstance(trainer, Trainer)
                command.apply(trainer)
            case TrainStep():
                trainer.step(command.samples)
            case MeasureHeldOut():
                assert isinstance(trainer, SupervisedTrainer)
                trainer.held_out(command.samples)
            case LoadTrainerState():
                trainer.load_state_dict(self._saved_state(command.checkpoint))
            case TakeOptimizer():
                state = self._saved_state(command.checkpoint)
                trainer.optimization.carry_on(state["optimization"])
            case ContributeState():
                contribution = contribution_of(
                    self._model, trainer.state_dict(), self._ranks.saves, command
                )
                self.saves.give(contribution, copied=command.copied)

    def _saved_state(self, checkpoint: Path) -> dict[str, Any]:
        in_parts = self._config.trainer.parallel.is_spread
        return saved_state(self._config, checkpoint, in_parts=in_parts)


def contribution_of(
    model: PreTrainedModel,
    state: dict[str, Any],
    group: distributed.ProcessGroup | None,
    command: ContributeState,
) -> Contribution:
    """This process's contribution, made of its trainer's state."""
    _, parts = split_state(state)
    contribution = Contribution(saved_parts(model) if command.with_weights else {}, parts, group)
    return contribution.copy() if command.copied else contribution
