"""How far sampling may run ahead of training, and how the two share machines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from agentevo.config.self_play import self_play_contradictions
from agentevo.config.tasks import curriculum_contradictions, stage_contradictions
from agentevo.runtime.section import Section

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig


class WeightsSection(Section):
    """How new weights are stored in files, for engines in other processes
    (docs/asynchronous.md)."""

    url: str | None = None
    """The storage, for engines that share no folder with the trainer: a URL that fsspec supports,
    such as `s3://BUCKET/FOLDER`, used by this run only. Credentials come from the environment
    (docs/asynchronous.md). Default: RUN/weights."""
    delta: bool = False
    """Publish the exact change since the previous version if that is smaller than the full weights.
    For bfloat16 (model.dtype). Trainer and engines each keep one more copy of the weights in main
    memory; processes that share a model (trainer.parallel) keep one copy together."""
    full_every: int = Field(default=16, ge=2)
    """With delta: publish the full weights at least once in this many versions. A process that is
    behind reads all versions since the last full one."""

    @field_validator("url")
    @classmethod
    def _without_password(cls, url: str | None) -> str | None:
        if url is None:
            return None

        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s]+", url):
            raise ValueError("is not a URL: use s3://BUCKET/FOLDER, gs://, az:// or file:///FOLDER")

        if re.match(r"[^/]*//[^/]*:[^/]*@", url) or "?" in url:
            raise ValueError(
                "has a password or options, and every copy of the recipe would contain them: "
                "remove them, and set the credentials in the environment of the trainer and the "
                "engines"
            )

        return url


class RolloutSection(Section):
    """Sampling in parallel with training (docs/asynchronous.md)."""

    staleness: int = Field(default=0, ge=0)
    """Maximum number of versions that a token can be behind the trainer when it is trained on. 0
    alternates sampling and training."""
    policy: Literal["wait", "cancel", "mask", "correct"] = "wait"
    """How that bound is kept. `wait`: groups are trained on in the order in which their tasks
    began, and the trainer waits for slow ones; no attempt is lost; in one process the engine keeps
    `staleness` copies of the trained weights. The other policies take groups as they finish.
    `cancel`: attempts that became too old are stopped. `mask`: tokens that became too old are not
    trained on, and their reward stays in the group's baseline. `correct`: as mask, and tokens
    within the bound are weighted by importance (needs algorithm.importance)."""
    in_flight: Literal["continue", "finish"] = "continue"
    """What happens to running requests when new weights arrive: they continue with the new weights,
    or finish with the old weights first."""
    sharing: Literal["turns", "overlap"] = "turns"
    """Sampler and trainer in one process: the engine sleeps and frees its key-value memory while
    the trainer computes (`turns`), or keeps a copy of the weights and continues (`overlap`). With
    either, tools and environments continue to run."""
    transport: str | None = None
    """How new weights reach the engines: `shared` (the engine computes with the trainer's weights),
    `copy` (the engine gets a copy, in one process), `folder` (files in the run's folder, for
    engines in other processes), `object_store` (files under weights.url), `broadcast` (over a
    process group, NCCL or gloo, to engines in other processes that see the run's folder:
    docs/asynchronous.md), or a transport that another package registers (docs/engines.md). Default:
    follows from the other keys."""
    weights: WeightsSection = WeightsSection()
    """How weights are stored in files, for engines in other processes."""
    samplers: int = Field(default=0, ge=0, le=1000)
    """Sampler processes that `agentevo train` starts. 0: everything is one process."""
    engines: int = Field(default=1, ge=1, le=1000)
    """Engine processes in addition to the samplers."""
    engine_urls: tuple[str, ...] = ()
    """URLs of engines on machines that do not see the run's folder, as `agentevo serve` printed
    them there (https://HOST:PORT#sha256=...). They are used in addition to the engines in the run's
    folder. Needs engine_secret, and a transport that reaches them (docs/engines.md)."""
    engine_secret: str | None = None
    """${env:NAME}: the environment variable with the secret of all engines and samplers, 64
    hexadecimal digits. It replaces the file RUN/engines/secret."""
    max_attempts: int = Field(default=256, ge=1)
    """Maximum number of concurrent attempts of one sampler."""
    extra_attempts: int = Field(default=0, ge=0)
    """Attempts started in addition to trainer.group_size. When trainer.group_size attempts have
    completed, the others are stopped. Favours short attempts."""
    lease_s: float = Field(default=30.0, gt=0)
    """A sampler counts as dead if it does not renew its claim on a task for this time, in seconds.
    It renews after every third of this time."""
    poll_s: float = Field(default=0.1, gt=0)
    """Interval of the checks for finished groups, new weights and engines, in seconds."""
    keep_versions: int = Field(default=4, ge=1)
    """With engines as processes: number of published versions of the weights that stay on disk,
    with the versions that they depend on."""


def rollout_contradictions(config: RunConfig) -> Iterator[str]:
    """Values that contradict those of other sections, as 'what: remedy'."""
    section = config.rollout
    yield from stage_contradictions(config)
    yield from curriculum_contradictions(config)
    yield from self_play_contradictions(config)
    is_async = section.staleness > 0 or section.samplers > 0
    has_importance = (
        config.algorithm.importance != "none"
        or config.algorithm.name == "decoupled_ppo"
        or config.algorithm.policy_loss == "decoupled_ppo"
    )

    if section.engine_urls and section.engine_secret is None:
        yield (
            "rollout.engine_urls: these engines do not see the run's folder or its secret: set "
            "rollout.engine_secret='${env:NAME}' for them and for this run"
        )

    if section.policy == "correct" and not has_importance:
        yield (
            "rollout.policy=correct weights stale tokens by importance, but algorithm.importance "
            "is none: set algorithm.importance=token_tis algorithm.old_logprobs=recomputed, or "
            "rollout.policy=mask"
        )

    if section.weights.url is not None and section.transport not in (None, "object_store"):
        yield (
            "rollout.weights.url works only with rollout.transport=object_store, not "
            f"{section.transport}: remove one of the two"
        )

    if section.weights.delta and section.transport == "broadcast":
        yield (
            "rollout.weights.delta is for weights in files, and rollout.transport=broadcast "
            "always sends the full weights: remove one of the two"
        )

    if section.weights.delta and config.model.dtype != "bfloat16":
        yield (
            f"rollout.weights.delta publishes changed weights, and in {config.model.dtype} every "
            "weight changes in every step: set model.dtype=bfloat16, or "
            "rollout.weights.delta=false"
        )

    if is_async and config.profile.enabled:
        yield (
            "profile needs one process that alternates sampling and training: set "
            "rollout.staleness=0 rollout.samplers=0, or profile=false"
        )

    if is_async and config.data.given:
        yield (
            "rollout.staleness and rollout.samplers are for sampled attempts, and this recipe "
            "trains on given data: set both to 0"
        )

    if is_async and section.policy == "wait" and config.algorithm.dynamic_sampling > 1:
        yield (
            "rollout.policy=wait trains on the tasks of each step in order, but "
            "algorithm.dynamic_sampling needs more tasks: set rollout.policy=mask, or "
            "algorithm.dynamic_sampling=1"
        )
