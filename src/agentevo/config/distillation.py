"""The section `distillation`: teachers whose log-probs of the sampled tokens train the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from agentevo.config.field_words import suggest_nearest
from agentevo.runtime.section import Section

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig

OTHER_SOURCES = "default"
"""The key of the teacher for tasks whose source has no teacher of its own."""


class DistillationSection(Section):
    """On-policy distillation: a teacher says how likely each sampled token is, and each token's
    advantage is log p_teacher - log p_policy, an estimate of minus the reverse KL. The teacher has
    the policy's tokenizer and any architecture, and is never trained. Off without teachers."""

    teachers: dict[str, str] = Field(default_factory=dict)
    """Source of tasks -> teacher, a name in remote_models. A task's source is its `data_source`
    (a column of its row), or else its environment. `default`: the teacher of all other sources."""
    weight: float = Field(default=1.0, gt=0)
    """Weight of the teacher's advantage."""
    reward_weight: float = Field(default=0.0, ge=0)
    """Weight of the algorithm's advantage, which comes from rewards and is added to the teacher's.
    With 0, the rewards are only reported."""
    clip: float | None = Field(default=None, gt=0)
    """Largest absolute value of a token's log-ratio, in nats. A token that the teacher rules out
    otherwise outweighs all others. null does not clip."""

    center: bool = False
    """Subtract the mean over the step's trained tokens from the teacher's advantages."""

    @property
    def enabled(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.teachers)

    @property
    def is_alone(self) -> bool:
        """Whether the teacher alone determines the advantages."""
        return self.enabled and self.reward_weight == 0

    def teacher_of(self, data_source: Any, environment: str | None) -> str | None:
        """The teacher of a task with this `data_source` and environment; None if it has none. A
        `data_source` that is no text is nobody's."""
        source = data_source if isinstance(data_source, str) else None
        names = (source, environment, OTHER_SOURCES)
        return next((self.teachers[name] for name in names if name in self.teachers), None)

    @property
    def rule(self) -> str:
        """What the section adds to the credit rule in a step's record; empty if it is off."""
        if not self.enabled:
            return ""

        names = ", ".join(f"{source}: {name}" for source, name in self.teachers.items())
        clip = "" if self.clip is None else f", clip={self.clip}"
        center = ", center" if self.center else ""
        return (
            f"distillation ({names}; weight={self.weight}, reward_weight={self.reward_weight}"
            f"{clip}{center})"
        )


def distillation_contradictions(config: RunConfig) -> Iterator[str]:
    """Contradictions of the section with others, as 'what: remedy'."""
    section = config.distillation
    if not section.enabled:
        if section != DistillationSection():
            yield (
                "distillation has no teacher, so its other keys do nothing: set "
                "distillation.teachers={default: NAME} with a name of remote_models"
            )
        return

    yield from _teacher_problems(section, config)
    yield from _unsupported_keys(config)
    algorithm = config.algorithm
    for key, is_set in (
        ("dynamic_sampling", algorithm.dynamic_sampling > 1),
        ("keep_groups", algorithm.keep_groups < 1),
        ("rlpr_beta", algorithm.rlpr_beta is not None),
        ("replay_successes", algorithm.replay_successes > 0),
    ):
        if section.is_alone and is_set:
            yield (
                f"algorithm.{key} chooses groups by their rewards, which "
                "distillation.reward_weight=0 does not train on: remove it, or raise "
                "reward_weight"
            )


def _teacher_problems(section: DistillationSection, config: RunConfig) -> Iterator[str]:
    for source, name in section.teachers.items():
        model = config.remote_models.get(name)
        if model is None:
            hint = suggest_nearest(name, list(config.remote_models))
            names = ", ".join(config.remote_models) or "none"
            yield (
                f"distillation.teachers.{source}: there is no remote model {name!r}: {hint}add it "
                f"to remote_models, which has {names}"
            )
        elif model.api == "anthropic":
            yield (
                f"distillation.teachers.{source}: remote_models.{name} has api: anthropic, which "
                "gives no log-probs: choose a model with api: engine, or a server that computes "
                "log-probs of a prompt (api: openai; vLLM and SGLang do)"
            )

    environment = config.environment
    if environment is not None and section.teacher_of(None, environment.type) is None:
        yield (
            f"distillation.teachers: the environment {environment.type} has no teacher: add "
            f"{environment.type}: NAME, or {OTHER_SOURCES}: NAME for all sources"
        )


def _unsupported_keys(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    refused: Mapping[str, bool] = {
        f"algorithm.name={algorithm.name}": algorithm.preference() is not None,
        "algorithm.train_observations": algorithm.train_observations,
        "agents": bool(config.agents),
        "tasks.self_play": config.tasks.self_play is not None,
        "data.pairs and data.pairs_from": config.data.given,
    }
    for key, is_set in refused.items():
        if is_set:
            yield (
                f"{key}: not supported with distillation.teachers, which score the sampled tokens "
                "of one policy: remove one of the two"
            )
