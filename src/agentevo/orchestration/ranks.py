"""Several processes that train together, started by torchrun: the first one runs the run, the
others take its trainers' calls.

    first    train -> run_training -> Leader, Led.step(samples) -+-> Trainer.step
    others   train -> follow                                     +-> Trainer.step

Only the first process samples, evaluates, uses store and folder, answers control requests and
decides to stop. It sends each call of its trainers to the others beforehand, with the arguments,
and all make the call together. If the processes hold the model in parts and the first process's own
engine serves, the first process also has a whole model, into which the parts are gathered after
every update, tensor by tensor. If other engines serve, it has no whole model: weights are gathered
tensor by tensor to publish and save them. A checkpoint's model is the same for any number of
processes, each process writes its own part of the trainer's state, and a resume may have other
processes.

A process that fails ends, which breaks its connections: the processes that wait for it fail
immediately with its error (rank_failures.py), and the launcher ends the rest. SIGTERM to any
process stops the first one cleanly, and that ends the others (rank_stops.py). Only the first
process handles Ctrl-C.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from torch import distributed
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentevo import devices
from agentevo.config import RunConfig
from agentevo.config.parallel import world_size
from agentevo.inference.part_deltas import PublishedParts
from agentevo.models.in_parts import InParts, lies_in_parts
from agentevo.models.parts import give
from agentevo.models.sharded import skeleton_of
from agentevo.orchestration.components import load_policy
from agentevo.orchestration.learners import make_learner
from agentevo.orchestration.rank_failures import Failures, RankLog
from agentevo.orchestration.rank_stops import Stops, catch_sigterm
from agentevo.training.batching.credit import TurnCredits
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.contribution import Contribution
from agentevo.training.learner import PreparedBatch
from agentevo.training.mesh import Meshes, make_meshes
from agentevo.training.optimization import Optimization
from agentevo.training.sharding.layouts import gather_trained
from agentevo.training.sharding.saving import saved_parts, weight_parts
from agentevo.training.spread import spread
from agentevo.training.state_parts import split_state
from agentevo.training.token_numbers import TokenNumbers
from agentevo.types import Sample, Trajectory

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

    def broadcast_call(self, learner: str, name: str, *arguments: Any, **options: Any) -> None:
        """Called on the first process: the other processes make this call too."""
        message = [(learner, name, arguments, options)]
        distributed.broadcast_object_list(message, 0, group=self._calls)

    def next_call(self) -> tuple[str, str, tuple[Any, ...], dict[str, Any]]:
        """Called on the other processes: waits for the next call and returns it."""
        message: list[Any] = [None]
        distributed.broadcast_object_list(message, 0, group=self._calls)
        return cast(tuple[str, str, tuple[Any, ...], dict[str, Any]], message[0])

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
        ranks.broadcast_call("", "end")


def follow(config: RunConfig) -> None:
    """Makes the first process's calls until it ends; blocks."""
    with catch_sigterm() as when_sigterm, join_ranks(config) as ranks:
        assert ranks is not None, "only a process of a training with several processes can follow"

        when_sigterm(ranks.stops.announce)
        follower: _RankFollower | None = None
        while True:
            learner, name, arguments, options = ranks.next_call()
            if name == "end":
                if follower is not None:
                    follower.saves.end()
                return

            if name == "start":
                follower = _RankFollower(ranks, config, *arguments)
                continue
            assert follower is not None, f"{name} before start"

            follower.call(learner, name, arguments, options)


