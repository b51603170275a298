"""Losses on preferred and rejected answers, by name."""

from __future__ import annotations

from agentevo.catalogue import CatalogueEntry, Hyperparameter, by_name

_PAIRS = ("chosen_logp", "rejected_logp")
_REFERENCE = ("ref_chosen_logp", "ref_rejected_logp")

PREFERENCE_LOSSES = by_name(
    [
        CatalogueEntry(
            name="dpo",
            meaning="the chosen answer should gain more probability over the reference than the "
            "rejected one",
            formula="-(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), h = (chosen - "
            "ref_chosen) - (rejected - ref_rejected)",
            source="arXiv 2305.18290, eq. 7; label smoothing s: Mitchell, A note on DPO with "
            "noisy preferences (2023)",
            hyper=(
                Hyperparameter(
                    "beta", 0.1, "strength of the pull to the reference", 0.0, low_allowed=False
                ),
                Hyperparameter(
                    "label_smoothing",
                    0.0,
                    "probability that a pair is labelled the wrong way round",
                    0.0,
                    0.5,
                ),
            ),
            needs=(*_PAIRS, *_REFERENCE),
            peers={"TRL": "DPOTrainer loss_type sigmoid"},
        ),
        CatalogueEntry(
            name="ipo",
            meaning="the gain over the rejected answer should be 1/(2 beta), not as large as "
            "possible",
            formula="(h - 1/(2 beta))^2, h as in dpo, summed log-probs (not length-normalised)",
            source="arXiv 2310.12036, eq. 17 (its tau is beta)",
            hyper=(
                Hyperparameter(
                    "beta",
                    0.1,
                    "strength of the pull to the reference: 1/(2 beta) is the wanted gain",
                    0.0,
                    low_allowed=False,
                ),
            ),
            needs=(*_PAIRS, *_REFERENCE),
            peers={"TRL": "DPOTrainer loss_type ipo"},
        ),
        CatalogueEntry(
            name="kto",
            meaning="single answers, each desirable or undesirable, against a shared baseline",
            formula="w_d sigmoid(-beta (r - z)) if desirable else w_u sigmoid(beta (r - z)), r = "
            "logp - ref_logp, z = max(kl_baseline, 0)",
            source="arXiv 2402.01306, eq. 8",
            hyper=(
                Hyperparameter(
                    "beta", 0.1, "strength of the pull to the reference", 0.0, low_allowed=False
                ),
                Hyperparameter("desirable_weight", 1.0, "weight of desirable answers", 0.0),
                Hyperparameter("undesirable_weight", 1.0, "weight of undesirable answers", 0.0),
            ),
            needs=("logp", "ref_logp", "desirable", "kl_baseline"),
            peers={"TRL": "KTOTrainer"},
        ),
        CatalogueEntry(
            name="orpo",
            meaning="supervised loss on the chosen answer and a penalty on the odds of the "
            "rejected one; no reference",
            formula="-chosen/n_c - coef log sigmoid(log odds_c - log odds_r), odds = P/(1 - P), "
            "P = exp(logp / length)",
            source="arXiv 2403.07691, eq. 6 and 7",
            hyper=(Hyperparameter("coef", 0.1, "weight of the odds-ratio term (lambda)", 0.0),),
            needs=(*_PAIRS, "chosen_lengths", "rejected_lengths"),
            peers={
                "TRL": "ORPOTrainer, its coef is called beta and its supervised loss is a mean "
                "over the batch's tokens"
            },
        ),
        CatalogueEntry(
            name="spin",
            meaning="self-play: DPO of the data's answers (chosen) against the opponent's own "
            "samples (rejected), with it as reference",
            formula="-log sigmoid(beta h), h as in dpo with the opponent's log-probs as reference",
            source="arXiv 2401.01335, eq. 4.7 (its lambda is beta) with the logistic loss",
            hyper=(
                Hyperparameter(
                    "beta", 0.1, "strength of the pull to the opponent", 0.0, low_allowed=False
                ),
            ),
            needs=(*_PAIRS, *_REFERENCE),
            peers={"verl": "recipe/spin: online DPO, chosen = the better of two samples"},
        ),
        CatalogueEntry(
            name="sppo",
            meaning="self-play: each answer's log-ratio should be its chance of winning less "
            "1/2, over beta",
            formula="(a - (p_c - 1/2)/beta)^2 + (b - (p_r - 1/2)/beta)^2, a = chosen - "
            "ref_chosen, b = rejected - ref_rejected, "
            "p = chance to beat the opponent (p_c = chosen_win_prob, else 1; p_r = "
            "rejected_win_prob, else 1 - p_c)",
            source="arXiv 2405.00675, its squared loss on the best and the worst of K samples "
            "(its eta is 1/beta)",
            hyper=(
                Hyperparameter(
                    "beta",
                    0.001,
                    "strength of the pull to the opponent; the paper's eta = 1000",
                    0.0,
                    low_allowed=False,
                ),
            ),
            needs=(*_PAIRS, *_REFERENCE),
            peers={
                "TRL": "DPOTrainer loss_type sppo_hard (p = 1)",
                "verl": "recipe/sppo: one sample at a time, rewards less their soft mean for p - "
                "1/2",
            },
        ),
        CatalogueEntry(
            name="rft",
            meaning="rejection-sampling fine-tuning: supervised loss on answers that were good; "
            "no rejected ones, no reference",
            formula="-chosen/n_c",
            source="arXiv 2308.01825 (RFT), 2304.06767 (RAFT), 2203.14465 (STaR): sample, keep "
            "the good, imitate them",
            needs=("chosen_logp", "chosen_lengths"),
            peers={
                "TRL": "SFTTrainer on the chosen answers, whose mean is over the batch's tokens "
                "and not over answers"
            },
        ),
    ]
)
