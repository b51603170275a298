"""Valid values of a recipe that contradict one another: contradictions among several sections, and
those that the modules of single sections report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from agentevo.algorithms.estimators import ADVANTAGES
from agentevo.algorithms.presets import POLICY_PRESETS, PREFERENCE_PRESETS
from agentevo.config.algorithm import algorithm_contradictions
from agentevo.config.collect import collect_contradictions
from agentevo.config.distillation import distillation_contradictions
from agentevo.config.memory import memory_contradictions
from agentevo.config.model import TinyModel
from agentevo.config.named_agents import named_agent_contradictions
from agentevo.config.parallel import parallel_contradictions
from agentevo.config.remote_models import name_problems, unknown_helpers
from agentevo.config.rewards import penalty_contradictions
from agentevo.config.rollout import rollout_contradictions
from agentevo.config.routing import routing_contradictions
from agentevo.config.unused_keys import keys_off_default

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig


def recipe_contradictions(config: RunConfig) -> Iterator[str]:
    """Valid values that contradict one another, as 'what: remedy'."""
    yield from preference_contradictions(config)
    if config.algorithm.preference() is None:
        yield from algorithm_contradictions(config.algorithm)

    yield from _of_the_training(config)
    yield from collect_contradictions(config)
    yield from penalty_contradictions(config)
    yield from memory_contradictions(config)
    yield from rollout_contradictions(config)
    yield from _of_the_advantage(config)
    yield from distillation_contradictions(config)
    yield from routing_contradictions(config)
    yield from parallel_contradictions(config)
    yield from named_agent_contradictions(config)
    if config.run.overwrite and Path.cwd().is_relative_to(config.run_dir.resolve()):
        yield (
            f"run.overwrite would delete {config.run_dir.resolve()}, which contains the current "
            "folder: give the run its own folder with run.dir"
        )

    if config.trainer.minibatches > config.trainer.groups_per_step:
        yield (
            f"trainer.minibatches={config.trainer.minibatches} is more than "
            f"trainer.groups_per_step={config.trainer.groups_per_step}: "
            "a group is never split, so set trainer.minibatches no higher than "
            "trainer.groups_per_step (minibatches is a number of minibatches: for verl's "
            "ppo_mini_batch_size, a size, set trainer.groups_per_step / ppo_mini_batch_size)"
        )

    step_s = getattr(config.agent, "step_timeout_s", None)
    page_s = getattr(config.environment, "deadline_s", None)
    if step_s is not None and page_s is not None and step_s <= page_s:
        yield (
            f"agent.step_timeout_s={step_s:g} ends a step before "
            f"environment.deadline_s={page_s:g} closes a page that hangs: raise "
            "agent.step_timeout_s, or lower environment.deadline_s"
        )

    if config.cold_start.episodes and config.environment is None:
        yield (
            f"cold_start.episodes={config.cold_start.episodes} needs an environment's solver, but "
            "the recipe has no environment: set cold_start.episodes=0, and train on "
            "conversations with `agentevo sft` (data.train)"
        )

    yield from _of_the_model(config)
    yield from name_problems(list(config.remote_models), config.model.name)
    yield from unknown_helpers(config.remote_models, config.agent)


def _of_the_training(config: RunConfig) -> Iterator[str]:
    """Contradictions of the sampling, the groups and the algorithm that trains on them."""
    sampling = config.sampling
    trainer = config.trainer
    if trainer.steps > 0 and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0):
        yield (
            "sampling.top_p, top_k and min_p truncate the distribution, but the trainer's "
            "importance ratio assumes the full one: "
            "set top_p=1 top_k=0 min_p=0 (or trainer.steps=0 to evaluate only)"
        )

    if trainer.optimizer_from is not None and (config.agents or config.cold_start.episodes):
        yield (
            "trainer.optimizer_from continues the optimizer of one policy: leave out agents and "
            "cold_start"
        )

    if trainer.epochs == 0 and config.data.given:
        yield (
            "trainer.epochs=0 only samples, but data.pairs or data.pairs_from is set, which is for "
            "training: set trainer.epochs=1, or remove the data key"
        )

    if trainer.steps > 0 and trainer.group_size == 1 and not config.data.given:
        if config.algorithm.within_group and not config.distillation.is_alone:
            yield (
                f"algorithm.name={config.algorithm.name} compares the members of a group, but "
                "trainer.group_size is 1: set it to 2 or more"
            )
        elif config.algorithm.keep_groups < 1:
            yield (
                "algorithm.keep_groups ranks groups by their spread of rewards, but "
                "trainer.group_size is 1: set it to 2 or more"
            )


def _of_the_advantage(config: RunConfig) -> Iterator[str]:
    """Contradictions of the chosen advantage with sections that it does not use and with rewards
    that it does not support."""
    needs = config.algorithm.needs
    for key, section, need in (
        ("critic", config.critic, "values"),
        ("process_reward", config.process_reward, "process_rewards"),
    ):
        if need not in needs and section != type(section)():
            yield (
                f"{key} is set, but algorithm.name={config.algorithm.name} does not use it: remove "
                f"it, or choose {_users(need)}"
            )

    if "values" in needs and 0 < config.trainer.steps <= config.critic.pretrain_steps:
        yield (
            f"critic.pretrain_steps={config.critic.pretrain_steps} leaves no step of "
            f"trainer.steps={config.trainer.steps} for the policy: "
            "raise trainer.steps or lower critic.pretrain_steps"
        )

    penalty = getattr(config.agent, "format_penalty", 0.0) if config.environment else 0.0
    if penalty > 0 and divides_by_mean_reward(vars(config.algorithm)):
        yield (
            "algorithm.advantage=maxrl divides by the mean reward, so no reward may be below 0, "
            f"but agent.format_penalty is {penalty:g}: set it to 0"
        )


def divides_by_mean_reward(algorithm: object) -> bool:
    """Whether a section `algorithm`, as a mapping, uses MaxRL's advantage, which needs rewards of
    at least 0."""
    return isinstance(algorithm, Mapping) and "maxrl" in (
        algorithm.get("advantage"),
        algorithm.get("name"),
    )


def _users(need: str) -> str:
    """The presets whose advantage needs this input."""
    return " or ".join(
        name
        for name, preset in POLICY_PRESETS.items()
        if need in ADVANTAGES[preset.parts["advantage"]].needs
    )


def _of_the_model(config: RunConfig) -> Iterator[str]:
    """Contradictions of the model, its adapters and its limits of length."""
    sampling = config.sampling
    tiny = config.model.tiny
    if config.model.name != "tiny" and tiny != TinyModel():
        yield (
            f"model.tiny is set but model.name is {config.model.name!r}: set model.name=tiny or "
            "remove model.tiny"
        )

    if config.model.name == "tiny" and sampling.max_new_tokens >= tiny.context_length:
        yield (
            f"sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in "
            f"model.tiny.context_length={tiny.context_length}: lower the former or raise the latter"
        )

    if config.algorithm.reference == "base" and not config.model.lora.enabled:
        yield (
            "algorithm.reference=base is the policy with its adapters off, but model.lora has "
            "none: set model.lora.rank=16, or "
            "reference=frozen"
        )

    supervised = config.cold_start.episodes or config.data.taught
    if config.model.lora.dropout > 0 and not supervised:
        yield (
            f"model.lora.dropout={config.model.lora.dropout:g} is for supervised training (RL "
            "trains on the log-probs that tokens were "
            "sampled with), but this run has none: set it to 0, or set cold_start.episodes, or "
            "data for `agentevo sft`"
        )

    if (
        config.engine.kv_cache_tokens is not None
        and sampling.max_new_tokens > config.engine.kv_cache_tokens
    ):
        yield (
            f"sampling.max_new_tokens={sampling.max_new_tokens} does not fit "
            f"engine.kv_cache_tokens={config.engine.kv_cache_tokens}: "
            "lower the former or raise the latter"
        )


def preference_contradictions(config: RunConfig) -> Iterator[str]:
    """Contradictions of the algorithm section with other sections, as 'what: remedy'."""
    section = config.algorithm
    data = config.data
    preference = section.preference()

    if data.pairs is not None and data.pairs_from is not None:
        yield (
            "data.pairs and data.pairs_from both set the training data: give only one of the two"
        )

    if preference is None:
        if data.given:
            yield (
                "data.pairs and data.pairs_from need a preference loss, and "
                f"algorithm.name={section.name} has none: "
                f"choose one of {', '.join(PREFERENCE_PRESETS)}, or remove them"
            )
        return

    if config.reward_model.name is not None:
        yield (
            f"reward_model.name scores single tokens, which algorithm.name={section.name} does "
            "not use: remove it"
        )

    if preference.pairs == "demonstrations" and data.pairs_from is not None:
        yield (
            "algorithm.pairs=demonstrations lets the environment's solver play sampled tasks, "
            "not stored groups: set algorithm.pairs=best_worst, or remove data.pairs_from"
        )

    idle = (
        []
        if data.pairs is None
        else keys_off_default(section, ("pairs", "pairs_per_group", "pair_margin"))
    )
    if idle:
        yield (
            f"data.pairs sets the pairs, so algorithm.{', algorithm.'.join(idle)} does nothing: "
            "remove it"
        )

    if preference.pairs == "demonstrations" and not data.given and config.environment is None:
        yield (
            "algorithm.pairs=demonstrations needs an environment with a solver: set "
            "algorithm.pairs=best_worst for an agent function"
        )
