"""What the findings of a run need to know of its recipe, its attempts and its evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentevo.config import AlgorithmSection, RunConfig
from agentevo.config.named_agents import by_rank
from agentevo.observability.attempt_facts import AttemptFacts, facts_of
from agentevo.observability.findings import Recipe
from agentevo.observability.hacking import Estimate
from agentevo.observability.metrics import read_evaluations
from agentevo.observability.remedies import ADVISED, remedies_of
from agentevo.rewards.judging import JudgeOptions
from agentevo.rollout.sampler import BASELINE
from agentevo.runs.folder.creation import RunCommand
from agentevo.types import Trajectory


def recipe_of(config: RunConfig, command: RunCommand = "train") -> Recipe:
    """The recipe as findings see it."""
    is_supervised = command == "sft"
    trains = config.trainer.epochs > 0 and config.trainer.steps > 0
    return Recipe(
        remedies=remedies_of(config.model_dump(mode="json"), _refused_keys(config.algorithm)),
        learns_from_reward=trains and not config.distillation.is_alone,
        within_group=config.algorithm.within_group,
        max_grad_norm=config.sft.max_grad_norm if is_supervised else config.trainer.max_grad_norm,
        gradient_key="sft.max_grad_norm" if is_supervised else "trainer.max_grad_norm",
        cancels_old=config.rollout.policy == "cancel",
        scorers=tuple(reward.title for reward in config.rewards),
        is_judged=bool(config.rewards) and isinstance(config.rewards[0], JudgeOptions),
        plays_fixed_tasks=bool(config.tasks.train or config.tasks.from_environment)
        and config.tasks.curriculum is None
        and not config.tasks.stages,
    )


def _refused_keys(section: AlgorithmSection) -> set[str]:
    """The keys of ADVISED that the recipe's algorithm does not use."""
    given = section.model_dump(exclude_unset=True)
    refused = set()
    for key, value in ADVISED.items():
        try:
            AlgorithmSection.model_validate({**given, key: value})
        except ValueError:
            refused.add(key)

    return refused


def facts_of_step(
    config: RunConfig,
    sampled: Sequence[Trajectory],
    trained: Sequence[Trajectory],
    dropped: Mapping[str, str],
) -> AttemptFacts | None:
    """The facts of a step's attempts, without greedy ones; with several agents, those of the main
    agent. None if there are none. `trained`: with final rewards. `dropped`: attempt -> why it is
    not trained on."""
    agents = by_rank(config)
    attempts = [
        t for t in sampled if dropped.get(t.id) != BASELINE and (not agents or t.agent == agents[0])
    ]
    return facts_of(attempts, {t.id: t.reward for t in trained}) if attempts else None


def held_out_success(metrics: Mapping[str, float]) -> Estimate | None:
    """The success of an evaluation and the variance of this mean (Agresti & Coull 1998, which does
    not take 0 of 2 tasks for a certainty); None if the run plays no held-out task."""
    evaluated = read_evaluations(metrics)
    if len(evaluated) != 1:
        return None

    (result,) = evaluated
    success = result.success_sampled if result.success_greedy is None else result.success_greedy
    if success is None or not result.n:
        return None
    smoothed = (success * result.n + 2.0) / (result.n + 4.0)
    return success, smoothed * (1.0 - smoothed) / (result.n + 4.0)
