"""How far sampling may run ahead of training, and how the two share machines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from agentevo.config.curriculum import curriculum_contradictions
from agentevo.config.section import Section
from agentevo.config.self_play import self_play_contradictions
from agentevo.config.task_stages import stage_contradictions

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig


class WeightsSection(Section):
    """How new weights lie in files, for engines in other processes (docs/asynchronous.md)."""

    url: str | None = None
    """Where they lie, for engines that share no folder with the trainer: an address that fsspec
    knows, such as `s3://BUCKET/FOLDER`, of this run alone. Credentials come from the environment
    (docs/asynchronous.md). Default: RUN/weights."""
    delta: bool = False
    """Publish what changed since the version before, bit for bit, where that is smaller than all of
    it. For bfloat16 (model.dtype). Trainer and engines each hold one more copy of the weights, in
    main memory; processes that share a model (trainer.parallel) one copy together."""
    full_every: int = Field(default=16, ge=2)
    """With delta: at most so many versions from one in full to the next. Who is late reads all
    since the last one in full."""

    @field_validator("url")
    @classmethod
    def _without_password(cls, url: str | None) -> str | None:
        if url is None:
            return None

        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s]+", url):
            raise ValueError(
                "is no address: use s3://BUCKET/FOLDER, gs://, az:// or file:///FOLDER"
            )

        if re.match(r"[^/]*//[^/]*:[^/]*@", url) or "?" in url:
            raise ValueError(
                "has a password or options, which every copy of the recipe would have: leave them "
                "out, and give the credentials in the environment of trainer and engines"
            )

        return url


class RolloutSection(Section):
    """Sampling beside training (docs/asynchronous.md)."""

    staleness: int = Field(default=0, ge=0)
    """Most versions that a token may be behind the trainer at the moment it is trained on. 0
    samples and trains in turn."""
    policy: Literal["wait", "cancel", "mask", "correct"] = "wait"
    """What keeps that bound. `wait`: groups are trained on in the order their tasks began,
    stragglers are waited for; nothing is lost; in one process the engine keeps `staleness` copies
    of what is trained. The others take groups as they finish. `cancel`: attempts that became too
    old are broken off. `mask`: tokens that became too old are not trained on, their reward stays in
    the group's baseline. `correct`: as mask, and younger ones are weighed by importance (needs
    algorithm.importance)."""
    in_flight: Literal["continue", "finish"] = "continue"
    """Requests that are being completed when new weights come: go on under the new ones, or are
    finished under the old ones first."""
    sharing: Literal["turns", "overlap"] = "turns"
    """Sampler and trainer in one process: the engine sleeps, its key-value memory given back, while
    the trainer computes (`turns`), or has a copy of the weights and goes on (`overlap`). Tools are
    waited for in both."""
    transport: str | None = None
    """How new weights reach the engines: `shared` (the engine computes with the trainer's own),
    `copy` (it is handed them, in one process), `folder` (files in the run's folder, for engines in
    other processes), `object_store` (files under weights.url), `broadcast` (over a process group,
    NCCL or gloo, to engines in other processes that see the run's folder: docs/asynchronous.md), or
    one that another package registers (docs/engines.md). Default: what the other keys ask for."""
    weights: WeightsSection = WeightsSection()
    """How they lie in files, for engines in other processes."""
    samplers: int = Field(default=0, ge=0, le=1000)
    """Sampler processes that `agentevo train` starts. 0: everything is one process."""
    engines: int = Field(default=1, ge=1, le=1000)
    """Engine processes beside them."""
    engine_urls: tuple[str, ...] = ()
    """Engines on machines that do not see the run's folder, as `agentevo serve` printed them there
    (https://HOST:PORT#sha256=...), beside those that the folder knows. Needs engine_secret, and a
    transport that reaches them (docs/engines.md)."""
    engine_secret: str | None = None
    """${env:NAME}: the variable with the secret of all engines and samplers, 64 hexadecimal digits,
    in place of the file RUN/engines/secret."""
    max_attempts: int = Field(default=256, ge=1)
    """Most attempts that one sampler has under way."""
    extra_attempts: int = Field(default=0, ge=0)
    """Attempts begun beside trainer.group_size; when that many have completed, the others are
    broken off. Favours short attempts."""
    lease_s: float = Field(default=30.0, gt=0)
    """A sampler that does not renew its claim on a task for so long is taken for dead, in seconds.
    It renews every third of this."""
    poll_s: float = Field(default=0.1, gt=0)
    """How often to look for finished groups, new weights and engines, in seconds."""
    keep_versions: int = Field(default=4, ge=1)
    """Published weights that stay on disk, with engines as processes, and whatever they build
    on."""


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
            "rollout.engine_urls are engines that do not see the run's folder, nor its secret: set "
            "rollout.engine_secret='${env:NAME}' for them and for this run"
        )

    if section.policy == "correct" and not has_importance:
        yield (
            "rollout.policy=correct weighs stale tokens by importance, but algorithm.importance "
            "is none: set "
            "algorithm.importance=token_tis algorithm.old_logprobs=recomputed, or "
            "rollout.policy=mask"
        )

    if section.weights.url is not None and section.transport not in (None, "object_store"):
        yield (
            f"rollout.weights.url is for rollout.transport=object_store, not {section.transport}: "
            "leave one of them out"
        )

    if section.weights.delta and section.transport == "broadcast":
        yield (
            "rollout.weights.delta is for weights in files, and rollout.transport=broadcast sends "
            "all of them to whoever asks: leave one of them out"
        )

    if section.weights.delta and config.model.dtype != "bfloat16":
        yield (
            f"rollout.weights.delta publishes what changed, and in {config.model.dtype} every "
            "weight changes in every step: set model.dtype=bfloat16, or "
            "rollout.weights.delta=false"
        )

    if is_async and config.profile.enabled:
        yield (
            "profile follows one process that samples and trains in turn: set "
            "rollout.staleness=0 rollout.samplers=0, or profile=false"
        )

    if is_async and config.data.given:
        yield (
            "rollout.staleness and rollout.samplers are for sampled attempts, and data gives "
            "what is trained on: set both to 0"
        )

    if is_async and section.policy == "wait" and config.algorithm.dynamic_sampling > 1:
        yield (
            "rollout.policy=wait trains on the tasks of each step in order, "
            "algorithm.dynamic_sampling needs further ones: set "
            "rollout.policy=mask, or algorithm.dynamic_sampling=1"
        )
