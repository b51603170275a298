"""Presets: named combinations of an advantage, a policy loss and an aggregation, or a preference
loss, with hyper-parameters and other keys of the recipe's algorithm section. Nothing else is in a
preset.

    resolve_preset("dapo", {"clip_high": 0.3})
    ->  Algorithm(advantage="grpo", policy_loss="ppo_clip", aggregation="token-mean", ...)
    resolve_preference("ipo", {"beta": 0.5})
    ->  PreferenceAlgorithm(loss="ipo", hyper={"beta": 0.5}, pairs="best_worst")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from agentevo.algorithms.aggregation import AGGREGATIONS
from agentevo.algorithms.divergence import KL
from agentevo.algorithms.entries import AlgorithmEntry, EntryTable, Value
from agentevo.algorithms.estimators import ADVANTAGES
from agentevo.algorithms.losses import POLICY_LOSSES, check_aggregation
from agentevo.algorithms.preference import PREFERENCE_LOSSES, Pairs

TABLES: Mapping[str, EntryTable[..., Any]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "aggregation": AGGREGATIONS,
    "kl": KL,
    "preference_loss": PREFERENCE_LOSSES,
}
"""Key of the recipe's algorithm section -> the entries that it can name."""


@dataclass(frozen=True)
class Preset:
    """One published algorithm as a combination of entries; hyper-parameters that it leaves open
    have the entries' defaults."""

    name: str
    meaning: str
    source: str
    parts: Mapping[str, str]
    """Key of TABLES -> the entry that it names."""
    hyper: Mapping[str, Value] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    """What else the algorithm consists of: filters, shaping, reference. Values of keys of the
    recipe's algorithm section."""


@dataclass(frozen=True)
class Algorithm:
    """The algorithm that is computed: every name and every number."""

    advantage: str
    advantage_hyper: Mapping[str, Any]
    policy_loss: str
    loss_hyper: Mapping[str, Any]
    aggregation: str
    aggregation_hyper: Mapping[str, Any]


@dataclass(frozen=True)
class PreferenceAlgorithm:
    """The algorithm that is computed: the loss, every number, and where the answers come from."""

    loss: str
    hyper: Mapping[str, Any]
    pairs: Pairs | None
    """None for a loss of single answers."""

    @property
    def needs_reference(self) -> bool:
        return PREFERENCE_LOSSES[self.loss].needs_reference

    @property
    def within_group(self) -> bool:
        """Whether an attempt is useless without another one of its group that earned more or
        less."""
        return self.pairs in ("best_worst", "all")


def _policy_parts(
    advantage: str, policy_loss: str = "ppo_clip", aggregation: str = "token-mean"
) -> dict[str, str]:
    return {"advantage": advantage, "policy_loss": policy_loss, "aggregation": aggregation}


PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "ppo",
            "clipped ratios, advantages from a critic (GAE over tokens)",
            "arXiv 1707.06347, 1506.02438",
            _policy_parts("gae"),
        ),
        Preset(
            "turn_ppo",
            "PPO whose critic judges turns: GAE with a turn as one step",
            "arXiv 1506.02438, 2504.20073",
            _policy_parts("turn_gae"),
        ),
        Preset(
            "grpo",
            "group-relative advantages, clipped token ratios",
            "arXiv 2402.03300",
            _policy_parts("grpo"),
        ),
        Preset(
            "dr_grpo",
            "GRPO without the division by the group's spread and without a length bias",
            "arXiv 2503.20783",
            _policy_parts("grpo", aggregation="seq-mean-token-sum"),
            hyper={"scale_by_std": False},
        ),
        Preset(
            "dapo",
            "GRPO with more room above than below (Clip-Higher), a mean over tokens, and "
            "sampling until the batch is full; the paper also has "
            "length_shaping=soft_overlong, for answers of one turn whose length_max is known",
            "arXiv 2503.14476",
            _policy_parts("grpo"),
            hyper={"clip_high": 0.28},
            keys={"dynamic_sampling": 10},
        ),
        Preset(
            "gspo",
            "GRPO with one ratio per sequence",
            "arXiv 2507.18071",
            _policy_parts("grpo", "gspo", "seq-mean-token-mean"),
        ),
        Preset(
            "gmpo",
            "GRPO with the geometric mean of a sequence's token ratios",
            "arXiv 2507.20673",
            _policy_parts("grpo", "gmpo", "seq-mean-token-mean"),
        ),
        Preset(
            "cispo",
            "GRPO's advantages, REINFORCE weighted with clipped ratios",
            "arXiv 2506.13585",
            _policy_parts("grpo", "cispo"),
        ),
        Preset(
            "sapo",
            "GRPO's advantages, a smooth gate instead of the clip",
            "arXiv 2511.20347",
            _policy_parts("grpo", "sapo", "seq-mean-token-mean"),
        ),
        Preset(
            "clip_cov",
            "GRPO without the tokens that reduce entropy most",
            "arXiv 2505.22617",
            _policy_parts("grpo", "clip_cov"),
        ),
        Preset(
            "kl_cov",
            "GRPO with a pull to the old policy on the tokens that reduce entropy most",
            "arXiv 2505.22617",
            _policy_parts("grpo", "kl_cov"),
        ),
        Preset(
            "minirl",
            "GRPO's centred advantages, REINFORCE in a band of ratios",
            "arXiv 2512.01374; AgentCPM-Explore",
            _policy_parts("grpo", "minirl"),
            hyper={"scale_by_std": False},
        ),
        Preset(
            "decoupled_ppo",
            "group-relative advantages, ratios against the newest policy, weighted for tokens of "
            "older ones",
            "arXiv 2505.24298, eq. 5",
            _policy_parts("grpo", "decoupled_ppo"),
        ),
        Preset(
            "rloo",
            "each attempt against the mean of the others, mean over sequences of token sums",
            "arXiv 2402.14740",
            _policy_parts("rloo", aggregation="seq-mean-token-sum"),
        ),
        Preset(
            "remax",
            "each attempt against a greedy one at the same task, plain policy gradient, mean "
            "over sequences of token sums",
            "arXiv 2310.10505",
            _policy_parts("remax", "reinforce", "seq-mean-token-sum"),
        ),
        Preset(
            "reinforce_pp",
            "return-to-go whitened over the batch, clipped ratios",
            "arXiv 2501.03262",
            _policy_parts("reinforce_pp"),
        ),
        Preset(
            "reinforce_pp_baseline",
            "scores against the group's mean, whitened over the batch",
            "arXiv 2501.03262",
            _policy_parts("reinforce_pp_baseline"),
        ),
        Preset(
            "opo",
            "on-policy gradient with the length-weighted baseline",
            "arXiv 2505.23585",
            _policy_parts("opo", "reinforce", "seq-mean-token-sum"),
        ),
        Preset(
            "gpg",
            "the plain policy gradient, scaled up to make up for groups whose scores are equal",
            "arXiv 2504.02546",
            _policy_parts("gpg", "gpg"),
        ),
        Preset(
            "maxrl",
            "advantages in units of the group's mean reward: hard tasks weigh more",
            "arXiv 2602.02710",
            _policy_parts("maxrl"),
        ),
        Preset(
            "prime",
            "outcomes and process rewards that are learnt from them online",
            "arXiv 2502.01456",
            _policy_parts("prime"),
        ),
        Preset("arpo", "RAGEN's StarPO with raw rewards", "arXiv 2504.20073", _policy_parts("raw")),
        Preset(
            "brpo",
            "RAGEN's StarPO with rewards normalised over the batch",
            "arXiv 2504.20073",
            _policy_parts("batch_norm"),
        ),
        Preset(
            "starpo",
            "RAGEN's StarPO in its GRPO form: whole trajectories, mean over each one's tokens",
            "arXiv 2504.20073, eq. 4",
            _policy_parts("grpo", aggregation="per-trajectory-token-mean"),
        ),
        Preset(
            "starpo_s",
            "StarPO made stable: only the quarter of the groups whose rewards differ most, "
            "Clip-Higher, no KL; the paper's PPO form also has a critic",
            "arXiv 2504.20073",
            _policy_parts("grpo", aggregation="per-trajectory-token-mean"),
            hyper={"clip_high": 0.28},
            keys={"keep_groups": 0.25, "kl_coef": 0.0},
        ),
        Preset(
            "rlpr",
            "GRPO without the groups whose rewards differ less than usual, and a little more "
            "room above than below; the paper's "
            "reward, the policy's probability of the reference answer, is the reward `rlpr`, "
            "which any preset may train on",
            "arXiv 2506.18254",
            _policy_parts("grpo"),
            hyper={"clip_high": 0.27},
            keys={"rlpr_beta": 0.5},
        ),
        Preset(
            "turn_grpo",
            "return-to-go of each turn against all turns of the group: credit per turn without a "
            "critic",
            "arXiv 2402.03300, section 4.1.3",
            _policy_parts("turn_returns"),
        ),
        Preset(
            "gigpo",
            "GRPO, and each turn against turns of its group that answered the same observation: "
            "credit per turn without a critic",
            "arXiv 2505.10978",
            _policy_parts("gigpo"),
            keys={"drop_zero_variance": False},
        ),
        Preset(
            "dpo",
            "the best attempt of each group against the worst, on fresh groups (online) or on "
            "given pairs",
            "arXiv 2305.18290; online: 2402.04792",
            {"preference_loss": "dpo"},
        ),
        Preset(
            "ipo",
            "DPO's pairs with a target gain instead of one as large as possible",
            "arXiv 2310.12036",
            {"preference_loss": "ipo"},
        ),
        Preset(
            "kto",
            "each attempt alone: desirable where it succeeded, else undesirable",
            "arXiv 2402.01306",
            {"preference_loss": "kto"},
        ),
        Preset(
            "orpo",
            "imitates the best attempt and lowers the odds of the worst; no reference",
            "arXiv 2403.07691",
            {"preference_loss": "orpo"},
        ),
        Preset(
            "spin",
            "self-play: the solver's demonstrations against the policy's own attempts; the "
            "reference follows the policy",
            "arXiv 2401.01335",
            {"preference_loss": "spin"},
            keys={"reference": "synced", "reference_every": 10},
        ),
        Preset(
            "sppo",
            "self-play: log-ratios towards each attempt's chance to beat its group; the "
            "reference follows the policy",
            "arXiv 2405.00675",
            {"preference_loss": "sppo"},
            keys={"reference": "synced", "reference_every": 10},
        ),
        Preset(
            "rft",
            "rejection-sampling fine-tuning: imitates the best successful attempts of each group",
            "arXiv 2308.01825; RAFT 2304.06767; STaR 2203.14465",
            {"preference_loss": "rft"},
        ),
    )
}
PREFERENCE_PRESETS = {
    name: preset for name, preset in PRESETS.items() if "preference_loss" in preset.parts
}
"""Those that train on pairs or single answers, in place of advantages."""
POLICY_PRESETS = {name: PRESETS[name] for name in PRESETS if name not in PREFERENCE_PRESETS}


