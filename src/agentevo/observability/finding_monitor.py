"""Says each finding of a run once when it begins, and once when it is over.

The monitor is a pure function of what it has received: no clock, no randomness.
`load_state_dict(state_dict())` restores it exactly (also through JSON), so a resumed run gives the
same warnings as an uninterrupted one. A missing input disables only the findings that need it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from agentevo.errors import CheckpointError
from agentevo.observability.attempt_facts import AttemptFacts, add_facts
from agentevo.observability.by_heart import ByHeartState, compare_with_held_out
from agentevo.observability.collapse import GRAD_NORM, CollapseSigns, CollapseState
from agentevo.observability.findings import (
    WINDOW,
    Recipe,
    find_clipped_gradient,
    find_old_tokens,
    learning_findings,
)
from agentevo.observability.hacking import Estimate, HackingState, observe_window

OVER_AFTER = 3
"""A finding is over after this many steps without it."""
EVENTS = ("not_finite", "rollouts_lost", "gradient_spike")
"""Findings of single steps: they do not last, and are not said again for COOLDOWN steps."""
COOLDOWN = 20
ONLY_AT_START = "all_solved"
"""A finding that counts only in the first window: a run that solves its tasks later has
learned."""
KEPT_METRICS = (
    "rollout/in",
    "rollout/dropped/stale",
    "rollout/dropped/cancelled",
    "staleness/masked",
    "staleness/masked_trajectories",
    GRAD_NORM,
)
TITLES = {
    "all_failed": "all attempts failed with the same reward",
    "all_solved": "all attempts succeeded",
    "equal_rewards": "attempts at the same task had the same reward",
    "malformed_calls": "most calls or actions could not be carried out",
    "truncated_answers": "answers were cut by the token limit",
    "unused_tools": "tools were not used",
    "no_exploration": "attempts repeated each other",
    "reward_beside_success": "the reward followed something else than success",
    "gradient_clipped": "the gradient was clipped at every step",
    "tokens_too_old": "tokens were too old to train on",
    "spread_vanished": "attempts earned nearly the same reward",
    "entropy_collapsed": "the entropy had collapsed",
    "entropy_exploded": "the entropy had risen",
    "reward_fell": "the reward had fallen",
    "reward_up_success_down": "the reward rose and success fell",
    "phrase_spreads": "one phrase spread through the answers",
    "length_explodes": "answers grew without more success",
    "speaks_to_judge": "answers spoke to the judge",
    "learnt_by_heart": "training tasks were solved far more often than held-out ones",
}
"""What the end of a finding is called."""


class RunWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A finding that has begun, or is over."""

    code: str
    step: int
    message: str
    is_over: bool = False


class FindingSpan(msgspec.Struct):
    """The steps in which a finding holds, from the first to the last."""

    code: str
    begin: int
    end: int | None = None
    """The last step with it; None while it lasts."""


class _Step(msgspec.Struct):
    """What is kept of a step while it is in the window."""

    step: int
    metrics: dict[str, float] = {}
    facts: AttemptFacts | None = None


class MonitorState(msgspec.Struct):
    """The state of the monitor."""

    collapse: CollapseState = msgspec.field(default_factory=CollapseState)
    hacking: HackingState = msgspec.field(default_factory=HackingState)
    by_heart: ByHeartState = msgspec.field(default_factory=ByHeartState)
    window: list[_Step] = []
    had_window: bool = False
    """Whether a whole window of attempts was seen."""
    last_seen: dict[str, int] = {}
    """Code of a lasting finding -> the newest step with it."""
    last_said: dict[str, int] = {}
    """Code of an event -> the step at which it was said."""
    spans: list[FindingSpan] = []


