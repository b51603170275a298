"""The state of a run and the commit of each step: progress, warnings, the log of metrics, and the
chain of the committed steps.

A step is committed in one transaction with its plan, its metrics and the progress after it. The
record of a step has only the warnings since the previous one.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from agentevo.observability import FindingMonitor, LiveView, MetricsLog
from agentevo.observability.attempt_facts import AttemptFacts
from agentevo.observability.metrics import not_comparable, read_evaluations
from agentevo.observability.run_warnings import WARNINGS
from agentevo.runs.folder.chain import KEY as CHAIN
from agentevo.runs.folder.chain import LOG, NUMBERS, ROWS, SUMMARY, End, HeadFile, file_digest
from agentevo.runs.folder.creation import RunCommand, kind_of
from agentevo.runs.orchestration.batch_sources import BatchSource
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.evaluation import failed_share, headline, sampled_success
from agentevo.runs.orchestration.gap import chooses_by_gap, is_larger
from agentevo.runs.orchestration.ledger import RowDigests, commit
from agentevo.runs.orchestration.run_findings import held_out_success, recipe_of
from agentevo.runs.orchestration.tracking import attempts_table
from agentevo.runtime.event_loop import in_thread
from agentevo.store.records import StepRecord
from agentevo.training.batching.step_plan import StepPlan
from agentevo.training.token_numbers import TokenNumbers, name_of, write_numbers
from agentevo.types import Baselines, Trajectory

FACTS = "attempt_facts"
"""The key in a step's record with the facts of its attempts, if it has any."""


class Rating(msgspec.Struct, frozen=True):
    """An evaluation of the weights of a step; 0: before the first step."""

    step: int
    value: float
    """The held-out success, or minus the held-out loss; higher is better."""