Parts: TypeAlias = Mapping[str, str]
"""Key of TABLES -> the entry that a recipe names in place of the preset's."""
NO_PARTS: Parts = MappingProxyType({})


def resolve_preset(name: str, hyper: Mapping[str, Value], parts: Parts = NO_PARTS) -> Algorithm:
    """A preset with advantages and a policy loss, with `parts` in place of its own. Raises
    ValueError for unknown names, values out of range and an aggregation that the loss excludes."""
    resolved = resolve_parts(name, hyper, parts)
    check_aggregation(*resolved["policy_loss"], resolved["aggregation"][0])
    return Algorithm(*resolved["advantage"], *resolved["policy_loss"], *resolved["aggregation"])


def resolve_preference(
    name: str, hyper: Mapping[str, Value], parts: Parts = NO_PARTS, pairs: Pairs | None = None
) -> PreferenceAlgorithm:
    """A preset with a preference loss, with `parts` in place of its own. Raises ValueError for
    unknown names and values out of range."""
    loss, settings = resolve_parts(name, hyper, parts)["preference_loss"]
    default = PREFERENCE_LOSSES[loss].pairs
    return PreferenceAlgorithm(loss, settings, default and (pairs or default))


def resolve_parts(
    name: str, hyper: Mapping[str, Value], parts: Parts = NO_PARTS
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Key of TABLES -> the entry of the preset, or that of `parts`, with its hyper-parameters. Each
    entry gets those of `hyper` that it has. A preset's hyper-parameters count only for the entries
    that it chose itself."""
    resolved = {}
    for key, entry in chosen_entries(name, parts).items():
        values = {**({} if key in parts else PRESETS[name].hyper), **hyper}
        fitting = {name: value for name, value in values.items() if name in entry.hyper_names}
        resolved[key] = entry.name, TABLES[key].resolve(entry.name, fitting)

    return resolved


def chosen_entries(name: str, parts: Parts) -> dict[str, AlgorithmEntry]:
    """Key of TABLES -> the entry of the preset, or that of `parts`. Raises ValueError for an
    unknown name in `parts`."""
    preset = PRESETS[name]
    return {key: TABLES[key].find(parts.get(key, preset.parts[key])) for key in preset.parts}


@cache
def hyper_parameters() -> dict[str, tuple[Any, str]]:
    """Every hyper-parameter of an algorithm -> its type, and what it means with the entries that
    have it."""
    texts: dict[str, dict[str, list[str]]] = {}
    types: dict[str, Any] = {}
    for table in TABLES.values():
        for entry in table.values():
            for hyper in entry.hyper:
                types[hyper.name] = (
                    bool
                    if isinstance(hyper.default, bool)
                    else Literal[hyper.choices]
                    if hyper.choices
                    else float
                )
                texts.setdefault(hyper.name, {}).setdefault(hyper.meaning, []).append(
                    f"{table.kind} {entry.name}"
                )

    return {
        key: (
            types[key],
            "; ".join(f"{', '.join(owners)}: {meaning}" for meaning, owners in meanings.items())
            + ". Default: that of the chosen entry.",
        )
        for key, meanings in texts.items()
    }