_OF_DELTAS: dict[str, Callable[[PublishedParts], object]] = {
    "compare": PublishedParts.compare,
    "give_changes": PublishedParts.give,
    "keep": PublishedParts.keep,
}
"""The calls that the first process asks of the others while it publishes changed weights."""


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
        self._share = ranks.share
        self._ranks = ranks
        self.saves = _SharedSaves()
        self._log = ranks.log(config.run_dir)
        loaded = load_policy(config, checkpoint, for_part=True)
        self._model = ranks.share(loaded.model)
        self._tokenizer = loaded.tokenizer
        self._learners: dict[str, Any] = {}
        self._published = PublishedParts(partial(weight_parts, self._model, True), ranks.weights)

    def call(
        self, learner: str, name: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        with self._log.call(f"{learner} {name}"):
            if name == "make":
                self._learners[learner] = make_learner(
                    self._config, learner, self._model, self._tokenizer, self._share, *arguments
                )
            elif name == "gather":
                gather_trained(self._model, None)
            elif name == "give":
                give(weight_parts(self._model, *arguments), self._ranks.weights)
            elif name in _OF_DELTAS:
                _OF_DELTAS[name](self._published)
            elif name == "contribute":
                self._contribute(self._learners[learner].state_dict(), **options)
            elif name == "load_state_dict":
                self._learners[learner].load_state_dict(saved_state(self._config, *arguments))
            elif name == "carry_on":
                saved = saved_state(self._config, *arguments)
                self._learners[learner].optimization.carry_on(saved["optimization"])
            else:
                getattr(self._learners[learner], name)(*arguments, **options)

    def _contribute(self, state: dict[str, Any], *, with_weights: bool, copied: bool) -> None:
        contribution = _contribution_of(
            self._model, state, self._ranks.saves, with_weights=with_weights, copied=copied
        )
        self.saves.give(contribution, copied=copied)


def _contribution_of(
    model: PreTrainedModel,
    state: dict[str, Any],
    group: distributed.ProcessGroup | None,
    *,
    with_weights: bool,
    copied: bool,
) -> Contribution:
    """This process's contribution, made of its trainer's state. `with_weights`: no process has the
    whole model. `copied`: of the state as it is now, although training continues before it is
    written."""
    _, parts = split_state(state)
    contribution = Contribution(saved_parts(model) if with_weights else {}, parts, group)
    return contribution.copy() if copied else contribution


def saved_state(config: RunConfig, checkpoint: Path) -> dict[str, Any]:
    """The trainer's state in a checkpoint, from which this process reads what it needs."""
    folder = Checkpoints(checkpoint.parent, config.checkpoint.keep_last, is_only_caller=True)
    return folder.load(checkpoint, mapped=config.trainer.parallel.is_spread)[0]


class Leader:
    """Used on the first process: the policy that all processes train, and its trainers."""

    def __init__(
        self,
        ranks: RunRanks,
        config: RunConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        checkpoint: Path | None,
        *,
        serves: bool = True,
    ) -> None:
        """`model` serves, unless other engines do (`serves=False`); in that case it becomes this
        process's part. `checkpoint`: the one from which the model was loaded."""
        self.ranks = ranks
        self.serving = model
        self.checkpoint = checkpoint
        self._config = config
        self._tokenizer = tokenizer
        ranks.broadcast_call("", "start", checkpoint)
        self.log = ranks.log(config.run_dir)
        self._is_spread = config.trainer.parallel.is_spread
        self._has_whole = serves or not self._is_spread
        """Whether this process also has the whole model."""

        if self._is_spread:
            part_of = load_policy(config, checkpoint, for_part=True).model if serves else model
            self._model = ranks.share(part_of)
        else:
            self._model = model

        if not self._has_whole:
            lies_in_parts(
                model,
                InParts(
                    skeleton_of(model),
                    lambda only_trained: weight_parts(model, only_trained),
                    partial(ranks.broadcast_call, ""),
                    ranks.weights,
                ),
            )

    def make(self, name: str, *arguments: Any, local: Callable[..., Any] | None = None) -> Led:
        """A trainer that all processes make (learners.py). `local` makes this process's trainer,
        where it needs more than those of the others."""
        self.ranks.broadcast_call(name, "make", *arguments)
        learner = (
            make_learner(
                self._config, name, self._model, self._tokenizer, self.ranks.share, *arguments
            )
            if local is None
            else local(self._model)
        )
        return Led(self, name, learner)

    def saved_state(self, checkpoint: Path) -> dict[str, Any]:
        """See `saved_state`."""
        return saved_state(self._config, checkpoint)

    def gather(self) -> None:
        """Copies the trained weights into the model that serves."""
        if self._is_spread and self._has_whole:
            self.ranks.broadcast_call("", "gather")
            gather_trained(self._model, self.serving)

    def contribution(self, learner: Led, *, copied: bool) -> tuple[dict[str, Any], Contribution]:
        """The trainer's state and what all processes add to its checkpoint. The other processes
        begin now. `copied`: of the state as it is now, whenever it is written."""
        options = {"with_weights": not self._has_whole, "copied": copied}
        self.ranks.broadcast_call(learner.name, "contribute", **options)
        state = learner.own_state()
        return state, _contribution_of(self._model, state, self.ranks.saves, **options)


class Led:
    """The first process's trainer, of any kind. All processes make its calls together."""

    def __init__(self, leader: Leader, name: str, learner: Any) -> None:
        self._leader = leader
        self.name = name
        self._learner = learner

    def _all(self, name: str, *arguments: Any, local_arguments: Any = None, **options: Any) -> Any:
        """Makes the call on all processes. `local_arguments` replaces the arguments on this
        process."""
        with self._leader.log.call(f"{self.name} {name}"):
            self._leader.ranks.broadcast_call(self.name, name, *arguments, **options)
            return getattr(self._learner, name)(
                *(arguments if local_arguments is None else local_arguments), **options
            )

    @property
    def optimization(self) -> Optimization:
        return cast(Optimization, self._learner.optimization)

    @property
    def steps(self) -> int:
        return cast(int, self._learner.steps)

    @property
    def numbers(self) -> TokenNumbers | None:
        """See RolloutTrainer.numbers."""
        return cast(TokenNumbers | None, getattr(self._learner, "numbers", None))

    def begin(self) -> None:
        """See Learner.begin."""
        self._all("begin")

    def prepare(
        self,
        trajectories: Sequence[Trajectory],
        baselines: Mapping[str, float] = MappingProxyType({}),
        *,
        version: int | None = None,
        bound: int | None = None,
        turn_credits: TurnCredits = MappingProxyType({}),
    ) -> PreparedBatch:
        """See RolloutTrainer.prepare. Making pairs of attempts needs no model, so this process does
        it alone."""
        attempts = list(trajectories)
        by_task = dict(baselines)
        options = {"version": version, "bound": bound, "turn_credits": dict(turn_credits)}
        if self.name == "preferences":
            prepared = self._learner.prepare(attempts, by_task, **options)
        else:
            prepared = self._all("prepare", attempts, by_task, **options)
        return cast(PreparedBatch, prepared)

    def step(self, samples: Sequence[Any]) -> dict[str, float]:
        """See Learner.step."""
        metrics: dict[str, float] = self._all("step", samples)
        self._leader.gather()
        return metrics

    def held_out(
        self, samples: Sequence[Sample], *, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """See SupervisedTrainer.held_out. Only this process can stop it."""
        ranks = self._leader.ranks
        ranks.broadcast_call(self.name, "held_out", samples)
        metrics: dict[str, float] | None = self._learner.held_out(samples, stop=stop)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """See Learner.state_dict."""
        return cast(dict[str, Any], self._all("state_dict"))

    def carry_on(self, checkpoint: Path) -> None:
        """See Optimization.carry_on: every process reads the other run's checkpoint."""
        self._leader.ranks.broadcast_call(self.name, "carry_on", checkpoint)
        self.optimization.carry_on(self._leader.saved_state(checkpoint)["optimization"])

    def own_state(self) -> dict[str, Any]:
        """This process's part of `state_dict`. The others make theirs at the same time."""
        return cast(dict[str, Any], self._learner.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Learner.load_state_dict. The others read the checkpoint's file themselves."""
        self._all("load_state_dict", self._leader.checkpoint, local_arguments=(state,))
