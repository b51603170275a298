"""Keys of the recipe's algorithm section that choose the attempts of a step to train on, and how
their length counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import pydantic
from pydantic import Field

from agentevo.algorithms.losses import POLICY_LOSSES

if TYPE_CHECKING:
    from agentevo.config import AlgorithmSection, RunConfig

LENGTH_KEYS = {
    "none": (),
    "soft_overlong": ("length_max", "length_buffer", "length_weight"),
    "linear": ("length_weight",),
    "cosine": ("length_max", "length_rewards"),
    "relative": ("length_weight",),
}
"""Each length_shaping -> the keys that it reads."""


class CollectKeys(pydantic.BaseModel):
    """One half of the keys of AlgorithmSection."""

    model_config = pydantic.ConfigDict(use_attribute_docstrings=True)

    dynamic_sampling: int = Field(default=0, ge=0)
    """Maximum number of sampling rounds per step. Sampling repeats until there are
    trainer.groups_per_step groups whose rewards differ; groups of equal rewards are left out (DAPO,
    arXiv 2503.14476, section 3.2). After the last round, the step trains on the groups that it has.
    0 and 1 never sample again."""
    rlpr_beta: float | None = Field(default=None, gt=0)
    """Leave out groups whose spread of rewards is below this share of the usual spread, a running
    mean over the steps (RLPR, arXiv 2506.18254, uses 0.5). None: no group is left out."""
    rlpr_decay: float | None = Field(default=None, ge=0, le=1)
    """Share of that running mean that each step keeps. Default: 0.99."""
    rlpr_record_from: int | None = Field(default=None, ge=1)
    """First step whose spread is recorded. Default: 6."""
    rlpr_start: int | None = Field(default=None, ge=2)
    """First step at which groups are left out. The first running mean is the average of the spreads
    recorded before it. Default: 11."""
    replay_successes: int = Field(default=0, ge=0)
    """Number of earlier successes at the same task that take the place of failed attempts in a
    group without a success, so that the group teaches something (ARPO, arXiv 2505.16282, uses 1).
    An earlier success keeps the log-probs with which it was sampled, and counts in no success rate.
    0: none. It needs tasks that return, and a ratio to the policy that sampled."""
    replay_per_task: int | None = Field(default=None, ge=1)
    """Size of a task's buffer, from which these successes are drawn: its newest ones that were
    trained on. Default: 8."""
    replay_max_age: int | None = Field(default=None, ge=1)
    """Largest age of a replayed token, in versions, in place of rollout.staleness. Default: 50."""
    length_shaping: Literal["none", "soft_overlong", "linear", "cosine", "relative"] = "none"
    """How the trained tokens n of an attempt change its reward r, after the filters.
    `soft_overlong` (DAPO): r minus up to length_weight, growing over the last length_buffer tokens
    before length_max; `linear`: r - length_weight n; `relative` (Kimi k1.5): r plus or minus up to
    half of length_weight, by where n is between the shortest and the longest of the group; `cosine`
    (arXiv 2502.03373): length_rewards replace r."""
    length_max: int | None = Field(default=None, ge=1)
    """Length, in tokens, that is too long for soft_overlong and cosine. Default:
    sampling.max_new_tokens times agent.max_turns, the most that the environment agent can generate.
    Set it for an agent function, whose turns have no limit."""
    length_buffer: int | None = Field(default=None, ge=1)
    """Length of the stretch before length_max, in tokens, over which the penalty of soft_overlong
    grows. Default: a fifth of length_max."""
    length_weight: float | None = Field(default=None, gt=0)
    """Scale of the change of the reward: the full penalty of soft_overlong; the penalty per token
    of linear; the difference between the shortest and the longest of relative. Default: 1; linear
    has no default."""
    length_rewards: tuple[float, float, float, float, float] | None = None
    """Rewards of cosine, for: a success of length 0, a success just below length_max, a failure of
    length 0, a failure just below length_max, and anything longer. Default: 2, 1, -10, 0, -10."""

    @property
    def replay_buffer_size(self) -> int:
        """`replay_per_task` with its default."""
        return self.replay_per_task or 8

    @property
    def replay_max_age_versions(self) -> int:
        """`replay_max_age` with its default."""
        return self.replay_max_age or 50


def collect_contradictions(config: RunConfig) -> Iterator[str]:
    """Contradictions of these keys with others, as 'what: remedy'."""
    algorithm = config.algorithm
    yield from _rlpr_problems(algorithm)
    yield from _length_problems(config)
    yield from _replay_problems(config)
    if algorithm.dynamic_sampling > 1 and algorithm.keep_groups < 1:
        yield (
            f"algorithm.dynamic_sampling={algorithm.dynamic_sampling} fills the step with groups, "
            "but "
            f"algorithm.keep_groups={algorithm.keep_groups:g} removes most of them: set "
            "dynamic_sampling=0 or keep_groups=1"
        )

    if algorithm.dynamic_sampling > 1 and not algorithm.drop_zero_variance:
        yield (
            f"algorithm.dynamic_sampling={algorithm.dynamic_sampling} leaves out groups of equal "
            "rewards, but "
            "algorithm.drop_zero_variance=false keeps them: set dynamic_sampling=0 or "
            "drop_zero_variance=true"
        )

    if config.trainer.steps > 0 and config.trainer.group_size == 1:
        for key, needs in (
            ("dynamic_sampling", algorithm.dynamic_sampling > 1),
            ("rlpr_beta", algorithm.rlpr_beta is not None),
            ("length_shaping", algorithm.length_shaping == "relative"),
        ):
            if needs:
                yield (
                    f"algorithm.{key}={getattr(algorithm, key)} compares the members of a group, "
                    "but trainer.group_size is 1: "
                    "set it to 2 or more"
                )


def _rlpr_problems(algorithm: AlgorithmSection) -> Iterator[str]:
    keys = ("rlpr_decay", "rlpr_record_from", "rlpr_start")
    if algorithm.rlpr_beta is None:
        yield from [
            f"algorithm.{key} belongs to a filter that is off while algorithm.rlpr_beta is null: "
            f"set rlpr_beta (0.5, say) or remove {key}"
            for key in keys
            if getattr(algorithm, key) is not None
        ]

    record_from = algorithm.rlpr_record_from or 6
    start = algorithm.rlpr_start or 11
    if record_from >= start:
        yield (
            f"algorithm.rlpr_start={start} leaves no step to record, because recording starts at "
            f"algorithm.rlpr_record_from={record_from}: "
            "set rlpr_record_from below rlpr_start"
        )


def _replay_problems(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    count = algorithm.replay_successes
    if not count:
        yield from [
            f"algorithm.{key} belongs to the replay of successes, which is off while "
            f"algorithm.replay_successes is 0: set replay_successes (1, say) or remove {key}"
            for key in ("replay_per_task", "replay_max_age")
            if getattr(algorithm, key) is not None
        ]
        return

    name = f"algorithm.replay_successes={count}"
    if algorithm.preference() is not None:
        return  # refused as a key of other algorithms (unused_keys.py)
    if not algorithm.within_group:
        yield (
            f"{name} gives a group of failures a success to be compared with, but "
            f"algorithm.advantage={algorithm.resolve().advantage} compares no members of a group: "
            "choose grpo, say, or set replay_successes=0"
        )
    elif config.trainer.group_size <= count:
        yield (
            f"{name} leaves no failure in a group of trainer.group_size="
            f"{config.trainer.group_size}: lower replay_successes or raise group_size"
        )

    if count > algorithm.replay_buffer_size:
        yield (
            f"{name} is more than the algorithm.replay_per_task={algorithm.replay_buffer_size} "
            "successes that are kept: raise replay_per_task"
        )

    if config.environment is not None and config.tasks.from_environment is None:
        yield (
            f"{name} replays successes at tasks that return, but the environment makes new tasks "
            "for every step: set tasks.from_environment to a number of tasks (64, say)"
        )
    elif config.tasks.self_play is not None:
        yield (
            f"{name} replays successes at tasks that return, but tasks.self_play makes new tasks "
            "for every step: give tasks.train, or set replay_successes=0"
        )

    if not _weighs_by_sampler(algorithm):
        yield (
            f"{name} trains on tokens of older policies, but the loss has no ratio to the policy "
            "that sampled them: set algorithm.importance=token_tis "
            "algorithm.old_logprobs=recomputed, or choose a loss with a ratio (ppo_clip) and "
            "old_logprobs=rollout"
        )

    for key, is_set in (
        ("algorithm.rlpr_beta", algorithm.rlpr_beta is not None),
        ("trainer.epochs=0", config.trainer.epochs == 0),
    ):
        if is_set:
            yield f"{name} can't be combined with {key}: remove one of them"


WITHOUT_RATIO = ("reinforce", "gpg")
"""Policy losses that do not use the old log-probs."""


def _weighs_by_sampler(algorithm: AlgorithmSection) -> bool:
    """Whether a token's loss depends on the log-prob with which it was sampled."""
    loss = algorithm.resolve().policy_loss
    if algorithm.importance != "none" or POLICY_LOSSES[loss].has_importance_weights:
        return True
    return algorithm.old_logprobs == "rollout" and loss not in WITHOUT_RATIO


