"""The advantages of a committed step, recomputed from its plan by the trainer's own functions,
because no store keeps them.

They are exact if the advantage is a function of rewards, groups and turns. Advantages that need a
model (a critic, a reference in the reward, process rewards) or a user's function are not
recomputed. `_why_not` returns the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from agentevo.errors import AgentEvoError, TrainingError
from agentevo.store.records import StepRecord
from agentevo.store.store import Store
from agentevo.types import Sample, Trajectory

JUDGES = frozenset({"llm_judge", "agentcpm", "ruler"})
"""Rewards that call remote models even if the recipe names none."""
KNOWN_NEEDS = frozenset({"baseline_rewards", "reward_parts", "turn_observations", "turn_parents"})


MAX_CELLS = 50_000_000
"""The limit on rows times tokens of the longest row for which advantages are computed (three arrays
of 8 bytes each)."""


ROUNDING = 1e-9
"""If a reward is this close to its group's mean, its advantage is 0."""


class Rule(NamedTuple):
    """How a run computes its advantages."""

    section: Any
    """The AlgorithmSection."""
    advantage: Any
    """The bound estimator."""


def rule_of(config: dict[str, Any]) -> Rule | str:
    """The rule of a run's config.yaml, or why its advantages can't be recomputed."""
    from agentevo.algorithms.estimators import bind_advantage
    from agentevo.config import AlgorithmSection

    if config.get("agents"):
        return "each of several agents has its own algorithm"

    try:
        section = AlgorithmSection.model_validate(config.get("algorithm") or {})
        algorithm = section.resolve()
        if section.advantage_function is not None:
            name = section.advantage_function
            return f"algorithm.advantage_function={name} is a function of the run's own"
        advantage = bind_advantage(algorithm.advantage, algorithm.advantage_hyper)
    except (AgentEvoError, ValueError, TypeError) as error:
        return f"its algorithm can't be read: {str(error).splitlines()[0][:200]}"

    why = _why_not(section, advantage)
    return why or Rule(section, advantage)


def _why_not(section: Any, advantage: Any) -> str | None:
    if section.credit is not None:
        return f"algorithm.credit={section.credit} is a function of the run's own"
    if missing := sorted(set(advantage.needs) - KNOWN_NEEDS):
        return f"advantage {advantage.name} needs {', '.join(missing)}, which no store keeps"
    if section.kl_in == "reward" and section.kl_coef:
        return "the reward had a KL term, which no store keeps"
    if section.train_observations:
        return "what the policy read was trained, too, with log-probs that no store keeps"
    return None


async def read_stored(store: Store, record: StepRecord) -> list[Trajectory]:
    """The attempts that a committed step trained on, without their texts. Raises AgentEvoError if
    its plan or an attempt can't be read."""
    from agentevo.training.batching.step_plan import StepPlan

    plan = StepPlan.of(record.step, record.record)
    rows = store.trajectories(trained_step=record.step)
    trained = [without_words(row.trajectory) async for row in rows]
    return trained + [without_words(await store.trajectory(name)) for name in plan.replayed]


def without_words(trajectory: Trajectory) -> Trajectory:
    """The trajectory without its texts. Advantages do not need them, and all attempts of a step are
    in memory at the same time."""
    turns = [replace(turn, messages=[], tools="") for turn in trajectory.turns]
    return replace(trajectory, turns=turns, files={}, remote_turns=[])


def step_samples(
    step: int, record: dict[str, Any], stored: Sequence[Trajectory], rule: Rule
) -> list[Sample]:
    """The samples of a committed step with their advantages, before tokens that are too old are
    left out. Raises AgentEvoError if the plan and the store do not agree."""
    from agentevo.training.batching.samples import advantages_of, trajectory_rows
    from agentevo.training.batching.step_plan import StepPlan

    plan = StepPlan.of(step, record)
    by_id = {trajectory.id: trajectory for trajectory in stored}
    final = [plan.final(by_id[name]) for name in plan.trained_ids if name in by_id]
    rows = [row for trajectory in final for row in trajectory_rows(trajectory)]
    if len(rows) * max((len(row.turns) for row in rows), default=0) > MAX_CELLS:
        raise TrainingError(f"step {step} is too large to recompute its advantages here")

    return advantages_of(
        rows,
        rule.advantage,
        baselines=plan.baselines,
        weights=rule.section.reward_weights,
    )


def largest(samples: Sequence[Sample]) -> dict[str, float]:
    """Maps an id to the token advantage that is farthest from 0, with its sign."""
    largest_by_id: dict[str, float] = {}
    for sample in samples:
        advantages = sample.advantages
        if len(advantages):
            value = float(advantages[abs(advantages).argmax()])
            if abs(value) >= abs(largest_by_id.get(sample.trajectory_id, 0.0)):
                largest_by_id[sample.trajectory_id] = value if abs(value) > ROUNDING else 0.0

    return largest_by_id


def config_of(folder: Path | None) -> dict[str, Any]:
    """The config.yaml of a run as written. Empty for a store without a run's folder."""
    from agentevo.config import sources

    if folder is None or not (folder / "config.yaml").is_file():
        return {}
    tree = sources.read_yaml(folder / "config.yaml")
    return dict(tree) if isinstance(tree, dict) else {}


def rewards_of(config: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    """Maps the name of each reward of a recipe to its weight, and to whether remote models
    judge."""
    rewards_by_name: dict[str, tuple[float, bool]] = {}
    rewards = config.get("rewards")
    for entry in rewards if isinstance(rewards, list) else []:
        of = {"name": entry} if isinstance(entry, str) else entry
        if isinstance(of, dict) and isinstance(of.get("name"), str):
            weight = of.get("weight", 1.0)
            is_judge = "models" in of or of["name"] in JUDGES
            if isinstance(weight, int | float) and not isinstance(weight, bool):
                rewards_by_name[str(of.get("label") or of["name"])] = (float(weight), is_judge)

    return rewards_by_name
