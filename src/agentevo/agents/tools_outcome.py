"""The outcome of an attempt with tools: the tools' outcomes for their final state, and the agent's
own parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentevo.agents.agent import outcome_of
from agentevo.agents.tools.toolbox import METRICS, AttemptTools
from agentevo.types import Outcome


async def tool_outcomes(tools: AttemptTools) -> dict[str, Outcome]:
    """The outcome of each toolset that gives one, requested once. Raises the toolset's errors."""
    return {name: outcome_of(returned) for name, returned in (await tools.outcomes()).items()}


def outcome_with_tools(
    tools: AttemptTools,
    outcomes: Mapping[str, Outcome],
    *,
    has_judges: bool,
    own_parts: Mapping[str, float],
    turn_rewards: dict[int, float],
    metrics: Mapping[str, float],
    end: str,
    ends: Sequence[str],
) -> Outcome:
    """The reward is the sum of the parts of `outcomes` and of the agent's `own_parts`. It is None,
    so that a scorer decides, if no toolset gives outcomes (`has_judges`) and no reward was earned.
    `end` is one of `ends`; the first of `ends` is the final answer."""
    parts = parts_of(outcomes) | dict(own_parts)
    all_metrics = {
        key: metric for judge in outcomes.values() for key, metric in judge.metrics.items()
    }
    all_metrics |= {name: float(tools.metrics[name]) for name in METRICS}
    all_metrics |= metrics
    is_unsaid = has_judges and not outcomes and not any(parts.values())

    return Outcome(
        reward=None if is_unsaid else sum(parts.values()),
        success=bool(outcomes) and all(outcome.success for outcome in outcomes.values()),
        reward_parts=parts,
        turn_rewards=turn_rewards,
        truncated=end != ends[0],
        metrics=all_metrics | {f"ended_by_{name}": float(name == end) for name in ends},
    )


def parts_of(outcomes: Mapping[str, Outcome]) -> dict[str, float]:
    """The parts of a reward from several toolsets: the named parts of each outcome, or its
    reward."""
    parts: dict[str, float] = {}
    for name, outcome in outcomes.items():
        named = {f"{name}.{part}": value for part, value in outcome.reward_parts.items()}
        parts |= named or {name: outcome.reward or 0.0}
    return parts
