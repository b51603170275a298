"""A training run, top to bottom: what `agentevo train`, `learn` and `sft` do, in that order.

    check -> load -> make the folder -> build -> resume, or cold start -> evaluate
    -> step by step: collect -> prepare -> reserve -> update -> publish -> evaluate, save -> commit
    -> evaluate -> summary and report

Version s of the weights is the result of step s. Reinforcement learning, preference and supervised
training, synchronous and asynchronous, differ only in the source of the batches (batch_sources.py)
and the source of the attempts (rollout_sources.py). A step is committed in one transaction with its
plan (what it trained on, in order), the run's progress and the checkpoint that was saved of it. A
resumed run therefore loads the newest whole checkpoint, replays the committed steps after it from
their plans (resume.py), and continues without loss.
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Literal

from agentevo.config import RunConfig
from agentevo.config.parallel import follows
from agentevo.errors import AgentEvoError
from agentevo.inference.weights.transports import local_transport
from agentevo.models.compute.device_peak import device_peak
from agentevo.models.files.load import LoadedModel
from agentevo.observability import LiveView, report_at_end
from agentevo.observability.current_activity import PAUSED
from agentevo.observability.run_log import RunLog
from agentevo.rollout.given_tasks import check_and_report
from agentevo.runs.folder.chain import KEY as CHAIN
from agentevo.runs.folder.chain import End, is_given_up
from agentevo.runs.folder.control import RunControl
from agentevo.runs.folder.creation import RunCommand, check_place, kind_of, new_folder, write_config
from agentevo.runs.folder.identity import confirm_run
from agentevo.runs.folder.resume_rules import note_changes
from agentevo.runs.orchestration.checks import check_recipe, load_checked, needs_no_whole_model
from agentevo.runs.orchestration.cold_start import cold_start
from agentevo.runs.orchestration.components import AgentFunction, Components, open_components
from agentevo.runs.orchestration.conversations import SFTData, read_sft_data
from agentevo.runs.orchestration.evaluation import RunEvaluation, check_first_attempts
from agentevo.runs.orchestration.gap import GapStop, chooses_by_gap
from agentevo.runs.orchestration.ledger import drop_reasons, plan_of, reserve
from agentevo.runs.orchestration.profiling import Profiling
from agentevo.runs.orchestration.ranks import RunRanks, follow, join_ranks
from agentevo.runs.orchestration.resume import (
    ResumePoint,
    difference_of_replay,
    find_resume_point,
    replay_step,
)
from agentevo.runs.orchestration.rollout_sources import StopAskedError, SynchronousRollouts
from agentevo.runs.orchestration.run_checkpoints import RunCheckpoints
from agentevo.runs.orchestration.run_findings import facts_of_step
from agentevo.runs.orchestration.run_record import RunRecord
from agentevo.runs.orchestration.step_metrics import StepMeter
from agentevo.runs.orchestration.submissions import Submissions
from agentevo.runs.orchestration.supervisor import Children, sampling_children
from agentevo.runs.orchestration.tracking import only_trainer_here, track
from agentevo.runs.orchestration.trainers import (
    make_rollouts,
    make_trainer,
    make_trainers,
    opening_notes,
    training_notes,
)
from agentevo.runtime.event_loop import run_coroutine
from agentevo.runtime.heap import lasting_heap
from agentevo.runtime.paths import short
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.runtime.signals import (
    POLL_INTERVAL_S,
    STOPPING,
    end_stopped,
    stop_on_interrupt,
)
from agentevo.store.records import StepRecord
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.phases import phase
from agentevo.types import Task, Trajectory

Confirm = Callable[[], Awaitable[Callable[[], None]]]
"""Accepts or refuses the configuration of a resume. Returns a function that makes it the run's."""


