"""The steps of a run: the actions of each in order, and what it commits. `run.py` opens and closes
the run around them."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import msgspec
import torch

from agentevo.errors import AgentEvoError, TrainingError
from agentevo.event_loop import in_thread
from agentevo.models.device_peak import device_peak
from agentevo.models.in_parts import in_parts
from agentevo.models.save import saved_weights
from agentevo.observability import CollapseMonitor, LiveView, MetricsLog
from agentevo.observability.moment import PAUSED
from agentevo.observability.remedies import remedies_of
from agentevo.orchestration.background_save import BackgroundSave, copy_state, copy_weights
from agentevo.orchestration.cold_start import cold_start
from agentevo.orchestration.components import Components
from agentevo.orchestration.conversations import SFTData
from agentevo.orchestration.evaluation import (
    Evaluated,
    evaluate,
    reference_players,
    solved_share,
)
from agentevo.orchestration.first_attempts import check_first_evaluation, check_first_step
from agentevo.orchestration.ledger import commit, drop_reasons, plan_of, reserve
from agentevo.orchestration.profiling import Profiling
from agentevo.orchestration.progress import RunProgress
from agentevo.orchestration.ranks import Leader, Led, RunRanks
from agentevo.orchestration.resume import ResumePoint, replay_step
from agentevo.orchestration.rollout_sources import (
    SamplerSupervisor,
    StopAskedError,
    SynchronousRollouts,
)
from agentevo.orchestration.row_digests import RowDigests
from agentevo.orchestration.step_metrics import (
    counted_since,
    drop_metrics,
    performance_metrics,
    step_metrics,
)
from agentevo.orchestration.submissions import Submissions
from agentevo.orchestration.tracking import attempts_table
from agentevo.orchestration.trainers import make_rollouts, make_trainer, training_notes
from agentevo.paths import short
from agentevo.retry import STORE_RETRY_S, with_retries
from agentevo.runs.chain import KEY as CHAIN
from agentevo.runs.chain import LOG, NUMBERS, ROWS, End, HeadFile, RecordedRows, file_digest
from agentevo.runs.control import RunControl
from agentevo.runs.creation import kind_of
from agentevo.signals import POLL_INTERVAL_S, finishes_before_stop
from agentevo.store.records import StepRecord
from agentevo.training.batching.step_plan import StepPlan
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.contribution import Contribution
from agentevo.training.phases import phase
from agentevo.training.state_parts import split_state
from agentevo.training.token_numbers import TokenNumbers, name_of, write_numbers

Command = Literal["train", "learn", "sft", "loop"]

SAME = 1e-3
"""Relative difference of a gradient norm up to which a repeated step counts as the same."""


class TrainingRun:
    """The steps of one run, from its current step to the last one."""

    _announced_s = 0.0
    """How long the previous step's version took to be announced, after its own row."""

    def __init__(
        self,
        parts: Components,
        conversations: SFTData | None,
        *,
        checkpoints: Checkpoints,
        view: LiveView,
        is_stopped: Callable[[], bool],
        command: Command,
        processes: SamplerSupervisor | None,
        submissions: Submissions | None = None,
        ranks: RunRanks | None = None,
    ) -> None:
        """`is_stopped`: whether the user has asked the run to stop; it ends after the current step.
        `processes`: the run's own samplers and engines, if it has any. `submissions`: those of a
        program's own loop. `ranks`: the processes that train together."""
        self.parts = parts
        self.checkpoints = checkpoints
        self.view = view
        self.is_stopped = is_stopped
        self.command = command
        self.control: RunControl | None = None
        """Passes on requests between two steps."""
        self._has_told_of_numbers = False
        self._numbers_digest: str | None = None
        """The digest of the file with the newest step's token numbers, if there is one."""
        self._row_digests = RowDigests(parts.store)
        self._has_evaluated = False
        is_disaggregated = processes is not None or command == "learn"
        sampled = conversations is None
        self.rollouts = make_rollouts(
            parts,
            is_stopped,
            view.warn,
            sampled=sampled,
            is_disaggregated=is_disaggregated,
            supervisor=processes,
            submissions=submissions,
        )

        if submissions is not None:
            submissions.save = self.keep_checkpoint

        self.leader = (
            None
            if ranks is None
            else Leader(
                ranks,
                parts.config,
                parts.model,
                parts.tokenizer,
                parts.checkpoint,
                serves=parts.run_engines is None,
            )
        )
        """Set where several processes train together."""
        self.trainer, self.source = make_trainer(parts, self.rollouts, conversations, self.leader)
        self._num_steps = self.source.num_steps if submissions is None else math.inf
        folder = parts.config.run_dir
        config = parts.config
        self.log = MetricsLog(folder / "metrics.jsonl")
        self.players = reference_players(parts)
        self.monitor = CollapseMonitor(remedies=remedies_of(config.model_dump(mode="json")))
        self.progress = RunProgress()
        self.end = End()
        self.head = HeadFile(folder)
        self._recorded = 0
        """The number of warnings that are in the records of committed steps."""
        self.profiling = Profiling(
            config.profile, folder, parts.model, warn=self.warn, note=view.note
        )
        self.peak = device_peak(self.profiling.device, self.profiling.dtype)
        self._clock = time.perf_counter()
        self.background = BackgroundSave(self._note_checkpoint, self.warn)

    async def take_up(self, start: ResumePoint, *, resumed: bool) -> None:
        """Brings trainer and progress to the current step of the run: its beginning, after a cold
        start if there is one, or the newest committed step."""
        config = self.parts.config
        self.end = start.end
        self.head = HeadFile(config.run_dir)  # as write_config wrote it
        self.head.note_commit(self.end)

        for line in training_notes(self.parts):
            self.view.note(line)
        if self.command != "sft" and not config.data.given and config.trainer.steps:
            shortfall = self.parts.tasks.shortfall()
            if shortfall:
                self.view.note(shortfall)

        if resumed:
            something = start.checkpoint is not None or start.steps
            self.log.resume(start.end.step if something else -1)

        if start.checkpoint is not None:
            mapped = self.leader is not None and config.trainer.parallel.is_spread
            trainer_state, run_state = self.checkpoints.load(start.checkpoint, mapped=mapped)
            self.trainer.load_state_dict(trainer_state)
            self.restore(run_state)
        elif config.cold_start.episodes and self.command != "sft":
            await self._teach(is_logged=bool(start.steps))

        if start.checkpoint is None and config.trainer.optimizer_from is not None:
            if isinstance(self.trainer, Led):
                self.trainer.carry_on(config.trainer.optimizer_from)
            else:
                trainer_state, _ = self.checkpoints.load(config.trainer.optimizer_from)
                self.trainer.optimization.carry_on(trainer_state["optimization"])

        await self._replay_steps(start)
        for warning in start.warnings:
            self.warn(warning)

    async def _teach(self, *, is_logged: bool) -> None:
        """Teaches the model before the first step. `is_logged`: a resumed run without a checkpoint,
        whose log has it already."""
        shows = self.parts.config.model.name != "tiny" and self.parts.run_engines is None
        # Random weights are not worth an evaluation, and engines of other processes have no weights
        # yet.
        if shows and not is_logged:
            try:
                self.progress.cold_start_before = await self.evaluate(
                    "before the cold start", full=False, label="untaught-"
                )
            except StopAskedError:
                return

        try:
            metrics = cold_start(self.parts, self.view, self.is_stopped, self.leader)
        except StopAskedError:
            return

        if not is_logged:
            self.progress.trained_tokens += int(metrics.get("cold_start/tokens", 0))
            self.log.log(0, metrics)

    async def _replay_steps(self, start: ResumePoint) -> None:
        """Brings trainer and progress to the newest committed step, unless the run is asked to stop
        before that.

        For the step after it, which a kill may have left reserved, the same attempts are taken
        again (rollout_sources.py). If these are the attempts of the step's own tasks, an earlier
        selection among them is dropped, because the recipe may select differently now.
        """
        is_synchronous = isinstance(self.rollouts, SynchronousRollouts)
        if is_synchronous or self.parts.config.rollout.policy == "wait":
            store = self.parts.store
            await with_retries(
                lambda: store.rewind(start.end.step, keep=True),
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
        self._compare(step, await replay_step(self.trainer, self.source, step))
        earlier = [*self.progress.warnings]  # without those of `observe`, which the record has
        self.observe(
            step.step,
            {
                key: math.nan if value is None else value
                for key, value in step.record["metrics"].items()
            },
        )
        self.source.load_state_dict(step.record["source"])
        progress = msgspec.convert(step.record["progress"], RunProgress)
        self._go_on_from(msgspec.structs.replace(progress, warnings=earlier + progress.warnings))
        self._keep_lost_best(End(step.step, str(step.record[CHAIN])))

    def _keep_lost_best(self, end: End) -> None:
        """Saves the weights of the step that was just repeated where their evaluation is the best
        and their checkpoint is lost: a kill interrupted its background save, or it is torn. `end`:
        of the chain at that step."""
        rating = self.progress.newest_rating
        if rating is not None and rating.step == end.step and self._is_best(rating.value):
            self._note_checkpoint(end.step, self._writer(rating.value, copied=False, end=end)())

    def _is_best(self, value: float | None) -> bool:
        """Whether a checkpoint of weights with that evaluation is kept as the best one."""
        section = self.parts.config.checkpoint
        best = self.checkpoints.best_value
        is_kept = section.keep_best and section.every > 0
        return is_kept and value is not None and (best is None or value > best)

    def _value_of(self, metrics: dict[str, float]) -> float | None:
        """The value by which the best checkpoint is chosen; None if nothing is held out."""
        return solved_share(metrics) if self.parts.plays else self.source.value(metrics)

    def _compare(self, step: StepRecord, trained: dict[str, float]) -> None:
        """Warns if the repeated step gave another result than the committed one, for example on
        another machine."""
        was = step.record["metrics"].get("actor/grad_norm")
        now = trained.get("actor/grad_norm")
        if (was is None) != (now is None):
            raise TrainingError(
                f"step {step.step}, repeated from its plan, has gradient norm {now}; when it was "
                f"committed {was}: has the recipe changed?"
            )

        if was is not None and now is not None and abs(now - was) > SAME * max(abs(was), 1e-6):
            self.warn(
                f"step {step.step}, repeated from its plan, has a gradient norm of {now:.6g}; "
                f"when it was committed {was:.6g}"
            )

    async def run(self) -> None:
        """Runs from the step in `progress` to the last step, or until the run is asked to stop."""
        self.view.set_progress(self.progress.step, self._num_steps)
        if self.is_stopped() and (not self.progress.begun or self.progress.step < self.end.step):
            return  # the signal came during loading, cold start or repeated steps
        stop_after = self.parts.config.evaluation.stop_after
        if nothing_left := self.progress.nothing_left(
            self._num_steps, self.command, stop_after=stop_after
        ):
            self.view.note(nothing_left)

        await self.rollouts.begin(self.progress.step)
        if not self.progress.begun:
            if opening := self.source.opening_metrics():
                self.log.log(0, opening)

            self.trainer.begin()
            try:
                before = await self.evaluate("before", full=True)
            except StopAskedError:
                return

            self.progress.before = self.progress.after = before
            self.progress.rate(self._value_of(before))
            self.progress.begun = True

        self.log.deliver_to_trackers(self.progress.step)
        async with self.rollouts.running():
            with self.profiling:
                while self.progress.step < self._num_steps and not self._early_stop():
                    self.background.settle(wait=False)
                    await self._handle_requests()
                    if self.is_stopped():
                        break

                    with self.profiling.step(self.progress.step + 1):
                        committed = copy.deepcopy(self.progress)
                        try:
                            await self.step()
                        except StopAskedError:
                            break

        if self.progress.step > self.end.step:
            self._give_up_step(committed)
            self.background.settle(wait=True)
            return

        num_steps = self.source.num_steps
        if (reason := self._early_stop()) is not None and self.progress.step < num_steps:
            num_remaining = num_steps - self.progress.step
            self.view.note(
                f"finished after step {self.progress.step}, {num_remaining} before the last: "
                f"{reason} (evaluation.stop_after={stop_after})"
            )
            num_steps = self.progress.step

        trains = self.parts.config.trainer.epochs > 0
        for text in self.progress.shortcomings(num_steps, trains=trains):
            self.warn(text)

        self.keep_checkpoint()

    def _early_stop(self) -> str | None:
        """Why the run ends after the step that it has committed; None if it does not."""
        return self.progress.early_stop(self.parts.config.evaluation.stop_after)

    async def _handle_requests(self) -> None:
        """Carries out the requests since the previous step: save, pause, resume (runs/control).
        Returns when the next step may begin, or the run has to stop.

        Engines, samplers and leases stay alive during a pause: the event loop runs, so leases are
        renewed, and samplers play until as many attempts wait as the recipe allows. A signal ends a
        pause immediately.
        """
        control = self.control
        if control is None:
            return

        step = self.progress.step
        has_paused = False
        while True:
            for request in control.take_saves():
                try:
                    self.keep_checkpoint()
                except AgentEvoError as error:
                    self.view.warn(f"the requested checkpoint could not be saved: {error}")
                    control.answer(request, f"failed: {error}", is_done=False)
                else:
                    control.answer(request, f"the checkpoint of step {step} exists")

            if not control.is_pause_asked or self.is_stopped():
                break

            has_paused = True
            control.note_pause(step)
            folder = short(self.parts.config.run_dir)
            self.view.phase(
                PAUSED, f"after step {step}; agentevo control {folder} resume continues"
            )
            started = time.perf_counter()
            await asyncio.sleep(POLL_INTERVAL_S)
            self._clock += time.perf_counter() - started  # a pause is no part of `wall_s`

        if has_paused:
            control.note_resume()

    def keep_checkpoint(self) -> None:
        """Saves the committed weights, between two steps, if no checkpoint has them."""
        self.background.settle(wait=True)
        if self.checkpoints.steps()[-1:] != [self.progress.step]:
            self._note_checkpoint(self.progress.step, self._writer(None, copied=False)())

    def _note_checkpoint(self, step: int, sha256: str) -> None:
        """A checkpoint exists that no record names."""
        self.head.note_checkpoint(step, sha256)
        if step <= self.end.step:
            self.checkpoints.prune()

    def _give_up_step(self, committed: RunProgress) -> None:
        """The user asked to stop during the evaluation of a step that is computed and not
        committed. A resumed run does the step again, with the same attempts. `committed`: the
        progress before the step."""
        step = self.progress.step
        self.view.note(f"stopped within the evaluation after step {step}: a resumed run repeats it")
        self.progress = committed

    async def step(self) -> None:
        """One step, committed at its end."""
        step = self.progress.step + 1
        source = self.source
        rollouts = self.rollouts
        trainer = self.trainer
        started = time.perf_counter()
        counters = self.parts.engine_stats()
        self.view.phase(source.activity, f"step {step}")

        with phase(source.activity):
            collected = await source.collect(step)

        if step == 1:
            check_first_step(self.parts, collected.trajectories, self.command, self.head)

        sampled = time.perf_counter()
        async with rollouts.training():
            with phase("prepare"):
                batch = await rollouts.compute(lambda: source.prepare(collected, step))
            for text in batch.warnings:
                self.warn(f"step {step}: {text}")
            with phase("store"):
                trained_ids = await reserve(self.parts.store, step, collected, batch)

            prepared = time.perf_counter()
            self.view.phase("training", f"step {step}")

            updated = {}
            self._numbers_digest = None
            if batch.samples:
                updated = await rollouts.compute(lambda: trainer.step(batch.samples))
                await self._keep_numbers(step)

            trained = time.perf_counter()
            self.view.phase("publishing weights", f"version {step}")
            with phase("publish"):
                await rollouts.swap(step)

        now = time.perf_counter()
        reasons = drop_reasons(collected, batch)
        timings = {
            "gen": sampled - started,
            "adv": prepared - sampled,
            "update_actor": trained - prepared,
            "update_weights": now - trained + self._announced_s,
            "step": now - started + self._announced_s,
        }

        metrics = step_metrics(step, collected, batch, updated)
        engine = None
        if source.samples_rollouts:
            metrics |= rollouts.stats() | drop_metrics(reasons)
            engine = counted_since(counters, self.parts.engine_stats())

        metrics |= performance_metrics(timings, engine, metrics, self.peak.flops_per_s)

        self.progress.step = step
        self.progress.generated_tokens += sum(
            t.num_completion_tokens() for t in collected.trajectories
        )
        self.progress.trained_tokens += int(metrics.get("trainer/trained_tokens", 0))
        self.progress.count(metrics, reasons, updated=bool(batch.samples))
        self.log.log(step, metrics, attempts_table(self.parts.config, collected.trajectories))
        self.observe(step, metrics)

        checkpoint = await self._milestones(last=step == source.num_steps)
        with phase("store"):
            plan = plan_of(self.parts.config, trained_ids, collected, batch, metrics)
            rows = await self._row_digests.of_step(step, collected.trajectories, trained_ids)
            await self._commit(plan, metrics, checkpoint, rows)

        if checkpoint is not None:
            self.checkpoints.prune()

        await self._announce(step)
        self.view.step(step, source.num_steps, metrics, Counter(reasons.values()))

    async def _announce(self, step: int) -> None:
        self.view.phase("publishing weights", f"version {step}")
        started = time.perf_counter()
        await self.rollouts.announce(step)
        self._announced_s = time.perf_counter() - started

    async def _keep_numbers(self, step: int) -> None:
        """Runs before the step is committed, so that every reader of the step finds the numbers. A
        failure does not end the run."""
        numbers = getattr(self.trainer, "numbers", None)  # only of those that learn from attempts
        if isinstance(numbers, TokenNumbers):
            try:
                numbers_by_attempt = numbers.by_attempt()
                folder = self.parts.config.run_dir
                await in_thread(write_numbers, folder, step, numbers_by_attempt)
                self._numbers_digest = file_digest(folder / name_of(step))
            except OSError as error:
                if not self._has_told_of_numbers:
                    self.view.note(
                        f"tracking.token_numbers: {error}; the run continues without them"
                    )
                self._has_told_of_numbers = True

    def observe(self, step: int, metrics: dict[str, float]) -> None:
        """Warns of a possible collapse."""
        for warning in self.monitor.observe(step, metrics):
            self.warn(f"step {warning.step}: {warning.message}")

    def warn(self, text: str) -> None:
        self.progress.warnings.append(text)
        self.view.warn(text)

    async def evaluate(self, name: str, *, full: bool, label: str = "") -> dict[str, float]:
        """Logs and shows an evaluation of the current weights; `full` adds the sampled attempts.
        `label` distinguishes two evaluations of one step. Raises StopAskedError if the user asks to
        stop during the evaluation."""
        self.view.phase("evaluating", name)
        started = time.perf_counter()

        step = self.progress.step
        with phase("evaluation"):
            held_out = self.source.evaluate(self.is_stopped)
            played: dict[str, float] = {}
            evaluated = None
            if self.parts.plays:
                evaluated = await self._play_evaluation(step, full=full, label=label)
                played = evaluated.metrics
                self.progress.generated_tokens += evaluated.num_tokens

        metrics = held_out | played
        if held_out:
            texts = (
                f"{key.rpartition('/')[2].replace('_', ' ')} {value:.4g}"
                for key, value in held_out.items()
            )
            self.view.note(f"held-out conversations at step {step}: {', '.join(texts)}")

        self.log.log(step, metrics | {"timing_s/testing": time.perf_counter() - started})
        if evaluated is not None and not self.progress.begun:
            check_first_evaluation(self.parts, evaluated, self.command, self.head)
        if evaluated is not None:
            notes = evaluated.notes(self.parts.config, is_first=not self._has_evaluated)
            self.view.evaluation(step, metrics, notes)
            self._has_evaluated = True

        return metrics

    async def _play_evaluation(self, step: int, *, full: bool, label: str) -> Evaluated:
        """Plays the evaluation's attempts."""
        run_engines = self.parts.run_engines
        async with nullcontext() if run_engines is None else run_engines.looked_after():
            samples = self.parts.config.evaluation.samples if full else 0
            work = asyncio.create_task(
                evaluate(self.parts, step, samples=samples, players=self.players, label=label)
            )
            if not await finishes_before_stop(work, self.is_stopped):
                raise StopAskedError("stopped while evaluating")
            return work.result()

    async def _milestones(self, *, last: bool) -> dict[str, str] | None:
        """Evaluates and saves the step that has just been computed, when these are due; returns the
        checkpoint's entry for the record."""
        config = self.parts.config
        step = self.progress.step
        value = None
        if last or (config.evaluation.every and step % config.evaluation.every == 0):
            self.progress.after = await self.evaluate(
                "after" if last else f"step {step}", full=last
            )
            value = self._value_of(self.progress.after)
            self.progress.rate(value)

        every = config.checkpoint.every
        due = bool(every) and step % every == 0
        is_saved = last or due or self._is_best(value) or self._early_stop() is not None
        return self.save(value) if is_saved else None

    def save(self, value: float | None = None) -> dict[str, str] | None:
        """Saves a checkpoint of `progress.step`, for its record; older ones stay until the step is
        committed. `value` is the step's evaluation, if any. Returns None if the checkpoint is
        written in the background, and no record will name it."""
        self.background.settle(wait=True)
        step = self.progress.step
        copied = self.parts.config.checkpoint.background
        self.view.phase("saving", f"checkpoint of step {step}")

        write = self._writer(value, copied=copied)
        if copied:
            self.background.start(step, write)
            return None

        path = self.checkpoints.path(step).relative_to(self.parts.config.run_dir)
        return {"path": str(path), "sha256": write()}

    def _writer(
        self, value: float | None, *, copied: bool, end: End | None = None
    ) -> Callable[[], str]:
        """A function that writes the checkpoint of `progress.step` and returns its sha256.
        `copied`: it writes the state as it is now, whenever and on whichever thread it is called.
        `end`: the newest step that was committed at that time, where it is earlier than the present
        one."""
        self.progress.wall_s = self.wall_s()
        self._clock = time.perf_counter()
        state: dict[str, Any] = {
            "command": kind_of(self.command),
            "progress": msgspec.to_builtins(self.progress),
            "monitor": self.monitor.state_dict(),
            "source": self.source.state_dict(),
            CHAIN: msgspec.to_builtins(end or self.end),
        }

        parts = self.parts
        step = self.progress.step
        saved = {"": parts.model}
        extra_models = parts.saved_beside
        saved |= {folder: model for folder, (model, _) in extra_models.items()}
        shared: Contribution | None = None
        copies: dict[str, dict[str, torch.Tensor]] = {}
        with phase("checkpoint"):
            if self.leader is None or not isinstance(self.trainer, Led):
                trained = self.trainer.state_dict()
            else:
                trained, shared = self.leader.contribution(self.trainer, copied=copied)
                trained, _ = split_state(trained)  # `shared` has the parts

            if copied:
                trained = copy_state(trained)
                whole_models = {k: model for k, model in saved.items() if in_parts(model) is None}
                copies = {
                    k: copy_weights(saved_weights(model)) for k, model in whole_models.items()
                }

        def write() -> str:
            with phase("checkpoint"):
                return self.checkpoints.save(
                    step,
                    parts.model,
                    parts.tokenizer,
                    trained,
                    state,
                    value,
                    prune=False,
                    further_models=extra_models,
                    contribution=shared,
                    copies=copies,
                )[1]

        return write

    def restore(self, run_state: dict[str, Any]) -> None:
        """Restores what `save` wrote."""
        self.source.load_state_dict(run_state["source"])
        self._go_on_from(msgspec.convert(run_state["progress"], RunProgress))
        self.monitor.load_state_dict(run_state["monitor"])
        self._clock = time.perf_counter()

    def _go_on_from(self, progress: RunProgress) -> None:
        """The progress is committed, including all its warnings."""
        self.progress = progress
        self._recorded = len(progress.warnings)

    def wall_s(self) -> float:
        """Seconds of training and evaluation so far, without pauses."""
        return self.progress.wall_s + time.perf_counter() - self._clock

    async def _commit(
        self,
        plan: StepPlan,
        metrics: dict[str, float],
        checkpoint: dict[str, str] | None,
        rows: RecordedRows,
    ) -> None:
        new = self.progress.warnings[self._recorded :]
        progress = msgspec.structs.replace(self.progress, warnings=new)
        record = {
            "metrics": metrics,
            "checkpoint": checkpoint,
            "source": self.source.state_dict(),
            "progress": msgspec.to_builtins(progress),
            LOG: self.log.digest,
            ROWS: msgspec.to_builtins(rows),
        }
        if self._numbers_digest is not None:
            record[NUMBERS] = self._numbers_digest
        self.end = await commit(self.parts.store, self.end, plan, record)
        self.head.note_commit(self.end)
        self.log.deliver_to_trackers(self.end.step)
        self._recorded += len(new)
