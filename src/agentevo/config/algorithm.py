"""The recipe's algorithm section: a preset, the choices that differ from it, and every
hyper-parameter of any entry as a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import pydantic
from pydantic import Field, model_validator

from agentevo.algorithms.aggregation import AGGREGATIONS
from agentevo.algorithms.divergence import KL
from agentevo.algorithms.entries import FUNCTION
from agentevo.algorithms.estimators import ADVANTAGES
from agentevo.algorithms.importance import IMPORTANCE
from agentevo.algorithms.losses import POLICY_LOSSES, check_weights
from agentevo.algorithms.preference import PREFERENCE_LOSSES
from agentevo.algorithms.presets import (
    POLICY_PRESETS,
    PREFERENCE_PRESETS,
    PRESETS,
    Algorithm,
    PreferenceAlgorithm,
    hyper_parameters,
    resolve_preference,
    resolve_preset,
)
from agentevo.config.collect import CollectKeys
from agentevo.config.unused_keys import check_used_keys, named_parts
from agentevo.runtime.section import Section

if TYPE_CHECKING:
    PresetName: TypeAlias = str
    AdvantageName: TypeAlias = str
    PolicyLossName: TypeAlias = str
    AggregationName: TypeAlias = str
    KLName: TypeAlias = str
    ImportanceName: TypeAlias = str
    PreferenceLossName: TypeAlias = str
else:
    PresetName = Literal[tuple(PRESETS)]
    AdvantageName = Literal[tuple(ADVANTAGES)]
    PolicyLossName = Literal[tuple(POLICY_LOSSES)]
    AggregationName = Literal[tuple(AGGREGATIONS)]
    KLName = Literal[tuple(KL)]
    ImportanceName = Literal[IMPORTANCE[0].choices]
    PreferenceLossName = Literal[tuple(PREFERENCE_LOSSES)]


class AlgorithmKeys(Section):
    """The algorithm: a preset, and the keys that differ from it. A preset has advantages, a policy
    loss, a KL and an aggregation, or a preference loss."""

    name: PresetName = "grpo"
    """A preset: a named combination of advantage, policy_loss, aggregation and their
    hyper-parameters, or of a preference loss and its hyper-parameters."""
    advantage: AdvantageName | None = None
    """How much better an attempt was than expected. Default: the preset's."""
    policy_loss: PolicyLossName | None = None
    """The loss of a token, given its advantage. Default: the preset's."""
    aggregation: AggregationName | None = None
    """How token losses become one number. Default: the preset's."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference policy. With 0, no copy of the reference is kept."""
    kl: KLName = "k3"
    """The estimator of the KL to the reference policy."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss, or is subtracted from the reward of each token before
    the advantages are computed."""
    kl_target: float | None = Field(default=None, gt=0)
    """Target KL per token, in nats. Each step adjusts kl_coef towards it. None: kl_coef is
    constant."""
    kl_horizon: int = Field(default=10000, ge=1)
    """Sequences over which a KL that is 20% or more off its target changes the weight by 20%."""
    reference: Literal["frozen", "synced", "ema", "base"] = "frozen"
    """The reference policy. `frozen`: the policy at the start of RL; `synced`: the policy of up to
    reference_every steps ago; `ema`: a running average; `base`, with model.lora: the base model,
    which is the policy with its adapters off (no copy is kept)."""
    reference_model: str | None = None
    """Folder of the model that the reference starts from, such as a checkpoint. It has the policy's
    architecture. Default: the policy at the start of RL."""
    reference_every: int = Field(default=10, ge=1)
    """RL steps between two updates of a synced reference to the current policy."""
    reference_decay: float = Field(default=0.99, ge=0, le=1)
    """Share of an ema reference that each step keeps."""
    old_logprobs: Literal["rollout", "recomputed"] = "rollout"
    """The denominator of the policy's ratio: the log-probs that the engine sampled with, or the
    trainer's own at the start of the step, which cost one more pass. An engine that computes
    differently from the trainer needs `recomputed`, together with importance: both are the defaults
    if engine.type is not torch."""
    importance: ImportanceName = "none"
    """Importance weight of each token, because another policy sampled it: the ratio of recomputed
    to rollout log-probs, per token or per sequence (the product of the ratios, or their geometric
    mean). tis truncates the weight at importance_cap; mis leaves out tokens whose weight is outside
    importance_floor and importance_cap. Default if engine.type is not torch: token_tis, with
    old_logprobs=recomputed, unless one of the two keys is set."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Largest importance weight."""
    importance_floor: float = Field(default=0.0, ge=0)
    """Smallest importance weight that mis keeps."""
    importance_age_power: float = Field(default=0.0, ge=0, le=10)
    """Importance weights decay with a token's staleness: they are divided by (1 + age)^power, with
    the age in steps. 0 is no decay; 1 is the staleness-aware learning rate of arXiv 1511.05950."""
    train_observations: bool = False
    """Also train on what the policy read between its turns (tool results, search results), as if
    the policy had written it, except the tokens of images. Trainers without a mask do that. Only
    for comparison; it needs old_logprobs=recomputed."""
    credit: str | None = None
    """Your own function that gives each turn a value (@agentevo.credit(NAME), key import). The
    advantage is then `credit`, which compares the values of the turns of a group."""
    loss_function: str | None = None
    """Your own function that gives the loss of each token (@agentevo.policy_loss(NAME), key
    import). policy_loss is then `function`."""
    advantage_function: str | None = None
    """Your own function that gives the advantage of each attempt or token
    (@agentevo.advantage(NAME), key import). advantage is then `function`."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each named part of the reward, with advantage gdpo. Other parts have weight 1."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, whose tokens have the weights of the loss (aggregation)."""
    entropy_target: float | None = Field(default=None, gt=0)
    """Target entropy, in nats per token. The weight of the bonus is entropy_coef at entropy 0,
    falls as the policy's mean entropy approaches the target, and is 0 above it. None: the weight is
    constant."""
    drop_zero_variance: bool = True
    """Leave out groups whose members all have the same reward, up to rounding, if the advantage
    compares within groups: the advantage of whole attempts is 0 there. If kept, they still get the
    KL and entropy terms, and turns are still compared (with gamma below 1, a shorter way to the
    same reward is better)."""
    drop_truncated: bool = False
    """Leave out attempts that a limit ended, because their reward says little (overlong filtering,
    DAPO, arXiv 2503.14476)."""
    keep_groups: float = Field(default=1.0, gt=0, le=1)
    """Share of a step's groups that are trained on: those with the largest spread of rewards
    (StarPO-S, arXiv 2504.20073, uses 0.25)."""

    preference_loss: PreferenceLossName | None = None
    """The loss on chosen and rejected answers, for presets with a preference loss. Default: the
    preset's."""
    pairs: Literal["best_worst", "all", "demonstrations"] | None = None
    """How a group gives pairs. `best_worst`: its best attempts against its worst; `all`: every two
    attempts with different rewards; `demonstrations`: the actions of the environment's solver
    against each attempt. Default: demonstrations with spin, best_worst with other losses of
    pairs."""
    pairs_per_group: int | None = Field(default=None, ge=1)
    """Maximum number of pairs per group (with rft: answers). Those with the largest difference of
    rewards come first. Default: 1; no limit with pairs=all and pairs=demonstrations."""
    pair_margin: float = Field(default=0.0, ge=0)
    """Smallest difference between the two rewards of a pair. Equal rewards never make a pair."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_preset(cls, value: Any) -> Any:
        """Adds the preset's keys that the section does not set."""
        name = str(value.get("name", "grpo")) if isinstance(value, dict) else ""
        preset = PRESETS.get(name)
        return {**preset.keys, **value} if preset is not None else value

    @model_validator(mode="after")
    def _pieces_fit(self) -> Self:
        check_used_keys(self)
        if self.preference() is None:
            check_weights(
                self.resolve().policy_loss,
                self.importance,
                self.importance_cap,
                self.importance_floor,
            )

        return self

    def resolve(self) -> Algorithm:
        """Every entry by name, with all its hyper-parameters. Must not be called for a preference
        algorithm."""
        return resolve_preset(self.name, self._hyper(), named_parts(dict(self)))

    def preference(self) -> PreferenceAlgorithm | None:
        """The preference loss and its pairs; None for an algorithm with advantages and a policy
        loss."""
        if self.name not in PREFERENCE_PRESETS:
            return None
        return resolve_preference(self.name, self._hyper(), named_parts(dict(self)), self.pairs)

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
        """Whether the members of a group are compared. If so, a single member teaches nothing, and
        whole attempts with the same reward teach nothing."""
        preference = self.preference()
        return (
            preference.within_group
            if preference is not None
            else ADVANTAGES[self.resolve().advantage].within_group
        )

    @property
    def needs(self) -> tuple[str, ...]:
        """The inputs that the advantage needs (`AlgorithmEntry.needs`); empty for a preference
        algorithm."""
        return ADVANTAGES[self.resolve().advantage].needs if self.preference() is None else ()

    def _hyper(self) -> dict[str, Any]:
        return {
            name: value for name in hyper_parameters() if (value := getattr(self, name)) is not None
        }


