"""Runs a pipeline. Stages are separate processes, and several run at once if they don't depend on
each other. The pipeline ends when all stages are done, a stage failed, the budget is used, or the
user requests a stop.

    DIR/pipeline.yaml   configuration    pipeline.json   state   report.html   table.md
    DIR/recipes/ID.yaml   logs/ID.log   stages/ID/ (a run's folder, or files)   held_out/ID/
    of several seeds: DIR/pipeline.yaml   table.md   table.json   seed-N/ (each as above)

This process holds a lock on the folder. Every stage that it starts inherits the lock's file
descriptor and holds the lock too. So if the parent is killed, the pipeline can't be resumed while
its stages still run. After the first Ctrl-C (or SIGTERM, SIGHUP), no stage starts, and running
stages get a signal to stop cleanly. A second one kills them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentevo.config.parallel import check_alone
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.observability.sweep_view import SweepView
from agentevo.runs.processes.run_group import held_lock, last_lines, why_failed
from agentevo.runtime.files import must_write, write_atomic
from agentevo.runtime.parsing import dump_yaml
from agentevo.runtime.paths import short
from agentevo.runtime.registry import nearest
from agentevo.runtime.signals import collect_signals, end_stopped
from agentevo_evolve.pipeline.next_stages import PipelineProgress, StageChoice, StageStart, names_of
from agentevo_evolve.pipeline.reading import Pipeline
from agentevo_evolve.pipeline.results import points, success, write_results
from agentevo_evolve.pipeline.state import FILE, LOCK, STATE, is_pipeline_folder

POLL_S = 0.1
SAVED_EVERY_S = 5.0
"""The interval in seconds at which pipeline.json gets the elapsed time."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

__all__ = ["StageChoice", "run_pipeline"]


@dataclass
class _RunningStage:
    standing: PipelineProgress
    decided: StageStart
    process: subprocess.Popen[bytes]
    log: Path
    name: str
    since: float = field(default_factory=time.monotonic)


def run_pipeline(
    pipeline: Pipeline,
    *,
    resume: bool = False,
    choice: StageChoice | None = None,
    view: SweepView | None = None,
) -> dict[str, Any]:
    """Runs the unfinished stages, and returns the results: the content of table.json. Blocks.

    Raises ConfigError before anything is created. At the end, after all results are written, raises
    AgentEvoError if a stage failed, and KeyboardInterrupt or SystemExit after a clean stop.
    """
    choice = choice or StageChoice()
    view = view or SweepView(pipeline.config.name)
    _check(pipeline, resume, choice)

    if pipeline.config.overwrite and not resume and pipeline.dir.exists():
        with held_lock(pipeline.dir, LOCK, "pipeline"):
            pass
        shutil.rmtree(pipeline.dir)

    pipeline.dir.mkdir(parents=True, exist_ok=True)
    with view, held_lock(pipeline.dir, LOCK, "pipeline") as lock:
        standings = [
            PipelineProgress(pipeline, folder, seed, choice) for seed, folder in _seeds(pipeline)
        ]
        with collect_signals(*STOP_SIGNALS) as received:
            _begin(pipeline, standings)
            life = _PipelineProcess(pipeline, standings, view, lock, received)
            failures = life.run()
            results = write_results(pipeline, standings)
            view.note(f"\n{results['table']}\nreport: {short(pipeline.dir / 'report.html')}")

    end_stopped(received)
    if failures:
        number = len(failures)
        what = f"{number} stage{'s' * (number != 1)} failed; --resume tries again"
        raise AgentEvoError("\n".join([what, *failures]))

    if life.over:
        view.note(f"stopped: {life.over}; to continue, use --resume with a larger budget")
    elif pipeline.config.table is not None:
        from agentevo.runs.folder.result_table import write_table

        write_table(pipeline.config.table, results["table"])

    return results


def _seeds(pipeline: Pipeline) -> list[tuple[int, Path]]:
    seeds = pipeline.config.seeds
    if not seeds:
        return [(pipeline.config.seed, pipeline.dir)]
    return [(seed, pipeline.dir / f"seed-{seed}") for seed in seeds]


