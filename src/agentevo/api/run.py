"""Training from a configuration, and the results of a run, for Python programs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Unpack

from agentevo.config import RunConfig
from agentevo.errors import UnusableCheckpointError
from agentevo.observability import LiveView
from agentevo.runs.audit.audit import Audit, audit
from agentevo.runs.audit.replay import TrajectoryReplay, replay
from agentevo.runs.folder.hub_upload import push_to_hub
from agentevo.runs.folder.run_folder import read_store
from agentevo.runs.folder.run_words import run_words
from agentevo.runs.orchestration import run as training
from agentevo.runs.orchestration.components import AgentFunction, Components, open_components
from agentevo.runs.orchestration.evaluation import check_evaluation, evaluate, reference_players
from agentevo.runs.orchestration.tracking import check_tracking, report_evaluation
from agentevo.runtime.console import to_stderr
from agentevo.runtime.event_loop import run_coroutine
from agentevo.runtime.parsing import read_json_object
from agentevo.runtime.paths import short
from agentevo.store.records import TrajectoryFilter
from agentevo.training.checkpoint import Checkpoints
from agentevo.types import Task, Trajectory


class Run:
    """A finished (or interrupted) run in its folder. Methods block; call them outside of an event
    loop."""

    def __init__(
        self,
        config: RunConfig,
        *,
        agent: AgentFunction | None = None,
        tasks: Sequence[Task] | None = None,
    ) -> None:
        self.config = config
        self._agent = agent
        self._tasks = tasks

    def __repr__(self) -> str:
        return f"<Run {self.config.run.name!r} in {short(self.dir)}: {run_words(self.dir)}>"

    @property
    def dir(self) -> Path:
        return self.config.run_dir

    @property
    def summary(self) -> dict[str, Any]:
        """Contents of summary.json; empty before the run has ended once."""
        path = self.dir / "summary.json"
        return read_json_object(path) if path.is_file() else {}

    @property
    def checkpoint(self) -> Path:
        """The best checkpoint, or the last one if none was evaluated: a Hugging Face model folder,
        or a PEFT adapter's."""
        return self.checkpoint_path("best")

    def checkpoint_path(self, which: str) -> Path:
        """The folder of the checkpoint `which`: `best`, `last`, or a path. Raises CheckpointError
        if there is no such checkpoint."""
        return Checkpoints(self.dir / "checkpoints", self.config.checkpoint.keep_last).find(which)

    def eval(
        self, *, checkpoint: str = "best", samples: int = 1, view: LiveView | None = None
    ) -> dict[str, float]:
        """Evaluates a checkpoint on the held-out tasks: `val-core/...` metrics. Writes
        nothing except to the trackers of the configuration."""
        check_tracking(self.config)
        path = self.checkpoint_path(checkpoint)
        _, state = Checkpoints(self.dir / "checkpoints", self.config.checkpoint.keep_last).load(
            path
        )
        progress = state.get("progress")
        step = progress.get("step") if isinstance(progress, dict) else None
        if not isinstance(step, int):
            raise UnusableCheckpointError(
                f"{path / 'state.json'} is damaged, because it names no step: "
                "give another checkpoint"
            )

        return run_coroutine(self._evaluate(path, step, samples, view))

    def push_to_hub(self, repo: str, *, checkpoint: str = "best", private: bool = True) -> str:
        """Publishes a checkpoint (`best`, `last`, a path) with a model card on the Hugging Face hub
        in one commit; returns its URL. `private`: for a new repository. Raises
        ModelError if nothing was uploaded."""
        return push_to_hub(self.checkpoint_path(checkpoint), repo, private=private)

    def trajectories(self, **filters: Unpack[TrajectoryFilter]) -> list[Trajectory]:
        """Stored trajectories, oldest first; see TrajectoryFilter."""

        async def read(store: Any) -> list[Trajectory]:
            return [stored.trajectory async for stored in store.trajectories(**filters)]

        return read_store(self.dir, read)

    def replay(self, trajectory_id: str, *, rebuild: bool = False) -> TrajectoryReplay:
        """Repeats a trajectory from its seeds and the stored weights and compares it with the
        record (runs/audit/replay.py).

        `rebuild`: deleted weights are trained again from the store."""
        return run_coroutine(
            replay(
                self.config, trajectory_id, made_again=rebuild, agent=self._agent, tasks=self._tasks
            )
        )[0]

    def replays(self, count: int, *, rebuild: bool = False) -> list[TrajectoryReplay]:
        """Replays `count` training trajectories, chosen at random by the run's seed; without
        `rebuild` only those whose weights still exist."""
        return run_coroutine(
            replay(
                self.config, sample=count, made_again=rebuild, agent=self._agent, tasks=self._tasks
            )
        )

    def audit(self) -> Audit:
        """Proves from the store which trajectories each step used (runs/audit/audit.py)."""
        return read_store(self.dir, lambda store: audit(store, self.dir))

    async def _evaluate(
        self, path: Path, step: int, samples: int, view: LiveView | None
    ) -> dict[str, float]:
        with _throwaway_store() as url:
            async with open_components(
                self.config, agent=self._agent, tasks=self._tasks, checkpoint=path, store_url=url
            ) as parts:
                metrics = await _evaluate_with_view(parts, step, samples, view)
        _report(self.config, metrics, step, self.dir, view)
        return metrics


def train(
    config: RunConfig,
    *,
    agent: AgentFunction | None = None,
    tasks: Sequence[Task] | None = None,
    resume: bool = False,
    view: LiveView | None = None,
) -> Run:
    """Trains with `orchestration.run.train`, and returns the run."""
    training.train(config, agent=agent, tasks=tasks, resume=resume, view=view)
    return Run(config, agent=agent, tasks=tasks)


def sft(config: RunConfig, *, resume: bool = False, view: LiveView | None = None) -> Run:
    """Trains on demonstrations with `orchestration.run.train`, and returns the run."""
    training.train(config, command="sft", resume=resume, view=view)
    return Run(config)


def evaluate_model(
    config: RunConfig, *, checkpoint: Path | None = None, view: LiveView | None = None
) -> dict[str, float]:
    """Evaluates the recipe's unchanged model, or a checkpoint, without a run. Writes nothing
    except to the trackers of the recipe."""
    check_tracking(config)

    async def work() -> dict[str, float]:
        with _throwaway_store() as url:
            async with open_components(config, checkpoint=checkpoint, store_url=url) as parts:
                return await _evaluate_with_view(parts, 0, config.evaluation.samples, view)

    metrics = run_coroutine(work())
    _report(config, metrics, 0, Path.cwd(), view)
    return metrics


def _report(
    config: RunConfig, metrics: dict[str, float], step: int, folder: Path, view: LiveView | None
) -> None:
    note = to_stderr if view is None else view.note
    report_evaluation(config, metrics, step=step, folder=folder, note=note)


@contextmanager
def _throwaway_store() -> Iterator[str]:
    """The URL of a temporary store for trajectories, so that a finished run's store stays
    unchanged."""
    with tempfile.TemporaryDirectory(prefix="agentevo-eval-") as folder:
        yield f"sqlite:///{folder}/store.sqlite"


async def _evaluate_with_view(
    parts: Components, step: int, samples: int, view: LiveView | None
) -> dict[str, float]:
    with view if view is not None else nullcontext():
        if view is not None:
            view.phase("evaluating", parts.config.model.name)
        evaluation = await evaluate(parts, step, samples=samples, players=reference_players(parts))
        if view is not None:
            view.evaluation(step, evaluation.metrics, evaluation.notes(parts.config))
        check_evaluation(parts, evaluation)

    return evaluation.metrics