class RunProgress(msgspec.Struct):
    """Saved with every step and every checkpoint. A step is saved with only the warnings since the
    one before, or a long run's records would grow with every step."""

    step: int = 0
    """Committed steps."""
    generated_tokens: int = 0
    trained_tokens: int = 0
    wall_s: float = 0.0
    """Seconds of training and evaluation so far, without pauses."""
    begun: bool = False
    """Whether the evaluation before the first step is done."""
    before: dict[str, float] = {}
    """Evaluation after any cold start, before the first step."""
    after: dict[str, float] = {}
    """The newest evaluation."""
    cold_start_before: dict[str, float] = {}
    """Evaluation before the cold start, if there was one."""
    warnings: list[str] = []
    updates: int = 0
    """Steps that trained on at least one token."""
    groups: int = 0
    """Groups of completed attempts so far."""
    equal_groups: int = 0
    """The groups among them whose rewards were all the same."""
    dropped: dict[str, int] = {}
    """Why attempts were not trained on: reason -> how many."""
    newest_rating: Rating | None = None
    best_rating: Rating | None = None
    """The first of the equally good ones."""
    evaluations_since_best: int = 0
    best_gaps: dict[str, float] = {}
    """Task -> its gap at `best_rating`, where a gap chooses the weights (gap.py)."""

    def rate(self, value: float | None) -> None:
        """Counts an evaluation of the weights of `step`. value: None if nothing is held out."""
        if value is None:
            return

        is_number = math.isfinite(value)
        self.newest_rating = Rating(self.step, value) if is_number else None
        if is_number and (self.best_rating is None or value > self.best_rating.value):
            self.best_rating = self.newest_rating
            self.evaluations_since_best = 0
        else:
            self.evaluations_since_best += 1

    def rate_gap(self, by_task: Mapping[str, float]) -> bool:
        """Counts a measurement of the gaps of tasks (gap.py). Returns whether it is the best one.
        The first gap above 0 is."""
        gap = fmean(by_task.values())
        is_best = is_larger(by_task, self.best_gaps) if self.best_gaps else gap > 0
        self.newest_rating = Rating(self.step, gap) if is_best else None
        if is_best:
            self.best_rating = self.newest_rating
            self.best_gaps = dict(by_task)
            self.evaluations_since_best = 0
        elif self.best_gaps:
            self.evaluations_since_best += 1
        return is_best

    def early_stop(self, stop_after: int) -> str | None:
        """Why the run ends before its last step, for its summary; None if it continues.
        stop_after: see RunRecord.stop_rule."""
        if not stop_after or self.evaluations_since_best < stop_after:
            return None

        best = self.best_rating
        num = self.evaluations_since_best
        if best is not None and self.best_gaps:
            gap = _describe_gap(best)
            return f"the last {num} measurement{'s' * (num != 1)} showed no larger gap than {gap}"

        if best is None:
            finding = "gave no number"
        else:
            measure = (
                f"held-out loss of {-best.value:.4g}"
                if best.value < 0
                else f"held-out success of {best.value:.1%}"
            )
            when = f"of step {best.step}" if best.step else "before the first step"
            finding = f"were no better than the {measure} {when}"

        return f"the last {num} evaluation{'s' * (num != 1)} {finding}"

    def count_step(
        self,
        step: int,
        sampled: Sequence[Trajectory],
        metrics: Mapping[str, float],
        reasons: Mapping[str, str],
        *,
        updated: bool,
    ) -> None:
        """Adds the results of a step. reasons: attempt -> why it is not trained on."""
        self.step = step
        self.generated_tokens += sum(t.num_completion_tokens() for t in sampled)
        self.trained_tokens += int(metrics.get("trainer/trained_tokens", 0))
        self.updates += updated
        groups = metrics.get("group/num", 0.0)
        self.groups += round(groups)
        self.equal_groups += round(groups * metrics.get("group/zero_std_ratio", 0.0))
        self.dropped = dict(Counter(self.dropped) + Counter(reasons.values()))

    def nothing_left(self, num_steps: float, command: str, stop_after: int = 0) -> str | None:
        """The line for a run of `num_steps` steps that begins or resumes and has no step left; None
        if it has one, or is only evaluated. stop_after: see RunRecord.stop_rule."""
        reason = self.early_stop(stop_after)
        if self.step == 0 or (self.step < num_steps and reason is None):
            return None

        committed = f"{self.step} step{'s are' if self.step > 1 else ' is'} committed"
        if self.step < num_steps and self.best_gaps:
            return f"{committed}, and {reason}, so nothing is trained"

        if self.step < num_steps:
            return (
                f"{committed}, and {reason}, so nothing is trained: give "
                f"{'--resume and ' * (command == 'learn')}evaluation.stop_after=0, or above "
                f"{self.evaluations_since_best}, to continue"
            )

        if command == "sft":  # their number follows from the data
            return f"{committed} of {num_steps}, so nothing is trained"

        compared = "less" if num_steps < self.step else "no more"
        return (
            f"{committed} and trainer.steps={num_steps} is {compared}, so nothing is trained: give "
            f"{'--resume and ' * (command == 'learn')}trainer.steps above {self.step} to continue"
        )

    def shortcomings(
        self, num_steps: int, *, trains: bool = True, compares: bool = True
    ) -> list[str]:
        """Lines about a run that has ended after `num_steps` steps, if its numbers are misleading.
        `trains`: the run was meant to train on attempts; `compares`: on the differences of their
        rewards."""
        remarks: list[str] = []
        if self.step < num_steps:
            return remarks

        if trains and self.step and not self.updates:
            why = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
            remarks.append(
                f"This run has trained on no token in {self.step} step{'s' * (self.step != 1)}, "
                "so its weights are the initial ones"
                + (f" (dropped attempts: {why})." if why else ".")
            )

        if compares and self.groups and self.groups == self.equal_groups:
            remarks.append(
                f"In every one of {self.groups} group{'s' * (self.groups != 1)} all attempts had "
                "the same reward: no attempt was better than another. `agentevo doctor` lists "
                "remedies; causes are a scorer that always gives the same score, and tasks that "
                "are too hard or too easy."
            )

        if words := not_comparable(read_evaluations(self.before), read_evaluations(self.after)):
            remarks.append(words)

        return remarks


