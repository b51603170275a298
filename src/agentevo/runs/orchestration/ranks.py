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
immediately with its error (`Failures`), and the launcher ends the rest. SIGTERM to any process
stops the first one cleanly, and that ends the others (`Stops`). Only the first process handles
Ctrl-C.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import distributed
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentevo.config import RunConfig
from agentevo.config.parallel import world_size
from agentevo.errors import AgentEvoError, TrainingError, describe_error
from agentevo.inference.weights.part_deltas import PublishedParts
from agentevo.models.files.split_models import CompareParts, GiveChanges, GiveParts, KeepParts
from agentevo.runs.orchestration.components import load_policy
from agentevo.runs.orchestration.learners import AnyTrainer, LocalTrainers, saved_state
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
    ShowImages,
    StopFollowing,
    TakeOptimizer,
    TrainerCommand,
    TrainStep,
    title_of,
)
from agentevo.runtime import devices
from agentevo.runtime.seeds import derive_seed
from agentevo.runtime.signals import STOPPING
from agentevo.training.checkpoint_parts import Contribution
from agentevo.training.distribute import spread
from agentevo.training.mesh import Meshes, make_meshes
from agentevo.training.sharding.layouts import gather_trained
from agentevo.training.sharding.saving import saved_parts, weight_parts
from agentevo.training.state_parts import split_state

