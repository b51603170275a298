"""Policy losses by name, and the hyper-parameters of the importance correction that any of them can
carry.

Formulas: l = log-prob now (carries the gradient), o = under the policy before the update, p =
proximal, q = as sampled by the engine; A = advantage; r = exp(l - o); sg = no gradient through it.
A formula is the loss of one token (or of one sequence, where stated).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentevo.catalogue import FUNCTION, CatalogueEntry, Hyperparameter, Value, by_name


@dataclass(frozen=True)
class Switch(Hyperparameter):
    """A hyper-parameter that 0 (or None) turns off and that is above `low` otherwise."""

    @property
    def range(self) -> str:
        return f"0 (off) or a number above {self.low:g}"

    def check(self, entry: str, value: object) -> None:
        """Raises ValueError with the valid range."""
        if value is None or (value == 0 and not isinstance(value, bool)):
            return
        super().check(entry, value)


def _clip(low: float, high: float) -> tuple[Hyperparameter, Hyperparameter]:
    return (
        Hyperparameter("clip_low", low, "the ratio may fall to 1 - clip_low", low=0.0, high=1.0),
        Hyperparameter("clip_high", high, "the ratio may rise to 1 + clip_high", low=0.0),
    )


def _thresholds(
    divergence: str, value: float
) -> tuple[Hyperparameter, Hyperparameter, Hyperparameter]:
    return (
        Hyperparameter(
            "clip_low",
            value,
            f"{divergence} up to which a token of negative advantage still trains",
            low=0.0,
        ),
        Hyperparameter(
            "clip_high",
            value,
            f"{divergence} up to which a token of positive advantage still trains",
            low=0.0,
        ),
        Hyperparameter("cap", 20.0, "largest ratio that counts", low=0.0, low_allowed=False),
    )


_FRACTION = Hyperparameter(
    "fraction",
    0.0002,
    "share of all trained tokens that is chosen (at least one token)",
    low=0.0,
    high=1.0,
    low_allowed=False,
)

IMPORTANCE = (
    Hyperparameter(
        "importance",
        "none",
        "corrects for sampling with another policy: a weight exp(o - q), per token, per sequence "
        "(sum of o - q) or from the sequence's mean"
        " of o - q; tis: min(weight, cap), mis: 0 where the weight is outside [floor, cap]",
        choices=("none", "token_tis", "token_mis", "sequence_tis", "sequence_mis", "geometric_mis"),
    ),
    Hyperparameter("importance_cap", 2.0, "largest weight", low=0.0, low_allowed=False),
    Hyperparameter("importance_floor", 0.0, "smallest weight that mis keeps", low=0.0),
)
"""Sources: TIS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL
training" (2025); sequence and geometric masks: Liu et al., "When speed kills stability" (2025).
verl: rollout_is (token, sequence) with rollout_is_threshold, IcePop's "lo_hi"."""