def _check(pipeline: Pipeline, resume: bool, choice: StageChoice) -> None:
    """Raises ConfigError before anything is created or deleted."""
    check_alone("a pipeline")
    folder = pipeline.dir
    config = pipeline.config
    holds = is_pipeline_folder(folder)

    if resume and config.overwrite:
        raise ConfigError(
            "--resume continues the pipeline in the folder and overwrite deletes it: give only "
            "one of the two"
        )

    if resume and not holds:
        raise ConfigError(
            f"{short(folder)}: there is no pipeline to resume: remove --resume, or give its "
            "folder with dir"
        )

    if holds and not resume and not config.overwrite:
        raise ConfigError(
            f"{short(folder)} already holds a pipeline: continue it with --resume, give another "
            "dir, or delete it with overwrite=true"
        )

    if not holds and folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
        raise ConfigError(
            f"{short(folder)} is not empty and does not hold a pipeline: give another dir"
        )

    if resume and bool(config.seeds) == (folder / STATE).is_file():
        raise ConfigError(
            f"{short(folder)} was started {'without' if config.seeds else 'with'} seeds: resume "
            "it in the same way, or give another dir"
        )

    known_names = {name for instance in pipeline.plan.instances for name in names_of(instance)} - {
        ""
    }
    for name in (*choice.only, *choice.skip, *([choice.start] if choice.start else [])):
        if name not in known_names:
            guess = nearest(name, sorted(known_names))
            hint = f"did you mean {guess}? " if guess else ""
            stages = ", ".join(pipeline.config.stages)
            raise ConfigError(f"no stage is called {name!r}: {hint}the stages are {stages}")


def _begin(pipeline: Pipeline, standings: Sequence[PipelineProgress]) -> None:
    """Writes the configuration and the state."""
    text = dump_yaml(pipeline.config.model_dump(mode="json", exclude_unset=True))
    with must_write(pipeline.dir):
        write_atomic(pipeline.dir / FILE, text)
        for standing in standings:
            (standing.dir / "logs").mkdir(parents=True, exist_ok=True)
            standing.write()