if TYPE_CHECKING:

    class AlgorithmSection(CollectKeys, AlgorithmKeys):
        """The keys of AlgorithmKeys and CollectKeys, then every hyper-parameter of any entry; None
        is the chosen entry's default."""

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
    return [
        *_function_contradictions(section),
        *_kl_and_entropy_contradictions(section),
        *_clip_contradictions(section),
        *_sampled_token_contradictions(section),
    ]


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
                f"algorithm.{key}={function} replaces the {part}, but algorithm.{part} is "
                f"{entry}: leave one of them out"
            )
        if function is None and entry == FUNCTION:
            problems.append(
                f"algorithm.{part}={FUNCTION} needs a function: name it with algorithm.{key}"
            )

    if section.credit is not None and section.advantage_function is not None:
        problems.append(
            "algorithm.credit has its own advantage: leave out credit or advantage_function"
        )

    if section.credit is not None and section.advantage not in (None, "credit"):
        problems.append(
            f"algorithm.credit={section.credit} has the advantage credit, but algorithm.advantage "
            f"is {section.advantage}: leave one of them out"
        )

    if section.credit is None and section.advantage == "credit":
        problems.append(
            "algorithm.advantage=credit needs a function: name it with algorithm.credit"
        )

    return problems


def _kl_and_entropy_contradictions(section: AlgorithmSection) -> list[str]:
    """Contradictions of the terms that keep the policy near its reference, and exploring."""
    problems = []
    if section.kl_target is not None and section.kl_coef == 0:
        problems.append(
            "algorithm.kl_target needs a KL, but its weight algorithm.kl_coef is 0: set kl_coef "
            "(0.001, say) or remove kl_target"
        )

    if section.entropy_target is not None and section.entropy_coef == 0:
        problems.append(
            "algorithm.entropy_target needs an entropy bonus, but its weight "
            "algorithm.entropy_coef is 0: set entropy_coef (0.1, say) or remove entropy_target"
        )

    if section.kl_coef == 0 and section.kl_in == "reward":
        problems.append(
            "algorithm.kl_in=reward needs a KL, but its weight algorithm.kl_coef is 0: set kl_coef "
            "(0.001, say) or remove kl_in"
        )

    if section.kl_in == "reward" and section.kl.endswith("+"):
        problems.append(
            f"algorithm.kl={section.kl} works by its gradient, and a reward has no gradient: "
            f"choose kl={section.kl[:-1]} or kl_in=loss"
        )

    if section.kl_in == "reward" and "reward_parts" in section.needs:
        problems.append(
            f"algorithm.advantage={section.resolve().advantage} compares the reward's named parts, "
            "and a KL is not one of them: choose kl_in=loss"
        )

    return problems


