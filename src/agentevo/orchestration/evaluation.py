"""How good the policy is on held-out tasks, beside a random and an optimal player under the same
limits."""

from __future__ import annotations

from statistics import fmean

from agentevo.environments import mean_baselines
from agentevo.orchestration.components import Components
from agentevo.types import Baselines, Trajectory


def reference_players(parts: Components) -> Baselines | None:
    """Mean success of the two reference players on the held-out tasks; None for a user's own
    agent."""
    config = parts.config
    if config.environment is None:
        return None
    environment = config.environment.model_copy(update={"max_actions": config.max_actions})
    return mean_baselines(
        environment, [task.seed for task in parts.tasks.held_out()], config.max_actions
    )


async def evaluate(
    parts: Components, step: int, *, samples: int, players: Baselines | None, label: str = ""
) -> tuple[dict[str, float], int]:
    """One greedy attempt per held-out task, and `samples` sampled ones: `val-core/...` metrics and
    the number of generated tokens. A failed attempt counts as no success, and has no reward: that
    is the mean over completed attempts, and left out where there is none. `val-aux/.../failed` is
    the share of failed ones.

    `label` begins the trajectories' own labels: needed where one step is evaluated twice.
    """
    config = parts.config
    name = config.environment.type if config.environment is not None else "agent"
    tasks = parts.tasks.held_out()
    metrics: dict[str, float] = {}
    tokens = 0
    passes = [("greedy", 1, 0.0)] + (
        [("sampled", samples, config.evaluation.temperature)] if samples else []
    )
    for decoding, attempts, temperature in passes:
        trajectories: list[Trajectory] = await parts.sampler.sample(
            tasks,
            attempts=attempts,
            temperature=temperature,
            split="eval",
            step=step,
            label=label + decoding,
        )
        tokens += sum(t.num_completion_tokens() for t in trajectories)
        metrics[f"val-core/{name}/success/{decoding}"] = fmean(
            t.success and t.status == "completed" for t in trajectories
        )
        if rewards := [t.reward for t in trajectories if t.status == "completed"]:
            metrics[f"val-core/{name}/reward/{decoding}"] = fmean(rewards)
        metrics[f"val-aux/{name}/failed/{decoding}"] = fmean(
            t.status == "failed" for t in trajectories
        )
        metrics[f"val-aux/{name}/num_turns/{decoding}"] = fmean(len(t.turns) for t in trajectories)
    metrics[f"val-core/{name}/n"] = float(len(tasks))
    for player, value in (
        (("random", players.random), ("optimal", players.optimal)) if players is not None else ()
    ):
        if value is not None:
            metrics[f"val-core/{name}/{player}"] = value
    return metrics, tokens


def headline(metrics: dict[str, float]) -> float:
    """The greedy success rate among an evaluation's metrics."""
    return next(value for key, value in metrics.items() if key.endswith("/success/greedy"))