def train(
    config: RunConfig,
    *,
    command: Literal["train", "sft"] = "train",
    agent: AgentFunction | None = None,
    tasks: Sequence[Task] | None = None,
    resume: bool = False,
    view: LiveView | None = None,
) -> None:
    """Trains to the end, or to a clean stop: at Ctrl-C, which then raises KeyboardInterrupt, or at
    SIGTERM, which raises SystemExit; blocks.

    `sft` trains on the conversations of the section `data`. Raises ConfigError before anything is
    created.
    """
    check_recipe(config, command, agent=agent, tasks=tasks, resume=resume)
    view = view if view is not None else LiveView(config.run.name)
    if follows():
        follow(config)
        return

    if resume and is_given_up(config.run_dir):
        view.note(f"nothing was trained in {short(config.run_dir)}, so its run starts again")
        resume = False

    confirm = None
    changed = check_place(config, command, resume=resume)
    if resume and command == "train" and config.rollout.weights.url is not None:
        # other machines read it too, so a change affects them
        confirm = partial(confirm_run, config, resume=True, note=view.note)
    else:
        note_changes(changed, view.note)

    run_coroutine(
        run_training(
            config,
            view,
            command=command,
            agent=agent,
            tasks=tasks,
            resume=resume,
            confirm=confirm,
        )
    )


async def run_training(
    config: RunConfig,
    view: LiveView,
    *,
    command: RunCommand,
    agent: AgentFunction | None = None,
    tasks: Sequence[Task] | None = None,
    resume: bool = False,
    loaded: LoadedModel | None = None,
    submissions: Submissions | None = None,
    confirm: Confirm | None = None,
) -> None:
    """The part of `train` after its checks. `submissions`: of a program's own loop. `confirm` is
    called when no other process can change the folder any more."""
    folder = config.run_dir
    checkpoints = Checkpoints(
        folder / "checkpoints",
        config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best or chooses_by_gap(config, command),
        is_only_caller=True,
    )
    with RunLog() as log, view, stop_on_interrupt(view.note) as stop_signals, ExitStack() as stack:
        view.record = log.write
        ranks = stack.enter_context(join_ranks(config))
        if ranks is not None:  # a stop of another process also stops this one
            stack.enter_context(ranks.stops.watch(stop_signals, view.note))

        def is_stopped() -> bool:
            return bool(stop_signals)

        def stop() -> None:
            stop_signals.append(signal.SIGTERM)
            view.note(f"asked to stop: {STOPPING}")

        start = ResumePoint()
        for line in opening_notes(config, command):
            view.note(line)
        view.phase("loading", config.model.name)
        if resume:
            stack.enter_context(only_trainer_here(folder, view, is_stopped))
            make_final = (lambda: None) if confirm is None else await confirm()
            start = await find_resume_point(config, checkpoints, note=view.note)

        has_samplers = command == "train" and config.rollout.samplers > 0
        is_disaggregated = has_samplers or command == "learn"  # others sample for training
        uses_run_engines = ranks is not None and needs_no_whole_model(
            config, is_disaggregated=is_disaggregated
        )
        if loaded is None or start.checkpoint is not None:
            loaded = load_checked(config, start.checkpoint, for_part=uses_run_engines)

        conversations = (
            read_sft_data(config, loaded, view, is_stopped) if command == "sft" else None
        )
        end_stopped(stop_signals)
        if not resume:
            make_final = stack.enter_context(new_folder(config))
            stack.enter_context(only_trainer_here(folder, view, is_stopped))

        processes = sampling_children(config, view.note) if has_samplers else None
        async with open_components(
            config,
            agent=agent,
            tasks=tasks,
            checkpoint=start.checkpoint,
            loaded=loaded,
            transport=local_transport(config, is_separate=is_disaggregated or command == "sft"),
            note=view.note,
            may_play=submissions is None,
            traced=True,
            uses_run_engines=uses_run_engines,
        ) as parts:
            if parts.tasks.read is not None and command != "sft":
                check_and_report(config, parts.tasks.read, view.note)

            control = RunControl(folder, stop, note=view.note)
            run = TrainingRun(
                parts,
                conversations,
                folder=checkpoints,
                view=view,
                is_stopped=is_stopped,
                command=command,
                control=control,
                processes=processes,
                submissions=submissions,
                ranks=ranks,
            )
            write_config(config, kind_of(command))
            make_final()
            if conversations is not None:
                conversations.write_reports(folder)

            log.begin(folder, f"agentevo {command}, process {os.getpid()}")
            stack.enter_context(control)
            run.record.log.tracking = stack.enter_context(
                track(config, command, view.note, is_stopped, warn=view.warn)
            )
            stack.enter_context(lasting_heap())
            await run.run_from(start, resumed=resume)

        if config.tracking.report:
            await report_at_end(folder, lambda token: str(loaded.tokenizer.decode([token])), view)

    end_stopped(stop_signals)