def _clip_contradictions(section: AlgorithmSection) -> list[str]:
    """Clip ranges that are written as bounds of the ratio."""
    hyper = section._hyper()
    low = hyper.get("clip_low", 0.0)
    high = hyper.get("clip_high", 0.0)
    if not 0.5 <= low < 1 < high <= 1.5:
        return []

    return [
        f"algorithm.clip_low={low:g} with clip_high={high:g} are bounds of the ratio, as "
        "Tinker's clip_low_threshold and clip_high_threshold; here they are distances from 1: "
        f"set clip_low={1 - low:g} clip_high={high - 1:g}"
    ]


def _sampled_token_contradictions(section: AlgorithmSection) -> list[str]:
    """Contradictions about tokens that another policy sampled, or that no policy did."""
    problems = []
    if section.importance != "none" and section.old_logprobs == "rollout":
        problems.append(
            f"algorithm.importance={section.importance} weighs recomputed against rollout "
            "log-probs, but old_logprobs is rollout: "
            "set old_logprobs=recomputed, or importance=none"
        )

    if section.importance_age_power and section.importance == "none":
        problems.append(
            f"algorithm.importance_age_power={section.importance_age_power:g} lets importance "
            "weights decay, but importance is none: set importance=token_tis "
            "old_logprobs=recomputed, or leave it out"
        )

    if section.train_observations and section.old_logprobs == "rollout":
        problems.append(
            "algorithm.train_observations trains tokens that no engine sampled, but old_logprobs "
            "is rollout: set old_logprobs=recomputed, or train_observations=false"
        )

    if section.train_observations and section.importance != "none":
        problems.append(
            "algorithm.train_observations trains tokens that no engine sampled, and "
            f"algorithm.importance={section.importance} can't weigh them: set importance=none"
        )

    return problems


