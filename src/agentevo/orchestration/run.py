"""A run: training from a configuration, and what can be asked of it afterwards."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, Unpack

import yaml

from agentevo.config import RunConfig, sources, to_yaml, with_defaults
from agentevo.errors import CheckpointError, ConfigError
from agentevo.models.adapters import check_lora
from agentevo.models.resolve import resolve
from agentevo.observability import LiveView
from agentevo.orchestration.audit import Audit, audit
from agentevo.orchestration.children import Children
from agentevo.orchestration.components import (
    AgentFunction,
    Components,
    check_memory,
    make_environment,
    open_components,
)
from agentevo.orchestration.evaluation import evaluate, reference_players
from agentevo.orchestration.preference import check_preference
from agentevo.orchestration.replay import Replay, replay
from agentevo.orchestration.shared_store import prepare_store
from agentevo.orchestration.training_run import only_trainer, run_training
from agentevo.rollout.task_source import TaskSource
from agentevo.run_folder import read_store
from agentevo.store.store import TrajectoryFilter, without_password
from agentevo.training.checkpoint import Checkpoints
from agentevo.types import Task, Trajectory

T = TypeVar("T")

FIXED_SECTIONS = ("model", "environment", "agent", "cold_start", "data")
"""What a resumed run can't change: it would be another run."""
FIXED_KEYS = ("run.seed", "memory.optimizer", "store.url")
"""Likewise."""
QUEUED_KEYS = ("trainer.groups_per_step", "trainer.group_size")
"""Likewise where sampling runs beside training: tasks are queued for them, and groups that wait in the store have that size."""
UNIMPORTANT_KEYS = ("run.dir", "run.name", "run.overwrite")
"""They say where a run is and not what it is; its folder may have been moved."""


class Run:
    """A finished (or interrupted) run in its folder. Methods block; call them outside of an event loop."""

    def __init__(self, config: RunConfig, *, agent: AgentFunction | None = None, tasks: Sequence[Task] | None = None) -> None:
        self.config, self._agent, self._tasks = config, agent, tasks

    @property
    def dir(self) -> Path:
        return self.config.run_dir

    @property
    def summary(self) -> dict[str, Any]:
        """Contents of summary.json; empty before the run has ended once."""
        path = self.dir / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    @property
    def checkpoint(self) -> Path:
        """The best checkpoint, or the last one if none was evaluated: a Hugging Face model folder, or a PEFT adapter's."""
        return self.checkpoint_path("best")

    def checkpoint_path(self, which: str) -> Path:
        """`best`, `last`, or a path. Raises CheckpointError if there is none."""
        return Checkpoints(self.dir / "checkpoints", self.config.checkpoint.keep_last).find(which)

    def eval(self, *, checkpoint: str = "best", samples: int = 1, view: LiveView | None = None) -> dict[str, float]:
        """Evaluates a checkpoint on the held-out tasks: `val-core/...` metrics. Nothing is written."""
        path = self.checkpoint_path(checkpoint)
        _, state = Checkpoints(self.dir / "checkpoints", self.config.checkpoint.keep_last).load(path)
        return run_coroutine(self._evaluate(path, int(state["progress"]["step"]), samples, view))

    def trajectories(self, **filters: Unpack[TrajectoryFilter]) -> list[Trajectory]:
        """Stored trajectories, oldest first; see TrajectoryFilter."""

        async def read(store: Any) -> list[Trajectory]:
            return [stored.trajectory async for stored in store.trajectories(**filters)]

        return read_store(self.dir, read)

    def replay(self, trajectory_id: str, *, rebuild: bool = False) -> Replay:
        """Makes a trajectory again from its seeds and the stored weights and compares it with the record (orchestration/replay.py).

        `rebuild`: weights that no file holds any more are trained again from the store."""
        return run_coroutine(replay(self.config, trajectory_id, made_again=rebuild, agent=self._agent, tasks=self._tasks))[0]

    def replays(self, count: int, *, rebuild: bool = False) -> list[Replay]:
        """The same of so many training trajectories, drawn at random by the run's seed; without `rebuild` of those whose weights are
        still there."""
        return run_coroutine(replay(self.config, sample=count, made_again=rebuild, agent=self._agent, tasks=self._tasks))

    def audit(self) -> Audit:
        """Proves from the store what each step was made from (orchestration/audit.py)."""
        return read_store(self.dir, lambda store: audit(store, self.dir))

    async def _evaluate(self, path: Path, step: int, samples: int, view: LiveView | None) -> dict[str, float]:
        with _throwaway_store() as url:
            async with open_components(self.config, agent=self._agent, tasks=self._tasks, checkpoint=path, store_url=url) as parts:
                return await _shown(parts, step, samples, view)


