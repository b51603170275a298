"""The recipe's algorithm section: a preset, the choices that differ from it, and every
hyper-parameter of any entry as a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import pydantic
from pydantic import Field, model_validator

from agentevo.catalogue import FUNCTION
from agentevo.catalogue.advantages import ADVANTAGES
from agentevo.catalogue.aggregations import AGGREGATIONS
from agentevo.catalogue.kl import KL
from agentevo.catalogue.policy_losses import IMPORTANCE, POLICY_LOSSES, check_importance
from agentevo.catalogue.preference import PREFERENCE_LOSSES
from agentevo.catalogue.preference_presets import (
    PREFERENCE_PRESETS,
    PreferenceAlgorithm,
    resolve_preference,
)
from agentevo.catalogue.presets import PRESETS, Algorithm, hyper_parameters, resolve_preset
from agentevo.config.collect import CollectKeys
from agentevo.config.preference import check_preference_keys
from agentevo.config.section import Section

if TYPE_CHECKING:
    PresetName: TypeAlias = str
    AdvantageName: TypeAlias = str
    PolicyLossName: TypeAlias = str
    AggregationName: TypeAlias = str
    KLName: TypeAlias = str
    ImportanceName: TypeAlias = str
    PreferenceLossName: TypeAlias = str
else:
    PresetName = Literal[(*PRESETS, *PREFERENCE_PRESETS)]
    AdvantageName = Literal[tuple(ADVANTAGES)]
    PolicyLossName = Literal[tuple(POLICY_LOSSES)]
    AggregationName = Literal[tuple(AGGREGATIONS)]
    KLName = Literal[tuple(KL)]
    ImportanceName = Literal[IMPORTANCE[0].choices]
    PreferenceLossName = Literal[tuple(PREFERENCE_LOSSES)]


class AlgorithmKeys(Section):
    """Advantages, policy loss, KL and aggregation, or a preference loss: a preset, and what is
    chosen otherwise."""

    name: PresetName = "grpo"
    """A preset: a named combination of advantage, policy_loss, aggregation and their
    hyper-parameters; or of a preference loss and its."""
    advantage: AdvantageName | None = None
    """How much better an attempt was than expected. Default: the preset's."""
    policy_loss: PolicyLossName | None = None
    """The loss of a token, given its advantage. Default: the preset's."""
    aggregation: AggregationName | None = None
    """How token losses become one number. Default: the preset's."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference policy. 0 keeps no reference copy."""
    kl: KLName = "k3"
    """Estimate of that KL."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss, or taken off the reward of each token before the
    advantages are computed."""
    kl_target: float | None = Field(default=None, gt=0)
    """KL per token, in nats, towards which kl_coef is steered from step to step. None keeps kl_coef
    as it is."""
    kl_horizon: int = Field(default=10000, ge=1)
    """Sequences over which a KL that is 20% or more off its target changes the weight by 20%."""
    reference: Literal["frozen", "synced", "ema", "base"] = "frozen"
    """The reference policy: as it was at the start of RL, the policy of up to reference_every steps
    ago, a running average, or with model.lora the base model, that is the policy with its adapters
    off (no copy is kept)."""
    reference_model: str | None = None
    """Folder of the model that the reference begins as, of the policy's own architecture, such as a
    checkpoint. Default: the policy as it is when RL starts."""
    reference_every: int = Field(default=10, ge=1)
    """RL steps after which a synced reference becomes the policy as it is then."""
    reference_decay: float = Field(default=0.99, ge=0, le=1)
    """Share of an ema reference that a step leaves as it was."""
    old_logprobs: Literal["rollout", "recomputed"] = "rollout"
    """The denominator of the policy's ratio: the log-probs that the engine sampled with, or the
    trainer's own at the start of the step (one more pass; what an engine that computes otherwise
    needs, together with importance, and gets by default where engine.type is not torch)."""
    importance: ImportanceName = "none"
    """Weight of each token for having been sampled by another policy, from recomputed over rollout
    log-probs: per token or per sequence (their product, or its geometric mean); tis cuts the weight
    at importance_cap, mis leaves out what is outside floor and cap. Default where engine.type is
    not torch: token_tis, with old_logprobs=recomputed, unless one of them is given."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Largest such weight."""
    importance_floor: float = Field(default=0.0, ge=0)
    """Smallest such weight that mis keeps."""
    importance_age_power: float = Field(default=0.0, ge=0, le=10)
    """Such weights decay with a token's staleness: they are divided by (1 + age)^power, the age in
    steps. 0 leaves them as they are, 1 is the staleness-aware learning rate of arXiv 1511.05950."""
    train_observations: bool = False
    """Also trains what the policy read between its turns (results of tools, what was found), as if
    it had written that itself: what trainers without a mask do. Only for comparison; it needs
    old_logprobs=recomputed."""
    credit: str | None = None
    """A function of your own that says what each turn has earned (@agentevo.credit(NAME), key
    import); the advantage is then `credit`, which compares the turns of a group by it."""
    loss_function: str | None = None
    """A function of your own that gives the loss of each token (@agentevo.policy_loss(NAME), key
    import); policy_loss is then `function`."""
    advantage_function: str | None = None
    """A function of your own that gives the advantage of each attempt or token
    (@agentevo.advantage(NAME), key import); advantage is then `function`."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each named part of the reward with advantage gdpo; 1 for parts that are not
    named."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    entropy_target: float | None = Field(default=None, gt=0)
    """Entropy worth keeping, in nats a token: the bonus weighs entropy_coef at entropy 0, less the
    nearer the policy's mean entropy is to the target, and nothing above it. None weighs it always
    the same."""
    drop_zero_variance: bool = True
    """Leave out groups whose members all have the same reward, but for rounding, if the advantage
    compares within groups: it is 0 for them. Kept, they still get the KL and entropy terms."""
    drop_truncated: bool = False
    """Leave out attempts that a limit ended, for their reward says little (overlong filtering,
    DAPO, arXiv 2503.14476)."""
    keep_groups: float = Field(default=1.0, gt=0, le=1)
    """Share of a step's groups that is trained on: those with the largest spread of rewards
    (StarPO-S, arXiv 2504.20073, uses 0.25)."""

    preference_loss: PreferenceLossName | None = None
    """The loss on chosen and rejected answers, with a preset that trains by one. Default: the
    preset's."""
    pairs: Literal["best_worst", "all", "demonstrations"] | None = None
    """What a group's pairs are: its best attempts against its worst, every two attempts with
    different rewards, or what the environment's solver would have done against each attempt.
    Default: demonstrations with spin, best_worst with other losses of pairs."""
    pairs_per_group: int | None = Field(default=None, ge=1)
    """Most pairs of one group (with rft: answers), those with the largest difference of rewards
    first. Default: 1; as many as there are with pairs=all and pairs=demonstrations."""
    pair_margin: float = Field(default=0.0, ge=0)
    """Least difference of the two rewards of a pair, which must differ in any case."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_preset(cls, value: Any) -> Any:
        """Adds the preset's keys where the section does not set them."""
        name = str(value.get("name", "grpo")) if isinstance(value, dict) else ""
        preset = PRESETS.get(name) or PREFERENCE_PRESETS.get(name)
        return {**preset.keys, **value} if preset is not None else value

    @model_validator(mode="after")
    def _pieces_fit(self) -> Self:
        preference = self.preference()
        check_preference_keys(self, preference)
        if preference is None:
            check_importance(
                self.resolve().policy_loss,
                self.importance,
                self.importance_cap,
                self.importance_floor,
            )

        return self

    def resolve(self) -> Algorithm:
        """Every entry by name, with all its hyper-parameters. Must not be called for a preference
        algorithm."""
        return resolve_preset(
            self.name,
            self._hyper(),
            advantage=self._advantage_name(),
            policy_loss=self.policy_loss if self.loss_function is None else FUNCTION,
            aggregation=self.aggregation,
        )

    def _advantage_name(self) -> str | None:
        if self.credit is not None:
            return "credit"
        return self.advantage if self.advantage_function is None else FUNCTION

    def preference(self) -> PreferenceAlgorithm | None:
        """The preference loss and its pairs; None for an algorithm with advantages and a policy
        loss."""
        if self.name not in PREFERENCE_PRESETS:
            return None
        return resolve_preference(
            self.name, self._hyper(), preference_loss=self.preference_loss, pairs=self.pairs
        )

    @property
    def credit_rule(self) -> str:
        """What determines the value of each turn, in words for logs and records."""
        if self.preference() is not None:
            return self.name
        algorithm = self.resolve()
        hyper = ", ".join(f"{key}={value}" for key, value in algorithm.advantage_hyper.items())
        function = self.credit or self.advantage_function
        suffix = f" by {function}" if function is not None else ""
        return f"{algorithm.advantage}{suffix}" + (f" ({hyper})" if hyper else "")

    @property
    def within_group(self) -> bool:
        """Whether the members of a group are compared. If so, a single member, or several with the
        same reward, teach nothing."""
        preference = self.preference()
        return (
            preference.within_group
            if preference is not None
            else ADVANTAGES[self.resolve().advantage].within_group
        )

    @property
    def needs(self) -> tuple[str, ...]:
        """The inputs that the advantage needs (`CatalogueEntry.needs`); empty for a preference
        algorithm."""
        return ADVANTAGES[self.resolve().advantage].needs if self.preference() is None else ()

    def _hyper(self) -> dict[str, Any]:
        return {
            name: value for name in hyper_parameters() if (value := getattr(self, name)) is not None
        }


