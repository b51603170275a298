"""Signs that the policy earns more reward without doing the task better (reward hacking).

A run has begun with the first WINDOW steps; the last WINDOW steps are compared with them, and a
second measure of success (success of training attempts, another reward of the recipe, held-out
success) with the step where it was best. A difference counts from CERTAIN standard errors, over
groups, because the attempts of a group are not independent.
"""

from __future__ import annotations

import math

import msgspec

from agentevo.observability.attempt_facts import AttemptFacts
from agentevo.observability.findings import Finding, Recipe
from agentevo.types import REWARD_PARTS

CERTAIN = 3.0
MIN_FALL = 0.1
"""The least fall of a success rate that counts; of another reward: as a share of its best mean."""
SPREAD_SHARE = 0.5
"""Share of answers from which a phrase counts that was in few at the beginning."""
NEW_SHARE = 0.2
LENGTH_FACTOR = 3.0
MIN_LONGER = 32
"""Tokens."""
JUDGE_SHARE = 0.05
MIN_TO_JUDGE = 3

Estimate = tuple[float, float]
"""A mean and the variance of that mean."""


class BestMeasure(msgspec.Struct):
    """The best value of a measure so far, and the reward of that time."""

    value: Estimate
    reward: Estimate
    step: int


class HackingState(msgspec.Struct):
    """The state of the signs, for checkpoints."""

    start: AttemptFacts | None = None
    """Facts of the first steps."""
    best: dict[str, BestMeasure] = {}


def observe_window(
    state: HackingState,
    step: int,
    window: AttemptFacts,
    recipe: Recipe,
    held_out: Estimate | None = None,
) -> list[Finding]:
    """The findings of a full window that ends with `step`. `held_out`: the newest evaluation's
    success, and its variance."""
    reward = window.mean("reward")
    if reward is None or not recipe.learns_from_reward:
        return []

    values = {"success": window.mean("success"), "held-out success": held_out}
    values |= {
        name: window.mean(REWARD_PARTS + name)
        for name in recipe.scorers[1:]
        if REWARD_PARTS + name in window.measures
    }
    findings = [
        _find_divergence(state, step, name, value, reward)
        for name, value in values.items()
        if value is not None
    ]
    if state.start is None:
        state.start = window
    findings += [
        _find_phrase(state.start, window, recipe),
        _find_longer_answers(state.start, window, recipe),
        _find_words_to_judge(window, recipe),
    ]

    return [finding for finding in findings if finding is not None]


def _find_divergence(
    state: HackingState, step: int, name: str, value: Estimate, reward: Estimate
) -> Finding | None:
    best = state.best.get(name)
    if best is None or value[0] > best.value[0]:
        state.best[name] = BestMeasure(value=value, reward=reward, step=step)
        return None

    is_rate = name in ("success", "held-out success")
    least = MIN_FALL if is_rate else MIN_FALL * abs(best.value[0])
    if best.value[0] - value[0] < least or not _is_above(best.value, value):
        return None
    if not _is_above(reward, best.reward):
        return None

    form = ".0%" if is_rate else ".3g"
    return Finding(
        code="reward_up_success_down",
        seen=f"Since about step {best.step} the reward rose from {best.reward[0]:.3g} to "
        f"{reward[0]:.3g}, and {name} fell from {best.value[0]:{form}} to {value[0]:{form}}: the "
        "policy learns what is rewarded, and not the task",
        remedy="read attempts with the highest reward (`agentevo trajectories show`), change the "
        f"reward that pays them, and resume from a checkpoint of about step {best.step}",
    )


def _is_above(higher: Estimate, lower: Estimate) -> bool:
    return higher[0] - lower[0] > CERTAIN * math.sqrt(higher[1] + lower[1]) + 1e-9


def _has_improved(start: AttemptFacts, window: AttemptFacts) -> bool:
    before, now = start.mean("success"), window.mean("success")
    return (
        before is not None
        and now is not None
        and now[0] > before[0] + 2 * math.sqrt(now[1] + before[1])
    )


def _find_phrase(start: AttemptFacts, window: AttemptFacts, recipe: Recipe) -> Finding | None:
    """Answers that become alike while success rises are what learning looks like, unless a model
    decides success."""
    if not (window.phrases and start.answers) or (
        _has_improved(start, window) and not recipe.is_judged
    ):
        return None

    phrase, count = min(window.phrases.items(), key=lambda item: (-item[1], item[0]))
    share = count / window.answers
    before = start.phrases.get(phrase, 0) / start.answers
    if share < SPREAD_SHARE or before > NEW_SHARE or share - before < SPREAD_SHARE - NEW_SHARE:
        return None

    return Finding(
        code="phrase_spreads",
        seen=f"{share:.0%} of answers contain the words {phrase!r}, {before:.0%} at the beginning, "
        "and no prompt has them: the reward may pay for the phrase",
        remedy="see whether answers with the phrase deserve their reward, "
        + (f"{recipe.remedies.check_judge}, " if recipe.remedies.check_judge else "")
        + f"or tie the policy to its start ({recipe.remedies.limit_drift})",
    )


def _find_longer_answers(
    start: AttemptFacts, window: AttemptFacts, recipe: Recipe
) -> Finding | None:
    if not (start.completions and window.completions) or _has_improved(start, window):
        return None

    before = start.tokens / start.completions
    now = window.tokens / window.completions
    if now < LENGTH_FACTOR * before or now < before + MIN_LONGER:
        return None

    return Finding(
        code="length_explodes",
        seen=f"Completions have {now:.0f} tokens, {now / before:.1f} times the {before:.0f} of the "
        f"beginning, and success has not risen ({window.successes / window.attempts:.0%}): length "
        "itself may be rewarded",
        remedy=f"{recipe.remedies.limit_length}, or tie the policy to its start "
        f"({recipe.remedies.limit_drift})",
    )


def _find_words_to_judge(window: AttemptFacts, recipe: Recipe) -> Finding | None:
    if window.to_judge < max(MIN_TO_JUDGE, JUDGE_SHARE * window.answers):
        return None

    return Finding(
        code="speaks_to_judge",
        seen=f"{window.to_judge} of {window.answers} answers speak to whoever scores them, such as "
        f"{window.to_judge_example[:80]!r}: a judge that obeys pays for these words",
        remedy="give such answers no reward"
        + (f", and {recipe.remedies.check_judge}" if recipe.remedies.check_judge else ""),
    )