COMPUTING = timedelta(minutes=10)
"""The time limit of a process's wait for the others within one call."""
SAVING = timedelta(hours=1)
"""The same while a checkpoint is written, which depends on the slowest disk."""
SAMPLING = timedelta(days=7)
"""The time limit of the other processes' wait for the first process's next call. They notice its
end immediately."""
ERROR_WAIT_S = 3.0
"""How long a process whose connection broke waits for the error of another one."""
STOP_POLL_S = 0.5
_FAILURE = "failure"
_STOP = "rank that was asked to stop"
_LOST = ("connection", "gloo", "nccl", "timed out", "timeout", "socket", "peer", "recvvalue")


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

    def trainers(
        self, config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> LocalTrainers:
        """Makes this process's trainers; `model` is its part of the policy."""
        seed = derive_seed(config.run.seed, "cold-start")
        return LocalTrainers(config, model, tokenizer, self.share, cold_start_seed=seed)

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
        self._local = ranks.trainers(config, self._model, loaded.tokenizer)
        self._trainers: dict[str, AnyTrainer] = {}
        self._published = PublishedParts(partial(weight_parts, self._model), ranks.weights)

    def carry_out(self, command: FollowerCommand) -> None:
        with self._log.call(title_of(command)):
            match command:
                case MakeTrainer():
                    self._trainers[command.name] = self._make(command)
                case GatherWeights():
                    gather_trained(self._model, None)
                case GiveParts() | CompareParts() | GiveChanges() | KeepParts():
                    self._published.carry_out(command)
                case _:
                    self._train(self._trainers[command.name], command)

    def _make(self, command: MakeTrainer) -> AnyTrainer:
        match command.name:
            case "policy":
                return self._local.policy()
            case "preferences":
                return self._local.preferences(None)  # only the first process makes pairs
            case "sft":
                return self._local.conversations(command.total_steps)
            case "cold_start":
                assert command.settings is not None
                return self._local.cold_start(command.settings, command.total_steps)

    def _train(self, trainer: AnyTrainer, command: TrainerCommand) -> None:
        match command:
            case (
                BeginTraining() | ShowImages() | PrepareAttempts() | TrainStep() | MeasureHeldOut()
            ):
                command.apply(trainer)
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


class Failures:
    """The failures of the processes that train together: which process failed first, and why.

    A process that fails writes its error into the store that all processes share, before its
    connections break. The processes that wait for it then fail with that error instead of a
    connection error. A process that was killed can write nothing: the others report that a process
    is gone. This process has number `rank`.
    """

    def __init__(self, store: distributed.Store, rank: int, world: int) -> None:
        self._store = store
        self.rank = rank
        self.world = world
        self.log: RankLog | None = None

    def report(self, error: BaseException) -> BaseException:
        """Called once with the error that has ended this process's part; returns the error to
        raise. The first failure of all is shown, with the process's number, before the other
        processes can know of it."""
        is_lost = isinstance(error, RuntimeError) and _is_lost(error)
        first = self._first(ERROR_WAIT_S if is_lost else 0.0)
        if first is None and not is_lost:
            first = self._publish(error)
        if self.log is not None:
            self.log.log_failure(error)

        if first is not None and first[0] == self.rank:
            print(f"process {self.rank} of {self.world}: {describe_error(error)}", file=sys.stderr)
            sys.stderr.flush()
            return error

        if isinstance(error, AgentEvoError) or not is_lost:
            return error

        if first is None:
            return TrainingError(
                f"another one of the {self.world} processes that train together ended without an "
                f"error message (killed, or out of memory), or did not answer in time: see its "
                f"launcher's output, and resume the run"
            )

        return TrainingError(f"process {first[0]} of {self.world} failed first: {first[1]}")

    def _publish(self, error: BaseException) -> tuple[int, str] | None:
        """Writes this process's error into the store; returns the first error that a process has
        written."""
        words = json.dumps([self.rank, describe_error(error)])
        with suppress(RuntimeError):  # the process that had the store has ended
            return _read(self._store.compare_set(_FAILURE, "", words))
        return self.rank, describe_error(error)

    def _first(self, within_s: float) -> tuple[int, str] | None:
        deadline = time.monotonic() + within_s
        while True:
            try:
                if self._store.check([_FAILURE]):
                    return _read(self._store.get(_FAILURE))
            except RuntimeError:
                return None

            if time.monotonic() >= deadline:
                return None

            time.sleep(0.05)


def _read(words: bytes | str) -> tuple[int, str]:
    rank, text = json.loads(words)
    return int(rank), str(text)


def _is_lost(error: RuntimeError) -> bool:
    """Whether the error may be a collective's report that another process is gone."""
    text = str(error).lower()
    return isinstance(error, distributed.DistError) or any(word in text for word in _LOST)


class RankLog:
    """The log of one process, RUN/logs/rank-N.log: its calls, and the traceback at its end. A run
    folder that this machine does not see has none."""

    def __init__(self, run_dir: Path, rank: int, world: int, place: str) -> None:
        """`place`: the position of the process among the others."""
        self._path: Path | None = None
        if run_dir.is_dir():
            self._path = run_dir / "logs" / f"rank-{rank}.log"
        self._write(f"process {rank} of {world} ({place}): {socket.gethostname()}, {os.getpid()}")

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """A context around one call that all processes make."""
        started = time.perf_counter()
        yield
        self._write(f"{name}: {time.perf_counter() - started:.3f} s")

    def log_failure(self, error: BaseException) -> None:
        """Logs the end, with the traceback."""
        self._write("".join(traceback.format_exception(error)).rstrip())

    def _write(self, text: str) -> None:
        if self._path is None:
            return

        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        except OSError as error:  # a full disk loses the log, and nothing depends on it
            print(f"{self._path} can't be written any more: {error}", file=sys.stderr)
            self._path = None


class Stops:
    """Stops that any process of a shared training receives, for example from the scheduler of its
    machine. The other processes pass them on through the store that they all share. This holds for
    SIGTERM only: Ctrl-C reaches all processes of a terminal, and a second Ctrl-C means something
    else. This process has number `rank`."""

    def __init__(self, store: distributed.Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def announce(self) -> None:
        """Called on a process other than the first: this process was asked to stop."""
        with suppress(RuntimeError):  # the first process has ended, and all others notice that
            self._store.set(_STOP, str(self._rank))

    @contextmanager
    def watch(self, stop_signals: list[int], note: Callable[[str], None]) -> Iterator[None]:
        """Used on the first process: a stop that another process receives counts as a stop of this
        one."""
        done = threading.Event()

        def listen() -> None:
            while not done.wait(STOP_POLL_S):
                try:
                    if not self._store.check([_STOP]):
                        continue
                    rank = self._store.get(_STOP).decode()
                except RuntimeError:  # the process that had the store has ended
                    return

                if not stop_signals:
                    stop_signals.append(signal.SIGTERM)
                    note(f"process {rank} was asked to stop (SIGTERM): {STOPPING}")

                return

        thread = threading.Thread(target=listen, name="stops", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@contextmanager
def catch_sigterm() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Makes SIGTERM not end this process, and Ctrl-C do nothing. Yields a function that is called
    once, with the callback for SIGTERM; the callback is also called if SIGTERM has already arrived.
    Python runs a handler only when the main thread returns from what it waits for, so a separate
    thread listens."""
    registered = threading.Event()
    callbacks: list[Callable[[], None]] = []
    arrived, wakes = os.pipe()
    os.set_blocking(wakes, False)

    def listen() -> None:
        while number := os.read(arrived, 1):
            if number[0] == signal.SIGTERM:
                registered.wait()
                if callbacks:
                    callbacks[0]()

    def register(call: Callable[[], None]) -> None:
        callbacks.append(call)
        registered.set()

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    with ExitStack() as stack:
        before = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        former = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        thread.start()
        stack.callback(os.close, arrived)
        stack.callback(thread.join)
        stack.callback(registered.set)
        stack.callback(os.close, wakes)
        stack.callback(signal.set_wakeup_fd, former)
        for number, handler in before.items():
            stack.callback(signal.signal, number, handler)

        yield register