class _PipelineProcess:
    """A process of the runner: from the pipelines' present state to the end, or to a stop."""

    def __init__(
        self,
        pipeline: Pipeline,
        standings: Sequence[PipelineProgress],
        view: SweepView,
        lock: int,
        received: Sequence[int],
    ) -> None:
        self.pipeline = pipeline
        self.standings = standings
        self.view = view
        self.lock = lock
        self.received = received
        self.active: list[_RunningStage] = []
        self.failures: list[str] = []
        self.over = ""
        """The part of the budget that is used up. Empty while there is budget left."""
        self._num_handled = 0
        self._saved = self._clock = time.monotonic()

    def run(self) -> list[str]:
        """Returns when all stages are done or stopped, with a text for each stage that failed."""
        instances = len(self.pipeline.plan.instances) * len(self.standings)
        done = [
            f"{self._prefix(standing)}{name}"
            for standing in self.standings
            for name, state in standing.state.stages.items()
            if state.status == "finished"
        ]
        self.view.plan(instances, done)

        try:
            while self._start_ready():
                self._ask_to_stop()
                time.sleep(POLL_S)
                for run in [
                    candidate for candidate in self.active if candidate.process.poll() is not None
                ]:
                    self.active.remove(run)
                    self._note_success(run)

                self._add_elapsed_time()
                lines = {
                    run.name: (time.monotonic() - run.since, last_lines(run.log, 1))
                    for run in self.active
                }
                self.view.running(lines)
        finally:
            for run in self.active:
                run.process.kill()
                run.process.wait()

        for pipeline_standing in self.standings:
            pipeline_standing.state.status = self._status(pipeline_standing)
            pipeline_standing.write()

        return self.failures

    def _start_ready(self) -> bool:
        """Starts every stage that can start. False if no stage runs and none will start."""
        waits = False
        if not (self.received or self._over_budget()):
            for standing in self.standings:
                while len(self.active) < self.pipeline.config.parallel:
                    decided = standing.next()
                    self._show_notes(standing)
                    if decided is None:
                        break
                    self._start(standing, decided)
                waits = waits or not (standing.is_over or standing.running)

        return bool(self.active) or waits

    def _show_notes(self, standing: PipelineProgress) -> None:
        prefix = self._prefix(standing)
        for text in standing.notes:
            self.view.note(f"{prefix}{text}")
        standing.notes.clear()
        self.failures += [f"{prefix}{text}" for text in standing.failures]
        standing.failures.clear()

    def _prefix(self, standing: PipelineProgress) -> str:
        return f"seed {standing.seed}: " if len(self.standings) > 1 else ""

    def _start(self, standing: PipelineProgress, decided: StageStart) -> None:
        """Starts a stage in its own session, so that the terminal's Ctrl-C reaches the stage only
        through this process, and only once."""
        job = standing.begin(decided)
        log = standing.dir / "logs" / f"{decided.instance.id}.log"
        threads = job.config.run.threads if job.config is not None else None
        extra_environment = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        try:
            with log.open("ab" if job.resume else "wb") as out:
                process = subprocess.Popen(
                    decided.instance.kind.words(job),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=os.environ | extra_environment,
                    start_new_session=True,
                    pass_fds=(self.lock,),
                )
        except (OSError, ValueError) as error:  # the program does not exist
            self._not_started(standing, decided, error)
            return

        name = f"{self._prefix(standing)}{decided.instance.id}"
        self.active.append(_RunningStage(standing, decided, process, log, name))
        self.view.note_start(name, "resumed" if job.resume else "started")

    def _not_started(
        self, standing: PipelineProgress, decided: StageStart, error: Exception
    ) -> None:
        log = standing.dir / "logs" / f"{decided.instance.id}.log"
        log.write_text(f"it can't be started: {error}\n", encoding="utf-8")
        standing.record_end(decided, 127, 0.0)
        self._note_failure(standing, decided, f"can't be started: {error}", log, 0.0)

    def _note_success(self, run: _RunningStage) -> None:
        seconds = time.monotonic() - run.since
        code = run.process.returncode
        failure = run.standing.record_end(
            run.decided, code, seconds, is_asked_to_stop=self._num_handled > 0
        )
        if failure:
            self._note_failure(run.standing, run.decided, failure, run.log, seconds)
            return

        state = run.standing.state.stages[run.decided.instance.id]
        if state.status == "stopped":
            how = f"stopped ({state.why})" if state.why else "stopped"
            self.view.note_end(run.name, how, seconds, ok=False)
            return

        self.view.note_end(
            run.name,
            _outcome(state.numbers, measures=run.decided.instance.measures),
            seconds,
            ok=True,
        )

    def _note_failure(
        self, standing: PipelineProgress, decided: StageStart, how: str, log: Path, seconds: float
    ) -> None:
        name = f"{self._prefix(standing)}{decided.instance.id}"
        self.view.note_end(name, how, seconds, ok=False)
        self.failures.append(why_failed(name, how, log))

    def _ask_to_stop(self) -> None:
        """Sends the running stages a signal to stop, after a signal or when the time budget is
        used."""
        num_requests = len(self.received) or (1 if self.over.startswith("hours") else 0)
        if num_requests <= self._num_handled:
            return

        self._num_handled = num_requests
        for run in self.active:
            run.process.send_signal(signal.SIGKILL if num_requests > 1 else signal.SIGINT)

        how_to_stop = "" if num_requests > 1 else " cleanly; press Ctrl-C again to stop at once"
        self.view.note(f"stopping{how_to_stop}")

    def _add_elapsed_time(self) -> None:
        """Adds the elapsed time, and checks the budget."""
        now = time.monotonic()
        for standing in self.standings:
            standing.state.wall_s += (now - self._clock) / len(self.standings)

        self._clock = now
        self._over_budget()
        if now - self._saved > SAVED_EVERY_S:
            self._saved = now
            for standing in self.standings:
                standing.write()

    def _over_budget(self) -> bool:
        budget = self.pipeline.config.budget
        states = [standing.state for standing in self.standings]
        hours = sum(state.wall_s for state in states) / 3600
        used = {
            "hours": (budget.hours, hours),
            "tokens": (budget.tokens, sum(state.tokens for state in states)),
            "cost": (budget.cost, sum(state.cost for state in states)),
        }
        for name, (limit, value) in used.items():
            if not self.over and limit is not None and value >= limit:
                unfinished = [standing for standing in self.standings if not standing.is_over]
                if unfinished:
                    self.over = f"{name} of the budget are used ({value:.6g} of {limit:g})"

        return bool(self.over)

    def _status(self, standing: PipelineProgress) -> Any:
        statuses = {state.status for state in standing.state.stages.values()}
        if "failed" in statuses:
            return "failed"
        if self.received:
            return "stopped"
        if self.over:
            return "over budget"
        return "stopped" if statuses & {"waiting", "stopped", "running"} else "finished"


def _outcome(numbers: dict[str, float], *, measures: str | None) -> str:
    if measures is None:
        return "done"
    gain = f", {points(numbers)}" if "gain" in numbers else ""
    return f"{success(numbers)} of the held-out tasks{gain}"