OWN = "torch"
"""The engine that computes with the trainer's kernels."""
DEFAULTS = {"importance": "token_tis", "old_logprobs": "recomputed"}


def with_importance(tree: Any) -> Any:
    """A recipe's tree with the defaults for a policy that samples slightly differently from the
    trained one. Unreadable parts are not changed; a later check refuses them.

    There are two causes. An engine that is not the trainer's own computes the same weights in other
    kernels and number formats (Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025). A base in 8 bits rounds a token's activations by the largest
    activation of all tokens in the same computation (LLM.int8(), arXiv 2208.07339, section 3), and
    these are other tokens in sampling than in an update. In both cases the default of
    `algorithm.importance` is `token_tis`, and that of `algorithm.old_logprobs` is `recomputed`,
    which it needs. The defaults do not apply if the recipe sets one of the two keys, or if the
    algorithm's loss already weighs, compares whole answers, or trains tokens that no engine has
    sampled.
    """
    if not isinstance(tree, Mapping):
        return tree

    engine = _value(tree, "engine", "type", default=OWN)
    quantize = _value(tree, "model", "lora", "quantize", default="none")
    section = tree.get("algorithm", {})
    if (engine == OWN and quantize != "8bit") or not isinstance(section, Mapping):
        return tree

    name = section.get("name", "grpo")
    if not isinstance(name, str) or name not in POLICY_PRESETS:
        return tree

    preset = POLICY_PRESETS[name]
    algorithm = {**preset.keys, **section}
    loss = POLICY_LOSSES.get(algorithm.get("policy_loss") or preset.parts["policy_loss"])
    if loss is None or loss.has_importance_weights or algorithm.get("train_observations"):
        return tree

    if not DEFAULTS.keys() & algorithm.keys():
        algorithm = {**section, **DEFAULTS}
    elif "importance" not in algorithm and algorithm["old_logprobs"] == DEFAULTS["old_logprobs"]:
        algorithm = {**section, "importance": DEFAULTS["importance"]}
    else:
        return tree

    return {**tree, "algorithm": algorithm}


def _value(tree: Any, *keys: str, default: str) -> Any:
    """The value at a path of mappings and sections; `default` if there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else getattr(tree, key, None)
    return default if tree is None else tree
