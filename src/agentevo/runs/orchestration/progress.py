"""The progress of a run so far."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from agentevo.observability.metrics import not_comparable, read_evaluations
from agentevo.types import Trajectory


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

    def early_stop(self, stop_after: int) -> str | None:
        """Why the run ends before its last step, for its summary; None if it continues.
        stop_after: `evaluation.stop_after`."""
        if not stop_after or self.evaluations_since_best < stop_after:
            return None

        best = self.best_rating
        num = self.evaluations_since_best
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
        if it has one, or is only evaluated. stop_after: `evaluation.stop_after`."""
        reason = self.early_stop(stop_after)
        if self.step == 0 or (self.step < num_steps and reason is None):
            return None

        committed = f"{self.step} step{'s are' if self.step > 1 else ' is'} committed"
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

    def shortcomings(self, num_steps: int, *, trains: bool = True) -> list[str]:
        """Lines about a run that has ended after `num_steps` steps, if its numbers are misleading.
        `trains`: the run was meant to train on attempts."""
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

        if self.groups and self.groups == self.equal_groups:
            remarks.append(
                f"In every one of {self.groups} group{'s' * (self.groups != 1)} all attempts had "
                "the same reward: no attempt was better than another. `agentevo doctor` lists "
                "remedies; causes are a scorer that always gives the same score, and tasks that "
                "are too hard or too easy."
            )

        if words := not_comparable(read_evaluations(self.before), read_evaluations(self.after)):
            remarks.append(words)

        return remarks