def _length_problems(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    shaping = algorithm.length_shaping
    for key in sorted(
        {key for keys in LENGTH_KEYS.values() for key in keys} - set(LENGTH_KEYS[shaping])
    ):
        if getattr(algorithm, key) is not None:
            users = [name for name, keys in LENGTH_KEYS.items() if key in keys]
            yield (
                f"algorithm.{key} has no effect with algorithm.length_shaping={shaping}: remove "
                f"it, or set length_shaping={' or '.join(users)}"
            )

    if shaping == "linear" and algorithm.length_weight is None:
        yield (
            "algorithm.length_shaping=linear needs algorithm.length_weight: give the reward that "
            "a token costs (0.001, say)"
        )

    if (
        shaping == "soft_overlong"
        and algorithm.length_buffer is not None
        and algorithm.length_buffer > config.length_max
    ):
        yield (
            f"algorithm.length_buffer={algorithm.length_buffer} is more than the "
            f"{config.length_max} tokens of algorithm.length_max "
            "(default: sampling.max_new_tokens times agent.max_turns): lower length_buffer or "
            "raise length_max"
        )

    if shaping == "relative" and "baseline_rewards" in algorithm.needs:
        yield (
            "algorithm.length_shaping=relative compares lengths within a group, but the "
            "greedy attempt of "
            f"algorithm.advantage={algorithm.resolve().advantage} is not in the group: choose "
            "soft_overlong, linear or cosine"
        )