POLICY_LOSSES = by_name(
    [
        CatalogueEntry(
            "ppo_clip",
            "PPO's clipped surrogate; two bounds make DAPO's Clip-Higher, dual_clip bounds it "
            "where A < 0",
            "max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); with dual_clip c, where A < 0: "
            "min(that, -A c)",
            "PPO, arXiv 1707.06347, eq. 7; two bounds: DAPO, arXiv 2503.14476, eq. 10; dual "
            "clip: arXiv 1912.09729, eq. 5",
            (
                *_clip(0.2, 0.2),
                Switch(
                    "dual_clip",
                    0.0,
                    "largest ratio that counts where A < 0",
                    low=1.0,
                    low_allowed=False,
                ),
            ),
            peers={
                "verl": "vanilla; dual_clip is clip_ratio_c",
                "TRL": "loss_type grpo, bnpo, dr_grpo, dapo, luspo; dual_clip is delta",
            },
        ),
        CatalogueEntry(
            "gspo",
            "one ratio per sequence, clipped; its gradient is shared by the sequence's tokens",
            "per sequence: max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(mean_t (l "
            "- o)), A = mean_t A_t",
            "GSPO, arXiv 2507.18071, eq. 5 and 7",
            _clip(3e-4, 4e-4),
            peers={
                "verl": "gspo, where a row has one advantage",
                "TRL": "importance_sampling_level=sequence with loss_type grpo",
            },
        ),
        CatalogueEntry(
            "gspo_token",
            "GSPO's sequence ratio, each token with an advantage and a gradient of its own",
            "max(-A s_t, -A clip(s_t, 1 - clip_low, 1 + clip_high)), s_t = sg(s) exp(l - sg(l)), "
            "s = exp(mean_t (l - o))",
            "GSPO, arXiv 2507.18071, eq. 13 and 14",
            _clip(3e-4, 4e-4),
            peers={
                "verl": "gspo",
                "TRL": "importance_sampling_level=sequence with loss_type dapo (no per-token "
                "advantages)",
            },
        ),
        CatalogueEntry(
            "gmpo",
            "the geometric mean of the token ratios, each clipped on its pessimistic side",
            "per sequence: -A exp(mean_t c_t), c_t = min(l - o, clip_high) if A > 0, max(l - o, "
            "-clip_low) if A < 0; A = mean_t A_t",
            "GMPO, arXiv 2507.20673, eq. 4",
            (
                Hyperparameter(
                    "clip_low", 0.4, "a token's log-ratio counts from -clip_low on", low=0.0
                ),
                Hyperparameter(
                    "clip_high", 0.4, "a token's log-ratio counts up to clip_high", low=0.0
                ),
            ),
            peers={"verl": "geo_mean, bounds 0.2 unless set", "TRL": "trl.experimental.gmpo"},
        ),
        CatalogueEntry(
            "cispo",
            "REINFORCE weighted with the clipped ratio: no token loses its gradient",
            "-sg(clip(r, 1 - clip_low, 1 + clip_high)) A l",
            "CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5 (no lower bound: clip_low = 1)",
            _clip(1.0, 4.0),
            peers={
                "verl": "cispo",
                "TRL": "loss_type cispo: no lower bound, epsilon_high is the largest ratio (5.0 "
                "is our 4.0)",
            },
        ),
        CatalogueEntry(
            "sapo",
            "a smooth gate instead of the clip, sharper for negative advantages",
            "-A sigmoid(tau (r - 1)) 4 / tau, tau = tau_pos if A > 0 else tau_neg",
            "SAPO, arXiv 2511.20347, eq. 5 and 6",
            (
                Hyperparameter(
                    "tau_pos", 1.0, "steepness of the gate where A > 0", low=0.0, low_allowed=False
                ),
                Hyperparameter(
                    "tau_neg", 1.05, "steepness of the gate elsewhere", low=0.0, low_allowed=False
                ),
            ),
            peers={"verl": "sapo", "TRL": "loss_type sapo"},
        ),
        CatalogueEntry(
            "dppo_tv",
            "trains a token unless its probability has already moved too far in the direction of "
            "its advantage",
            "-A sg(min(r, cap)) l where e^l - e^o <= clip_high (A > 0) or e^l - e^o >= -clip_low "
            "(A <= 0), else 0",
            "DPPO, arXiv 2602.04879 (binary total variation)",
            _thresholds("change of the token's probability", 0.15),
            peers={
                "verl": "dppo_tv; cap is clip_ratio_c",
                "prime-rl": "its default loss, 0.2 on both sides",
            },
        ),
        CatalogueEntry(
            "dppo_kl",
            "DPPO with the KL divergence of 'this token or another' as the measure",
            "-A sg(min(r, cap)) l where KL <= clip_high or e^l <= e^o (A > 0), KL <= clip_low or "
            "e^l >= e^o (A <= 0), else 0;"
            " KL = P (o - l) + (1 - P) log((1 - P) / (1 - e^l)), P = e^o",
            "DPPO, arXiv 2602.04879 (binary KL)",
            _thresholds("KL divergence of the token's probability", 0.05),
            peers={"verl": "dppo_kl; cap is clip_ratio_c"},
        ),
        CatalogueEntry(
            "dro",
            "policy gradient with a quadratic pull towards the old policy, no clip",
            "-(A l - beta / 2 (l - o)^2)",
            "Direct Reward Optimisation, arXiv 2405.19107, with the advantage instead of r - V",
            (Hyperparameter("beta", None, "strength of the pull", low=0.0, low_allowed=False),),
            peers={"verl": "dro with dro_beta", "Tinker": "dro"},
        ),
        CatalogueEntry(
            "gpg",
            "the plain policy gradient, to be used with GPG's advantages",
            "-A l",
            "GPG, arXiv 2504.02546, eq. 6",
            peers={"verl": "gpg"},
        ),
        CatalogueEntry(
            "reinforce",
            "the plain policy gradient; off-policy with an importance correction",
            "-A l",
            "Williams, 'Simple statistical gradient-following algorithms' (1992), eq. 5",
            peers={
                "verl": "bypass_mode with loss_type reinforce (its weights follow the current "
                "policy)",
                "Tinker": "importance_sampling",
            },
        ),
        CatalogueEntry(
            "clip_cov",
            "PPO without the tokens of largest covariance of log-prob and advantage, which reduce "
            "entropy most",
            "PPO's clipped loss; 0 for the max(1, fraction N) unclipped tokens of largest low < "
            "cov < high,"
            " cov = (A - mean A) (l - mean l), means over the N trained tokens",
            "Clip-Cov, arXiv 2505.22617, eq. 11 and 12; the paper draws at random between the "
            "bounds, here the largest are chosen",
            (
                *_clip(0.2, 0.2),
                _FRACTION,
                Hyperparameter("low", 1.0, "tokens above this covariance are candidates"),
                Hyperparameter("high", 5.0, "tokens below this covariance are candidates"),
            ),
            peers={"verl": "clip_cov"},
        ),
        CatalogueEntry(
            "kl_cov",
            "unclipped PPO with a pull towards the old policy on the tokens of largest covariance",
            "-A r + coef |l - o| for the max(1, fraction N) tokens of largest cov = (A - mean A) "
            "(l - mean l), -A r elsewhere",
            "KL-Cov, arXiv 2505.22617, eq. 13 and 14",
            (_FRACTION, Hyperparameter("coef", 1.0, "strength of the pull", low=0.0)),
            peers={"verl": "kl_cov; coef is ppo_kl_coef"},
        ),
        CatalogueEntry(
            "minirl",
            "REINFORCE weighted with the ratio; tokens outside the band in the direction of their "
            "advantage are dropped, also from the denominator",
            "-sg(r) A l for tokens in the band, 0 for those with r > 1 + (clip_low + clip_high) "
            "k, A > 0, or r < 1 - clip_low k, A < 0;"
            " k = 1 if strict_in_bound else cap_ratio. Over kept tokens: token-mean if "
            "token_level_loss, else mean over sequences of their"
            " token mean, or sum if skip_length_normalization",
            "MiniRL, arXiv 2512.01374; band and denominators: AgentCPM-Explore, AgentRL's arl.py",
            (
                Hyperparameter(
                    "token_level_loss",
                    True,
                    "mean over all kept tokens (aggregation token-mean), not first per sequence",
                ),
                Hyperparameter("strict_in_bound", False, "the band is not widened by cap_ratio"),
                Hyperparameter(
                    "skip_length_normalization",
                    False,
                    "sum over a sequence's tokens (aggregation seq-mean-token-sum) instead of "
                    "their mean",
                ),
                Hyperparameter(
                    "clip_low", 0.2, "half-width of the band below 1, before widening", low=0.0
                ),
                Hyperparameter(
                    "clip_high",
                    0.1,
                    "what the band has above 1 beyond clip_low, before widening",
                    low=0.0,
                ),
                Hyperparameter(
                    "cap_ratio",
                    4.0,
                    "widens the band, unless strict_in_bound",
                    low=0.0,
                    low_allowed=False,
                ),
            ),
            peers={
                "AgentRL": "loss_calculater MINIRL; its o is the engine's log-prob, its "
                "denominators are per micro-batch"
            },
        ),
        CatalogueEntry(
            "decoupled_ppo",
            "PPO around a proximal policy, with importance weights from the sampling policy to "
            "the proximal one",
            "w max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(l - p), w = exp(p - "
            "q), bounded by cap",
            "Hilton et al., arXiv 2110.00641, eq. 5; AReaL, arXiv 2505.24298, eq. 5",
            (
                *_clip(0.2, 0.2),
                Hyperparameter("cap", 5.0, "largest w", low=0.0, low_allowed=False),
                Hyperparameter(
                    "mode",
                    "clamp",
                    "what happens to w above cap: min(w, cap), or 0",
                    choices=("clamp", "mask"),
                ),
            ),
            needs=("proximal_logp", "rollout_logp"),
            peers={
                "AReaL": "use_decoupled_loss with rejection_sampling; without the latter (its "
                "default) w is left out"
            },
        ),
        CatalogueEntry(
            FUNCTION,
            "the loss that your own function computes (algorithm.loss_function)",
            "L_t = loss(inputs)_t, from the tokens of its own row",
            "your function; docs/algorithms.md",
        ),
    ]
)