@contextmanager
def _throwaway_store() -> Iterator[str]:
    """URL of a store for trajectories that nobody keeps: a finished run's own record stays as training left it."""
    with tempfile.TemporaryDirectory(prefix="agentevo-eval-") as folder:
        yield f"sqlite:///{folder}/store.sqlite"


async def _shown(parts: Components, step: int, samples: int, view: LiveView | None) -> dict[str, float]:
    with view if view is not None else nullcontext():
        if view is not None:
            view.phase("evaluating", parts.config.model.name)
        metrics, _ = await evaluate(parts, step, samples=samples, players=reference_players(parts))
        if view is not None:
            view.evaluation(step, metrics)
    return metrics


def evaluate_model(config: RunConfig, *, checkpoint: Path | None = None, view: LiveView | None = None) -> dict[str, float]:
    """Success of the recipe's model as it is, or of a checkpoint of it, without any run: nothing is written."""

    async def work() -> dict[str, float]:
        with _throwaway_store() as url:
            async with open_components(config, checkpoint=checkpoint, store_url=url) as parts:
                return await _shown(parts, 0, config.evaluation.samples, view)

    return run_coroutine(work())


def train(
    config: RunConfig,
    *,
    agent: AgentFunction | None = None,
    tasks: Sequence[Task] | None = None,
    resume: bool = False,
    view: LiveView | None = None,
) -> Run:
    """Trains to the end, or to a clean stop at Ctrl-C; blocks. Raises ConfigError before anything is created."""
    if agent is not None and tasks is None:
        raise ConfigError("an agent function needs tasks: pass tasks=[...]")
    if tasks is not None and config.rollout.samplers:
        raise ConfigError("an agent function and given tasks live in this process: set rollout.samplers=0")
    view = view if view is not None else LiveView(config.run.name)
    checkpoints = Checkpoints(config.run_dir / "checkpoints", config.checkpoint.keep_last)
    check_parts(config, tasks, resume)
    if resume:
        for key, (was, now) in check_resume(config, checkpoints).items():
            view.note(f"from here on with {key}={now!r}, which was {was!r}")
    else:
        prepare_folder(config)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    with only_trainer(config.run_dir):
        write_config(config)
        with Children(config, view.note) if config.rollout.samplers else nullcontext() as children:
            check = children.check if children is not None else lambda: None
            run_coroutine(run_training(config, view, agent=agent, tasks=tasks, resume=resume, apart=children is not None, check=check))
    return Run(config, agent=agent, tasks=tasks)


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, also where a notebook's event loop is already running (then in a thread of its own)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    found: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            found.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 (handed to the caller's thread)
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def check_parts(config: RunConfig, tasks: Sequence[Task] | None, resume: bool) -> None:
    """Tells before anything is created or deleted what would otherwise fail while the parts are built: a missing package or option of the
    environment or of child processes, too few tasks, a model that can't be had (a known one is downloaded here)."""
    if config.rollout.samplers:
        importlib.import_module("agentevo.inference.server")  # raises MissingExtraError
    if tasks is None:
        make_environment(config).close()
    TaskSource(config, tasks)
    check_preference(config)
    check_memory(config)
    if config.model.name != "tiny" and not resume:
        resolve(config.model.name)
        check_lora(config.model.lora)
    if config.reward_model.name is not None:
        resolve(config.reward_model.name)