if TYPE_CHECKING:

    class AlgorithmSection(CollectKeys, AlgorithmKeys):
        """AlgorithmKeys, CollectKeys, and below them every hyper-parameter of any entry; None is
        the default of the chosen one."""

        def __init__(self, **keys: Any) -> None: ...

else:
    AlgorithmSection = pydantic.create_model(
        "AlgorithmSection",
        __base__=(
            CollectKeys,
            AlgorithmKeys,
        ),  # in the order of inheritance, so that `name` stays the first key
        __doc__=AlgorithmKeys.__doc__,
        **{
            name: (kind | None, Field(default=None, description=meaning))
            for name, (kind, meaning) in hyper_parameters().items()
        },
    )


def algorithm_contradictions(section: AlgorithmSection) -> list[str]:
    """Valid values of the section that contradict one another, as 'what: remedy'."""
    problems = _function_contradictions(section)
    if section.credit is not None and section.advantage not in (None, "credit"):
        problems.append(
            f"algorithm.credit={section.credit} has the advantage credit, but algorithm.advantage "
            f"is {section.advantage}: leave one of them out"
        )

    if section.credit is None and section.advantage == "credit":
        problems.append(
            "algorithm.advantage=credit needs a function: name it with algorithm.credit"
        )

    if section.kl_target is not None and section.kl_coef == 0:
        problems.append(
            "algorithm.kl_target steers a KL whose weight algorithm.kl_coef is 0: set it (0.001, "
            "say) or drop the target"
        )

    if section.entropy_target is not None and section.entropy_coef == 0:
        problems.append(
            "algorithm.entropy_target aims a bonus whose weight algorithm.entropy_coef is 0: set "
            "it (0.1, say) or drop the target"
        )

    if section.kl_coef == 0 and section.kl_in == "reward":
        problems.append(
            "algorithm.kl_in=reward, but its weight algorithm.kl_coef is 0: set it (0.001, say) "
            "or drop kl_in"
        )

    if section.kl_in == "reward" and section.kl.endswith("+"):
        problems.append(
            f"algorithm.kl={section.kl} is made for its gradient, which a reward has not: choose "
            f"kl={section.kl[:-1]} or kl_in=loss"
        )

    if section.kl_in == "reward" and section.resolve().advantage == "gdpo":
        problems.append(
            "algorithm.advantage=gdpo compares the reward's named parts, in which a KL has no "
            "place: choose kl_in=loss"
        )

    hyper = section._hyper()
    low = hyper.get("clip_low", 0.0)
    high = hyper.get("clip_high", 0.0)
    if 0.5 <= low < 1 < high <= 1.5:
        problems.append(
            f"algorithm.clip_low={low:g} with clip_high={high:g} are bounds of the ratio, as "
            "Tinker's clip_low_threshold and clip_high_threshold; here they are distances from 1: "
            f"set clip_low={1 - low:g} clip_high={high - 1:g}"
        )

    if section.importance != "none" and section.old_logprobs == "rollout":
        problems.append(
            f"algorithm.importance={section.importance} weighs recomputed against rollout "
            "log-probs, but old_logprobs is rollout: "
            "set old_logprobs=recomputed, or importance=none"
        )

    if section.importance_age_power and section.importance == "none":
        problems.append(
            f"algorithm.importance_age_power={section.importance_age_power:g} lets importance "
            "weights decay, and importance is none: set importance=token_tis "
            "old_logprobs=recomputed, or leave it out"
        )

    if section.train_observations and section.old_logprobs == "rollout":
        problems.append(
            "algorithm.train_observations trains tokens that no engine has drawn, but old_logprobs "
            "is rollout: set old_logprobs=recomputed, or train_observations=false"
        )

    if section.train_observations and section.importance != "none":
        problems.append(
            "algorithm.train_observations trains tokens that no engine has drawn, which "
            f"algorithm.importance={section.importance} can't weigh: set importance=none"
        )

    return problems


def _function_contradictions(section: AlgorithmSection) -> list[str]:
    """Contradictions of the user's functions."""
    problems = []
    for key, function, part in (
        ("loss_function", section.loss_function, "policy_loss"),
        ("advantage_function", section.advantage_function, "advantage"),
    ):
        entry = getattr(section, part)
        if function is not None and entry not in (None, FUNCTION):
            problems.append(
                f"algorithm.{key}={function} stands for the {part}, but algorithm.{part} is "
                f"{entry}: leave one of them out"
            )
        if function is None and entry == FUNCTION:
            problems.append(
                f"algorithm.{part}={FUNCTION} needs a function: name it with algorithm.{key}"
            )

    if section.credit is not None and section.advantage_function is not None:
        problems.append(
            "algorithm.credit has an advantage of its own: leave it or advantage_function out"
        )

    return problems