_ROW_LOSSES = ("gspo", "gmpo")
"""One loss per row, spread over its tokens."""


def check_importance(loss: str, name: str, cap: float, floor: float) -> None:
    """Raises ValueError for an unknown name, values out of range, a floor that would have no effect
    or keep no token, and a loss that already has such weights."""
    entry = f"policy loss {loss}"
    for hyper, value in zip(IMPORTANCE, (name, cap, floor), strict=True):
        hyper.check(entry, value)

    if floor and not name.endswith("_mis"):
        raise ValueError(
            f"{entry}: importance_floor={floor} does nothing with importance={name}: leave it "
            "out, or choose token_mis"
        )

    if floor > cap:
        raise ValueError(
            f"{entry}: importance_floor={floor} is above importance_cap={cap}, so no token would "
            "train: exchange them"
        )

    if loss == "decoupled_ppo" and name != "none":
        raise ValueError(
            f"{entry} weighs with proximal over rollout policy already: leave importance={name} "
            "out, or use ppo_clip"
        )


def required_aggregation(name: str, hyper: Mapping[str, Value]) -> str | None:
    """The only aggregation with which the loss matches its paper, or None where any aggregation
    does. `hyper` as from `catalogue.resolve`.

    gspo and gmpo: one loss per row, so a row must count once. minirl: the aggregation that its own
    switches name.
    """
    if name in _ROW_LOSSES:
        return "seq-mean-token-mean"
    if name != "minirl":
        return None
    if hyper["token_level_loss"]:
        return "token-mean"
    return "seq-mean-token-sum" if hyper["skip_length_normalization"] else "seq-mean-token-mean"


def check_aggregation(name: str, hyper: Mapping[str, Value], aggregation: str) -> None:
    """Raises ValueError where a loss, its hyper-parameters and an aggregation are inconsistent."""
    if name == "minirl" and hyper["token_level_loss"] and hyper["skip_length_normalization"]:
        raise ValueError(
            "policy loss minirl: skip_length_normalization does nothing with token_level_loss: "
            "set token_level_loss=False or leave it out"
        )

    needed = required_aggregation(name, hyper)
    if needed is None or aggregation == needed:
        return

    if name == "minirl":
        raise ValueError(
            f"policy loss minirl with these switches aggregates by {needed}, not {aggregation}: "
            f"choose aggregation={needed}, or change"
            " token_level_loss and skip_length_normalization"
        )

    instead = "gspo_token or ppo_clip" if name == "gspo" else "ppo_clip"
    raise ValueError(
        f"policy loss {name} has one ratio per sequence, and its gradient already carries "
        f"1/length: {aggregation} would weigh a sequence by"
        f" its tokens a second time and break the ratio. Choose aggregation={needed}, or "
        f"{instead} for a loss per token"
    )
