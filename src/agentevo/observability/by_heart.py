"""Whether a policy solves its training tasks and not the held-out ones."""

from __future__ import annotations

import math

import msgspec

from agentevo.observability.attempt_facts import AttemptFacts
from agentevo.observability.findings import Finding, Recipe
from agentevo.observability.hacking import CERTAIN, Estimate

MIN_GAP = 0.2
MOST_HELD_OUT = 0.5
"""Held-out success as a share of the success at training tasks."""


class ByHeartState(msgspec.Struct):
    """The newest comparison, for checkpoints."""

    evaluated_at: int | None = None
    """The step of the evaluation that was compared."""
    seen: str = ""
    """What the comparison showed; empty if held-out tasks are solved about as often."""


def compare_with_held_out(
    state: ByHeartState,
    window: AttemptFacts,
    recipe: Recipe,
    held_out: Estimate | None,
    evaluated_at: int | None,
    where: str,
) -> Finding | None:
    """The finding `learnt_by_heart`. `held_out`: the newest evaluation's success, and its variance.
    `evaluated_at`: the step that it follows. An evaluation is compared once, with the first window
    that ends after it: later attempts come from a policy that was not evaluated."""
    training = window.mean("success")
    if not recipe.plays_fixed_tasks or training is None or held_out is None:
        return None

    if evaluated_at != state.evaluated_at:
        state.evaluated_at = evaluated_at
        gap = training[0] - held_out[0]
        is_certain = gap > CERTAIN * math.sqrt(training[1] + held_out[1])
        is_large = gap >= MIN_GAP and held_out[0] <= MOST_HELD_OUT * training[0]
        state.seen = (
            f"The policy solves its training tasks in {training[0]:.0%} of the attempts {where}, "
            f"and held-out tasks in {held_out[0]:.0%} at the newest evaluation: it knows training "
            "tasks by heart, or held-out tasks are of another kind"
            if is_certain and is_large
            else ""
        )
    if not state.seen:
        return None

    return Finding(
        code="learnt_by_heart",
        seen=state.seen,
        remedy="train on more tasks that differ from each other (tasks.train), "
        f"{recipe.remedies.teach_less}, and see whether the held-out tasks ask for what the "
        "training tasks teach",
    )