def check_resume(config: RunConfig, checkpoints: Checkpoints, command: str = "train") -> dict[str, tuple[Any, Any]]:
    """Refuses a folder that can't be resumed, or only as another run; what changed otherwise: key -> (was, now)."""
    folder = config.run_dir
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder}: there is no run to resume: leave --resume out, or give its folder with run.dir")
    if command != "train" and not checkpoints.steps():  # `agentevo train` does what it has committed again
        raise CheckpointError(f"{folder} has no whole checkpoint to resume from: start again with run.overwrite=true")
    began = _began_with(checkpoints) or command
    if began != command:
        raise ConfigError(
            f"{folder} is a run of `agentevo {began}`: resume it with `agentevo {began} RECIPE --resume`, or give another run.dir"
        )
    changed = changes(config)
    beside = config.rollout.staleness > 0 or config.rollout.samplers > 0
    refused = [key for key in ("rollout.staleness", "rollout.samplers") if 0 in changed.get(key, ())]
    if beside and "wait" in changed.get("rollout.policy", ()):
        refused.append("rollout.policy")
    if refused:
        raise ConfigError(
            f"{folder} was started with {refused[0]}={changed[refused[0]][0]!r}, and its tasks are queued for that: resume it so, or "
            "give another run.dir"
        )
    fixed = FIXED_SECTIONS if command == "train" else (*FIXED_SECTIONS, command)
    fixed_keys = (*FIXED_KEYS, *QUEUED_KEYS) if beside else FIXED_KEYS
    for key, values in changed.items():
        before, after = (without_password(repr(value)) for value in values)
        if key == "store.url" and before.replace(":***", "") == after.replace(":***", ""):
            continue  # the same place, with another password
        if key in fixed_keys or key.partition(".")[0] in fixed:
            raise ConfigError(
                f"{folder} was started with {key}={before} and not {after}: resume it with the same recipe and overrides, or give another "
                "run.dir"
            )
    return changed


def _began_with(checkpoints: Checkpoints) -> str | None:
    """The command whose run this is, by the newest checkpoint that can be read; None if none can."""
    for step in reversed(checkpoints.steps()):
        try:
            return str(json.loads((checkpoints.path(step) / "state.json").read_text(encoding="utf-8")).get("command", "train"))
        except (OSError, ValueError):
            continue  # torn, or not to be read; whoever loads it says so
    return None


def prepare_folder(config: RunConfig) -> None:
    """Leaves no folder, or an empty one, and an empty store. Refuses to mix two runs, or to delete one that is being trained."""
    check_folder(config)
    there = (config.run_dir / "config.yaml").is_file()
    with only_trainer(config.run_dir) if there else nullcontext():
        prepare_store(config)
        if there:
            shutil.rmtree(config.run_dir)


def check_folder(config: RunConfig) -> None:
    """Raises ConfigError for a folder where no new run may begin."""
    folder = config.run_dir
    exists = (folder / "config.yaml").is_file()
    if exists and not config.run.overwrite:
        raise ConfigError(
            f"{folder} holds a run already: resume it with --resume, give another run.dir, or delete it with run.overwrite=true"
        )
    if not exists and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and not a run: give another run.dir")


def write_config(config: RunConfig) -> None:
    """config.yaml, atomically, in the run's folder, which is made."""
    folder = config.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / "config.yaml.new"
    staging.write_text(to_yaml(config), encoding="utf-8")
    os.replace(staging, folder / "config.yaml")


def changes(config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Where `config` differs from the configuration that its folder was last run with: key -> (was, now)."""
    before = sources.leaves(with_defaults(yaml.safe_load((config.run_dir / "config.yaml").read_text(encoding="utf-8"))))
    now = sources.leaves(config.model_dump(mode="json"))
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in UNIMPORTANT_KEYS]
    return {key: (before.get(key), now.get(key)) for key in keys}
