"""Presets: named combinations of an advantage, a policy loss, an aggregation, their
hyper-parameters and other keys of the recipe's algorithm section. Nothing else is in a preset.

    resolve_preset("dapo", {"clip_high": 0.3})
    ->  Algorithm(advantage="grpo", policy_loss="ppo_clip", aggregation="token-mean", ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from agentevo.algorithms.aggregation import AGGREGATIONS
from agentevo.algorithms.divergence import KL
from agentevo.algorithms.entries import EntryTable, Value
from agentevo.algorithms.estimators import ADVANTAGES
from agentevo.algorithms.losses import POLICY_LOSSES, check_aggregation
from agentevo.algorithms.preference import PREFERENCE_LOSSES

TABLES: Mapping[str, EntryTable[..., Any]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "aggregation": AGGREGATIONS,
    "kl": KL,
    "preference_loss": PREFERENCE_LOSSES,
}
"""Key of the recipe's algorithm section -> the entries that it can name."""
PARTS = ("advantage", "policy_loss", "aggregation")
"""The keys whose entries a preset combines."""


@dataclass(frozen=True)
class Preset:
    """One published algorithm as a combination of entries; hyper-parameters that it leaves open
    have the entries' defaults."""

    name: str
    meaning: str
    source: str
    advantage: str
    policy_loss: str = "ppo_clip"
    aggregation: str = "token-mean"
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


PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "ppo",
            "clipped ratios, advantages from a critic (GAE over tokens)",
            "arXiv 1707.06347, 1506.02438",
            "gae",
        ),
        Preset(
            "turn_ppo",
            "PPO whose critic judges turns: GAE with a turn as one step",
            "arXiv 1506.02438, 2504.20073",
            "turn_gae",
        ),
        Preset(
            "grpo", "group-relative advantages, clipped token ratios", "arXiv 2402.03300", "grpo"
        ),
        Preset(
            "dr_grpo",
            "GRPO without the division by the group's spread and without a length bias",
            "arXiv 2503.20783",
            "grpo",
            aggregation="seq-mean-token-sum",
            hyper={"scale_by_std": False},
        ),
        Preset(
            "dapo",
            "GRPO with more room above than below (Clip-Higher), a mean over tokens, and "
            "sampling until the batch is full; the paper also has "
            "length_shaping=soft_overlong, for answers of one turn whose length_max is known",
            "arXiv 2503.14476",
            "grpo",
            hyper={"clip_high": 0.28},
            keys={"dynamic_sampling": 10},
        ),
        Preset(
            "gspo",
            "GRPO with one ratio per sequence",
            "arXiv 2507.18071",
            "grpo",
            "gspo",
            "seq-mean-token-mean",
        ),
        Preset(
            "gmpo",
            "GRPO with the geometric mean of a sequence's token ratios",
            "arXiv 2507.20673",
            "grpo",
            "gmpo",
            "seq-mean-token-mean",
        ),
        Preset(
            "cispo",
            "GRPO's advantages, REINFORCE weighted with clipped ratios",
            "arXiv 2506.13585",
            "grpo",
            "cispo",
        ),
        Preset(
            "sapo",
            "GRPO's advantages, a smooth gate instead of the clip",
            "arXiv 2511.20347",
            "grpo",
            "sapo",
            "seq-mean-token-mean",
        ),
        Preset(
            "clip_cov",
            "GRPO without the tokens that reduce entropy most",
            "arXiv 2505.22617",
            "grpo",
            "clip_cov",
        ),
        Preset(
            "kl_cov",
            "GRPO with a pull to the old policy on the tokens that reduce entropy most",
            "arXiv 2505.22617",
            "grpo",
            "kl_cov",
        ),
        Preset(
            "minirl",
            "GRPO's centred advantages, REINFORCE in a band of ratios",
            "arXiv 2512.01374; AgentCPM-Explore",
            "grpo",
            "minirl",
            hyper={"scale_by_std": False},
        ),
        Preset(
            "decoupled_ppo",
            "group-relative advantages, ratios against the newest policy, weighted for tokens of "
            "older ones",
            "arXiv 2505.24298, eq. 5",
            "grpo",
            "decoupled_ppo",
        ),
        Preset(
            "rloo",
            "each attempt against the mean of the others, mean over sequences of token sums",
            "arXiv 2402.14740",
            "rloo",
            aggregation="seq-mean-token-sum",
        ),
        Preset(
            "remax",
            "each attempt against a greedy one at the same task, plain policy gradient, mean "
            "over sequences of token sums",
            "arXiv 2310.10505",
            "remax",
            "reinforce",
            "seq-mean-token-sum",
        ),
        Preset(
            "reinforce_pp",
            "return-to-go whitened over the batch, clipped ratios",
            "arXiv 2501.03262",
            "reinforce_pp",
        ),
        Preset(
            "reinforce_pp_baseline",
            "scores against the group's mean, whitened over the batch",
            "arXiv 2501.03262",
            "reinforce_pp_baseline",
        ),
        Preset(
            "opo",
            "on-policy gradient with the length-weighted baseline",
            "arXiv 2505.23585",
            "opo",
            "reinforce",
            "seq-mean-token-sum",
        ),
        Preset(
            "gpg",
            "the plain policy gradient, scaled up to make up for groups whose scores are equal",
            "arXiv 2504.02546",
            "gpg",
            "gpg",
        ),
        Preset(
            "maxrl",
            "advantages in units of the group's mean reward: hard tasks weigh more",
            "arXiv 2602.02710",
            "maxrl",
        ),
        Preset(
            "prime",
            "outcomes and process rewards that are learnt from them online",
            "arXiv 2502.01456",
            "prime",
        ),
        Preset("arpo", "RAGEN's StarPO with raw rewards", "arXiv 2504.20073", "raw"),
        Preset(
            "brpo",
            "RAGEN's StarPO with rewards normalised over the batch",
            "arXiv 2504.20073",
            "batch_norm",
        ),
        Preset(
            "starpo",
            "RAGEN's StarPO in its GRPO form: whole trajectories, mean over each one's tokens",
            "arXiv 2504.20073, eq. 4",
            "grpo",
            aggregation="per-trajectory-token-mean",
        ),
        Preset(
            "starpo_s",
            "StarPO made stable: only the quarter of the groups whose rewards differ most, "
            "Clip-Higher, no KL; the paper's PPO form also has a critic",
            "arXiv 2504.20073",
            "grpo",
            aggregation="per-trajectory-token-mean",
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
            "grpo",
            hyper={"clip_high": 0.27},
            keys={"rlpr_beta": 0.5},
        ),
        Preset(
            "turn_grpo",
            "return-to-go of each turn against all turns of the group: credit per turn without a "
            "critic",
            "arXiv 2402.03300, section 4.1.3",
            "turn_returns",
        ),
    )
}


def resolve_preset(
    name: str, hyper: Mapping[str, Value], parts: Mapping[str, str] = MappingProxyType({})
) -> Algorithm:
    """The preset with `parts` (key of TABLES -> name of an entry) in place of its own. Each entry
    gets those of `hyper` that it has.

    A preset's hyper-parameters count only for the entries that it chose itself. Raises ValueError
    for unknown names and values out of range.
    """
    preset = PRESETS[name]
    names = {key: parts.get(key) or getattr(preset, key) for key in PARTS}
    resolved: dict[str, Mapping[str, Any]] = {}
    for key in PARTS:
        hyper_names = TABLES[key].find(names[key]).hyper_names
        values = {**({} if key in parts else preset.hyper), **hyper}
        resolved[key] = TABLES[key].resolve(
            names[key], {name: value for name, value in values.items() if name in hyper_names}
        )

    check_aggregation(names["policy_loss"], resolved["policy_loss"], names["aggregation"])
    return Algorithm(
        names["advantage"],
        resolved["advantage"],
        names["policy_loss"],
        resolved["policy_loss"],
        names["aggregation"],
        resolved["aggregation"],
    )


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