class TrainingRun:
    """The steps of one run, from its current step to the last one."""

    def __init__(
        self,
        parts: Components,
        conversations: SFTData | None,
        *,
        folder: Checkpoints,
        view: LiveView,
        is_stopped: Callable[[], bool],
        command: RunCommand,
        control: RunControl,
        processes: Children | None,
        submissions: Submissions | None,
        ranks: RunRanks | None,
    ) -> None:
        """`is_stopped`: whether the user has asked the run to stop; it ends after the current step.
        `processes`: the run's own samplers and engines, if it has any. `submissions`: those of a
        program's own loop. `ranks`: the processes that train together."""
        self.parts = parts
        self.view = view
        self.is_stopped = is_stopped
        self.command: RunCommand = command
        self.control = control
        self.processes = processes
        self.rollouts = make_rollouts(
            parts,
            is_stopped,
            view.warn,
            sampled=conversations is None,
            is_disaggregated=processes is not None or command == "learn",
            processes=processes,
            submissions=submissions,
        )
        self.trainers = make_trainers(parts, ranks)
        self.trainer, self.source = make_trainer(parts, self.rollouts, self.trainers, conversations)
        self.num_steps = self.source.num_steps if submissions is None else math.inf

        self.record = record = RunRecord(parts, self.source, view, command)
        self.evaluation = RunEvaluation(parts, self.source, record, view, is_stopped, command)
        self.gap_stop: GapStop | None = None
        if conversations is not None and record.chooses_by_gap:
            num_steps = self.source.num_steps
            self.gap_stop = GapStop(parts, conversations, num_steps, record, view, is_stopped)
        self.checkpoints = RunCheckpoints(parts, folder, record, self.trainers, self.trainer, view)
        if submissions is not None:
            submissions.save = self.checkpoints.keep

        self.profiling = Profiling(
            parts.config.profile,
            parts.config.run_dir,
            parts.model,
            warn=record.warn,
            note=view.note,
        )
        peak = device_peak(self.profiling.device, self.profiling.dtype)
        self.meter = StepMeter(parts, self.source, self.rollouts, peak)

    async def run_from(self, start: ResumePoint, *, resumed: bool) -> None:
        """Restores the run, runs it, and writes the summary if it has reached its end."""
        processes = nullcontext() if self.processes is None else self.processes
        with self.record.log, self.checkpoints, processes:
            await self.restore(start, resumed=resumed)
            await self.run()

        if self.record.is_at_end and (self.record.progress.begun or not resumed):
            self.record.write_summary(
                self.evaluation.players, self.checkpoints.best, self.profiling.summary
            )

    async def restore(self, start: ResumePoint, *, resumed: bool) -> None:
        """Brings the run to its current step: its beginning, after a cold start if there is one, or
        the newest committed step."""
        config = self.parts.config
        self.record.begin(start.end)
        for line in training_notes(self.parts, self.command):
            self.view.note(line)

        if resumed:
            has_state = start.checkpoint is not None or start.steps
            self.record.log.resume(start.end.step if has_state else -1)

        if start.checkpoint is not None:
            self.checkpoints.restore(start.checkpoint)
        else:
            if config.cold_start.episodes and self.command != "sft":
                await self._cold_start(is_logged=bool(start.steps))
            if config.trainer.optimizer_from is not None:
                self.trainers.take_optimizer(self.trainer, config.trainer.optimizer_from)

        await self._replay(start)
        for warning in start.warnings:
            self.record.warn(warning)

    async def _cold_start(self, *, is_logged: bool) -> None:
        """Teaches the model, or ends early if the run is asked to stop. `is_logged`: a resumed run
        without a checkpoint, whose log has it already."""
        progress = self.record.progress
        # Random weights are not worth an evaluation, and engines of other processes have no weights
        # yet.
        shows = self.parts.config.model.name != "tiny" and self.parts.run_engines is None
        try:
            if shows and not is_logged:
                progress.cold_start_before = await self.evaluation.evaluate(
                    "before the cold start", full=False, label="untaught-"
                )
            metrics = cold_start(
                self.parts, self.view, self.is_stopped, self.trainers, self.record.warn
            )
        except StopAskedError:
            return

        if not is_logged:
            progress.trained_tokens += int(metrics.get("cold_start/tokens", 0))
            self.record.log.log(0, metrics)

    async def _replay(self, start: ResumePoint) -> None:
        """Repeats the committed steps after the checkpoint, unless the run is asked to stop before
        that.

        For the step after them, which a kill may have left reserved, the same attempts are taken
        again (rollout_sources.py). If these are the attempts of the step's own tasks, an earlier
        selection among them is dropped, because the recipe may select differently now.
        """
        is_synchronous = isinstance(self.rollouts, SynchronousRollouts)
        if is_synchronous or self.parts.config.rollout.policy == "wait":
            await with_retries(
                lambda: self.parts.store.rewind(start.end.step, keep=True),
                within_s=STORE_RETRY_S,
                what="releasing reserved attempts",
            )

        if start.steps and start.checkpoint is None:
            self.trainer.begin()

        for number, step in enumerate(start.steps, start=1):
            if self.is_stopped():
                self.view.note("stopped while repeating committed steps: nothing was changed")
                return
            self.view.phase("doing again", f"step {step.step} ({number}/{len(start.steps)})")
            await self._replay_step(step)

    async def _replay_step(self, step: StepRecord) -> None:
        trained = await replay_step(self.trainer, self.source, step)
        if difference := difference_of_replay(step, trained):
            self.record.warn(difference)
        self.record.restore_step(step)
        self.checkpoints.keep_lost_best(End(step.step, str(step.record[CHAIN])))

    async def run(self) -> None:
        """Runs from the current step to the last one, or until the run is asked to stop."""
        record = self.record
        progress = record.progress
        self.view.set_progress(progress.step, self.num_steps)
        if self.is_stopped() and (not progress.begun or progress.step < record.end.step):
            return  # the signal came during loading, cold start or repeated steps
        _, stop_after = record.stop_rule
        if nothing_left := progress.nothing_left(
            self.num_steps, self.command, stop_after=stop_after
        ):
            self.view.note(nothing_left)

        await self.rollouts.begin(progress.step)
        if not progress.begun:
            try:
                await self._open()
            except StopAskedError:
                return

        record.log.deliver_to_trackers(progress.step)
        async with self.rollouts.running():
            with self.profiling:
                while record.progress.step < self.num_steps and not record.early_stop:
                    self.checkpoints.settle(wait=False)
                    await self._handle_requests()
                    if self.is_stopped():
                        break

                    with self.profiling.step(record.progress.step + 1):
                        committed = copy.deepcopy(record.progress)
                        try:
                            await self.step()
                        except StopAskedError:
                            break

        if not record.is_at_end:
            record.give_up_step(committed)
            self.checkpoints.settle(wait=True)
            return

        record.warn_of_shortcomings()
        self.checkpoints.keep()

    async def _handle_requests(self) -> None:
        """Carries out the requests since the previous step: save, pause, resume
        (runs/folder/control.py). Returns when the next step may begin, or the run has to stop.

        Engines, samplers and leases stay alive during a pause: the event loop runs, so leases are
        renewed, and samplers play until as many attempts wait as the recipe allows. A signal ends a
        pause immediately.
        """
        step = self.record.progress.step
        has_paused = False
        while True:
            for request in self.control.take_saves():
                try:
                    self.checkpoints.keep()
                except AgentEvoError as error:
                    self.view.warn(f"the requested checkpoint could not be saved: {error}")
                    self.control.answer(request, f"failed: {error}", is_done=False)
                else:
                    self.control.answer(request, f"the checkpoint of step {step} exists")

            if not self.control.is_pause_asked or self.is_stopped():
                break

            has_paused = True
            self.control.note_pause(step)
            resume = f"agentevo control {short(self.parts.config.run_dir)} resume"
            self.view.phase(PAUSED, f"after step {step}; {resume} continues")
            started = time.perf_counter()
            await asyncio.sleep(POLL_INTERVAL_S)
            self.record.exclude_pause(time.perf_counter() - started)

        if has_paused:
            self.control.note_resume()

    async def _open(self) -> None:
        """Evaluates the policy before the first step. Raises StopAskedError."""
        if metrics := self.source.opening_metrics():
            self.record.log.log(0, metrics)

        self.trainer.begin()
        await self.evaluation.rate("before", full=True)
        self.record.progress.before = self.record.progress.after
        gap = None if self.gap_stop is None else await self.gap_stop.measure()
        self.record.progress.begun = True
        if gap is not None:
            self.checkpoints.keep(gap)

    async def step(self) -> None:
        """One step, committed at its end."""
        step = self.record.progress.step + 1
        self.meter.begin()
        self.view.phase(self.source.activity, f"step {step}")
        with phase(self.source.activity):
            collected = await self.source.collect(step)

        if step == 1:
            self._check_first_attempts(collected.trajectories)

        self.meter.lap("gen")
        async with self.rollouts.training():
            with phase("prepare"):
                batch = await self.rollouts.compute(lambda: self.source.prepare(collected, step))
            for text in batch.warnings:
                self.record.warn(f"step {step}: {text}")
            with phase("store"):
                trained_ids = await reserve(self.parts.store, step, collected, batch)

            self.meter.lap("adv")
            self.view.phase("training", f"step {step}")
            updated = {}
            if batch.images:
                self.trainer.show(batch.images)
            if batch.samples:
                updated = await self.rollouts.compute(lambda: self.trainer.step(batch.samples))
            await self.record.keep_numbers(step, self.trainer.numbers if batch.samples else None)

            self.meter.lap("update_actor")
            self.view.phase("publishing weights", f"version {step}")
            with phase("publish"):
                await self.rollouts.swap(step)

        self.meter.lap("update_weights")
        reasons = drop_reasons(collected, batch)
        metrics = self.meter.metrics(step, collected, batch, updated, reasons)
        facts = facts_of_step(
            self.parts.config, collected.trajectories, collected.trainable, reasons
        )
        self.record.add_step(
            step, metrics, collected.trajectories, reasons, facts, updated=bool(batch.samples)
        )
        checkpoint = await self._milestones(step)
        with phase("store"):
            plan = plan_of(self.parts.config, trained_ids, collected, batch, metrics)
            await self.record.commit(plan, metrics, checkpoint, collected.trajectories)
        if checkpoint is not None:
            self.checkpoints.prune()

        self.view.phase("publishing weights", f"version {step}")
        await self.meter.announce(step)
        self.view.step(step, self.source.num_steps, metrics, Counter(reasons.values()))

    def _check_first_attempts(self, attempts: Sequence[Trajectory]) -> None:
        errors = [attempt.error for attempt in attempts if attempt.status == "failed"]
        check_first_attempts(
            self.parts, "the first step", errors, len(attempts), self.command, self.record.head
        )

    async def _milestones(self, step: int) -> dict[str, str] | None:
        """Evaluates and saves the step that has just been computed, when these are due; returns the
        checkpoint's entry for the record."""
        value = None
        if self.gap_stop is not None and self.gap_stop.is_due(step):
            value = await self.gap_stop.measure()

        is_last = step == self.source.num_steps or self.record.early_stop is not None
        if is_last or self.evaluation.is_due(step):
            name = "after" if is_last else f"step {step}"
            held_out = await self.evaluation.rate(name, full=is_last)
            value = held_out if self.gap_stop is None else value

        is_saved = is_last or self.checkpoints.is_due(step, value) or self.record.early_stop
        return self.checkpoints.save(value) if is_saved else None