def _describe_gap(best: Rating) -> str:
    """`the 43.8 points of step 12`."""
    when = f"of step {best.step}" if best.step else "before the first step"
    return f"the {100 * best.value:.1f} points {when}"


class RunRecord:
    """See the module. `progress` is ahead of `end`, the newest committed step, while a step is
    evaluated and saved."""

    def __init__(
        self, parts: Components, source: BatchSource, view: LiveView, command: RunCommand
    ) -> None:
        self._parts = parts
        self._config = parts.config
        self._folder = parts.config.run_dir
        self._source = source
        self._view = view
        self._command = command
        self.log = MetricsLog(self._folder / "metrics.jsonl")
        self.head = HeadFile(self._folder)
        self.progress = RunProgress()
        self.end = End()
        self._monitor = FindingMonitor(recipe_of(parts.config, command))
        self._facts: AttemptFacts | None = None
        """Of the newest step."""
        self._row_digests = RowDigests(parts.store)
        self._clock = time.perf_counter()
        self._num_recorded = 0
        """The number of warnings that are in the records of committed steps."""
        self._numbers_digest: str | None = None
        """The digest of the file with the newest step's token numbers, if there is one."""
        self._has_warned_of_numbers = False

    @property
    def is_at_end(self) -> bool:
        """Whether the newest step of `progress` is the newest committed one."""
        return self.progress.step == self.end.step

    def begin(self, end: End) -> None:
        """The run's folder exists from now on. `end`: the newest step that is committed there."""
        self.end = end
        self.head = HeadFile(self._folder)  # as write_config wrote it
        self.head.note_commit(end)

    def warn(self, text: str) -> None:
        """Shows a warning, and keeps it for the summary."""
        self.progress.warnings.append(text)
        self._view.warn(text)

    def observe(self, step: int, metrics: dict[str, float], facts: AttemptFacts | None) -> None:
        """Says which findings begin or are over with a step. `facts`: of its attempts. The newest
        evaluation is one of an earlier step."""
        self._facts = facts
        held_out = held_out_success(self.progress.after or self.progress.before)
        rating = self.progress.newest_rating
        evaluated_at = None if rating is None else rating.step
        for warning in self._monitor.observe(step, metrics, facts, held_out, evaluated_at):
            text = f"step {warning.step}: {warning.message}"
            self.progress.warnings.append(text)
            show = self._view.note if warning.is_over else self._view.warn
            show(text)

    def add_step(
        self,
        step: int,
        metrics: dict[str, float],
        sampled: Sequence[Trajectory],
        dropped: Mapping[str, str],
        facts: AttemptFacts | None,
        *,
        updated: bool,
    ) -> None:
        """A step is computed: counts and logs it. `dropped`: attempt -> why it is not trained
        on. `facts`: of its attempts."""
        self.progress.count_step(step, sampled, metrics, dropped, updated=updated)
        self.log.log(step, metrics, attempts_table(self._config, sampled))
        self.observe(step, metrics, facts)

    @property
    def chooses_by_gap(self) -> bool:
        return chooses_by_gap(self._config, self._command)

    @property
    def stop_rule(self) -> tuple[str, int]:
        """The key that ends the run early, and its value: how many evaluations in a row, or
        measurements of the gap, are no better than the best one. 0: it does not."""
        if self.chooses_by_gap:
            return "sft.stop_at_gap.patience", self._config.sft.stop_at_gap.patience
        return "evaluation.stop_after", self._config.evaluation.stop_after

    @property
    def early_stop(self) -> str | None:
        """Why the run ends after its newest step; None if it does not."""
        return self.progress.early_stop(self.stop_rule[1])

    def warn_of_shortcomings(self) -> None:
        """The run has ended: says why it ended early, if it did, and which of its numbers are
        misleading."""
        step = self.progress.step
        num_steps = self._source.num_steps
        if (reason := self.early_stop) is not None and step < num_steps:
            key, value = self.stop_rule
            self._view.note(
                f"finished after step {step}, {num_steps - step} before the last: {reason} "
                f"({key}={value})"
            )
            num_steps = step

        if self.chooses_by_gap:
            self._say_what_is_kept()

        trains = self._config.trainer.epochs > 0
        compares = not self._config.distillation.is_alone
        for text in self.progress.shortcomings(num_steps, trains=trains, compares=compares):
            self.warn(text)

    def _say_what_is_kept(self) -> None:
        """Which weights the measurements of the gap have chosen."""
        best = self.progress.best_rating
        if best is None:
            self.warn(
                "no measurement showed a gap between pass@k and pass@1 on training tasks (nothing "
                "was solved, or everything): the last weights are kept"
            )
        elif best.step == 0:
            self.warn(
                f"the gap between pass@k and pass@1 was largest before the first step "
                f"({100 * best.value:.1f} points): the kept weights are those without "
                "fine-tuning, and RL has no need of these demonstrations"
            )
        else:
            self._view.note(f"kept: the weights with the largest gap, {_describe_gap(best)}")

    def write_summary(
        self,
        players: Baselines | None,
        best: dict[str, float | None],
        profile: dict[str, Any],
    ) -> None:
        """Writes summary.json, the summary of a run that has ended. `players`: the reference
        players on the held-out tasks. `best`: step and value of the best checkpoint. `profile`:
        what Profiling measured."""
        config = self._config
        parts = self._parts
        progress = self.progress
        plays = parts.plays

        def success(metrics: dict[str, float]) -> float | None:
            return headline(metrics) if plays and metrics else None

        summary = {
            "name": config.run.name,
            "command": self._command,
            "model": config.model.name,
            "environment": config.environment.type if config.environment is not None else None,
            "seed": config.run.seed,
            "eval": {
                "before": success(progress.before),
                "after": success(progress.after),
                "n": len(parts.tasks.held_out()) if plays else None,
                "cold_start_before": success(progress.cold_start_before),
                "random": players.random if players is not None else None,
                "optimal": players.optimal if players is not None else None,
                "sampled": {
                    "before": sampled_success(progress.before),
                    "after": sampled_success(progress.after),
                },
                "failed": {
                    "before": failed_share(progress.before),
                    "after": failed_share(progress.after),
                },
            },
            **self._source.summary(progress.before, progress.after),
            "wall_s": self.wall_s(),
            "steps": progress.step,
            "planned_steps": self._source.num_steps,
            "stopped_early": self.early_stop if progress.step < self._source.num_steps else None,
            "tokens": {"generated": progress.generated_tokens, "trained": progress.trained_tokens},
            "best": best,
            **self._kept(best),
            "profile": profile,
            "remote_models": parts.sampler.remote_models.summary() if plays else {},
            "findings": self._monitor.spans,
            "warnings": [*self._source.warnings(), *progress.warnings],
        }
        self.head.write_file(SUMMARY, json.dumps(summary, indent=2))

    def _kept(self, best: Mapping[str, float | None]) -> dict[str, Any]:
        """The entry of a run whose weights are chosen by their gap: None if none was above 0."""
        if not self.chooses_by_gap:
            return {}
        if best["step"] is None:
            return {"kept": None}
        attempts = self._config.sft.stop_at_gap.attempts
        return {"kept": {"step": best["step"], "gap": best["value"], "attempts": attempts}}

    def wall_s(self) -> float:
        """Seconds of training and evaluation so far, without pauses."""
        return self.progress.wall_s + time.perf_counter() - self._clock

    def exclude_pause(self, seconds: float) -> None:
        """The run was paused for so long, which is no part of `wall_s`."""
        self._clock += seconds

    async def keep_numbers(self, step: int, numbers: TokenNumbers | None) -> None:
        """Writes the token numbers of a step, if there are any. Runs before the step is committed,
        so that every reader of the step finds them. A failure does not end the run."""
        self._numbers_digest = None
        if numbers is None:
            return

        try:
            numbers_by_attempt = numbers.by_attempt()
            await in_thread(write_numbers, self._folder, step, numbers_by_attempt)
            self._numbers_digest = file_digest(self._folder / name_of(step))
        except OSError as error:
            if not self._has_warned_of_numbers:
                self._view.note(f"tracking.token_numbers: {error}; the run continues without them")
            self._has_warned_of_numbers = True

    async def commit(
        self,
        plan: StepPlan,
        metrics: dict[str, float],
        checkpoint: dict[str, str] | None,
        sampled: Sequence[Trajectory],
    ) -> None:
        """Commits the newest step of `progress`. `checkpoint`: the entry of the one that was saved
        of it. `sampled`: all attempts of the step."""
        rows = await self._row_digests.of_step(self.progress.step, sampled, plan.ids)
        new = self.progress.warnings[self._num_recorded :]
        progress = msgspec.structs.replace(self.progress, warnings=new)
        record = {
            "metrics": metrics,
            "checkpoint": checkpoint,
            "source": self._source.state_dict(),
            "progress": msgspec.to_builtins(progress),
            LOG: self.log.digest,
            ROWS: msgspec.to_builtins(rows),
        }
        if self._numbers_digest is not None:
            record[NUMBERS] = self._numbers_digest
        if self._facts is not None:
            record[FACTS] = msgspec.to_builtins(self._facts)

        self.end = await commit(self._parts.store, self.end, plan, record)
        self.head.note_commit(self.end)
        self.log.deliver_to_trackers(self.end.step)
        self._num_recorded += len(new)
        if new:
            self.head.write_file(WARNINGS, json.dumps({"warnings": self.progress.warnings}))

    def give_up_step(self, committed: RunProgress) -> None:
        """A stop was requested during the evaluation of the step, which is not committed. A resumed
        run repeats it with the same attempts. `committed`: the progress before the step."""
        step = self.progress.step
        self._view.note(
            f"stopped within the evaluation after step {step}: a resumed run repeats it"
        )
        self.progress = committed

    def restore_step(self, step: StepRecord) -> None:
        """A committed step was repeated: the progress is that of its record."""
        earlier = [*self.progress.warnings]  # without those of `observe`, which the record has
        metrics = {
            key: math.nan if value is None else value
            for key, value in step.record["metrics"].items()
        }
        recorded = step.record.get(FACTS)
        facts = None if recorded is None else msgspec.convert(recorded, AttemptFacts)
        self.observe(step.step, metrics, facts)
        self._source.load_state_dict(step.record["source"])
        progress = msgspec.convert(step.record["progress"], RunProgress)
        self._go_on_from(msgspec.structs.replace(progress, warnings=earlier + progress.warnings))

    def state_dict(self, end: End | None = None) -> dict[str, Any]:
        """The state for a checkpoint of the newest step, as JSON values. `end`: the newest step
        that was committed at that time, where it is earlier than the present one."""
        self.progress.wall_s = self.wall_s()
        self._clock = time.perf_counter()
        return {
            "command": kind_of(self._command),
            "progress": msgspec.to_builtins(self.progress),
            "monitor": self._monitor.state_dict(),
            "source": self._source.state_dict(),
            CHAIN: msgspec.to_builtins(end or self.end),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, except for the end."""
        self._source.load_state_dict(state["source"])
        self._go_on_from(msgspec.convert(state["progress"], RunProgress))
        self._monitor.load_state_dict(state["monitor"])
        self._clock = time.perf_counter()

    def _go_on_from(self, progress: RunProgress) -> None:
        """The progress is committed, including all its warnings."""
        self.progress = progress
        self._num_recorded = len(progress.warnings)