class FindingMonitor:
    """Receives every step once and in order, and returns what is new."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        self.recipe = recipe or Recipe()
        self._collapse = CollapseSigns(remedies=self.recipe.remedies)
        self._state = MonitorState()

    @property
    def spans(self) -> list[dict[str, Any]]:
        """The findings of the run so far, as JSON values for its summary."""
        spans: list[dict[str, Any]] = msgspec.to_builtins(self._state.spans)
        return spans

    def observe(
        self,
        step: int,
        metrics: Mapping[str, float | None],
        facts: AttemptFacts | None = None,
        held_out: Estimate | None = None,
        evaluated_at: int | None = None,
    ) -> list[RunWarning]:
        """What begins or ends with this step, the worst first; usually nothing. `facts`: of the
        step's attempts. `held_out`: the newest evaluation's success, and its variance.
        `evaluated_at`: the step that this evaluation follows; 0 before the first."""
        state = self._state
        kept = {
            name: value
            for name in KEPT_METRICS
            if (value := metrics.get(name)) is not None and math.isfinite(value)
        }
        state.window = [*state.window[1 - WINDOW :], _Step(step=step, metrics=kept, facts=facts)]

        texts = self._collapse.observe(step, metrics) | self._find(step, held_out, evaluated_at)
        new = [self._begin(code, step, text) for code, text in texts.items()]
        over = [self._end(code, step) for code in TITLES if code not in texts]
        return [warning for warning in (*new, *over) if warning is not None]

    def _find(
        self, step: int, held_out: Estimate | None, evaluated_at: int | None
    ) -> dict[str, str]:
        """Code -> text of the findings of the window that ends with `step`."""
        state = self._state
        if len(state.window) < WINDOW:
            return {}

        where = f"of steps {state.window[0].step} to {step}"
        rows = [entry.metrics for entry in state.window]
        norms = [row[GRAD_NORM] for row in rows if GRAD_NORM in row]
        findings = [
            find_clipped_gradient(norms, self.recipe, where),
            find_old_tokens(rows, self.recipe, where),
        ]
        facts = [entry.facts for entry in state.window if entry.facts is not None]
        if len(facts) == WINDOW:
            window = add_facts(facts)
            findings += [
                finding
                for finding in learning_findings(window, self.recipe, where)
                if finding.code != ONLY_AT_START
                or not state.had_window
                or finding.code in state.last_seen
            ]
            findings += observe_window(state.hacking, step, window, self.recipe, held_out)
            findings += [
                compare_with_held_out(
                    state.by_heart, window, self.recipe, held_out, evaluated_at, where
                )
            ]
            state.had_window = True

        return {finding.code: finding.text for finding in findings if finding is not None}

    def _begin(self, code: str, step: int, text: str) -> RunWarning | None:
        state = self._state
        if code in EVENTS:
            if step - state.last_said.get(code, -COOLDOWN) < COOLDOWN:
                return None
            state.last_said[code] = step
            state.spans.append(FindingSpan(code=code, begin=step, end=step))
            return RunWarning(code=code, step=step, message=text)

        is_new = code not in state.last_seen
        state.last_seen[code] = step
        if not is_new:
            return None

        state.spans.append(FindingSpan(code=code, begin=step))
        return RunWarning(code=code, step=step, message=text)

    def _end(self, code: str, step: int) -> RunWarning | None:
        state = self._state
        last = state.last_seen.get(code)
        if last is None or step - last < OVER_AFTER:
            return None

        del state.last_seen[code]
        span = next(span for span in reversed(state.spans) if span.code == code)
        span.end = last
        return RunWarning(
            code=code,
            step=step,
            message=f"This has ended: {TITLES[code]} (steps {span.begin} to {last}).",
            is_over=True,
        )

    def state_dict(self) -> dict[str, Any]:
        """The state as numbers, strings and dicts, for JSON."""
        self._state.collapse = self._collapse.state
        state: dict[str, Any] = msgspec.to_builtins(self._state)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`. Raises CheckpointError."""
        try:
            self._state = msgspec.convert(state, MonitorState)
        except msgspec.ValidationError as error:
            raise CheckpointError(
                f"the checkpoint's findings can't be read ({error}): it was written by another "
                "version of agentevo, so resume with that one"
            ) from error
        self._collapse.state = self._state.collapse
