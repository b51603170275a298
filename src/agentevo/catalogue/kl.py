"""Estimates of the divergence from the reference policy, and the controllers of their coefficient,
by name."""

from __future__ import annotations

from agentevo.catalogue import CatalogueEntry, Hyperparameter, by_name

_SCHULMAN = "Schulman, Approximating KL divergence (2020)"
_THROUGH = "with the gradient of k2, which is that of the KL itself under on-policy samples"

KL = by_name(
    [
        CatalogueEntry(
            "k1",
            "log-ratio: unbiased, may be negative",
            "d = logp - ref_logp",
            f"{_SCHULMAN}, k1",
            peers={"verl": "kl or k1"},
        ),
        CatalogueEntry(
            "k2",
            "half the squared log-ratio: biased, gradient is right on-policy",
            "d^2 / 2",
            f"{_SCHULMAN}, k2",
            peers={"verl": "mse or k2"},
        ),
        CatalogueEntry(
            "k3",
            "unbiased and never negative",
            "exp(-d) - 1 + d",
            f"{_SCHULMAN}, k3; GRPO, arXiv 2402.03300, eq. 4",
            peers={
                "verl": "low_var_kl or k3",
                "TRL": "the only one of GRPOTrainer (RLOOTrainer: k1 in the reward)",
            },
        ),
        CatalogueEntry("abs", "absolute log-ratio", "|d|", "verl", peers={"verl": "abs"}),
        CatalogueEntry(
            "k1+",
            f"the value of k1, {_THROUGH}",
            "sg(d) + d^2/2 - sg(d^2/2)",
            "verl; arXiv 2510.01555",
            peers={"verl": "k1+"},
        ),
        CatalogueEntry(
            "k2+",
            f"the value of k2, {_THROUGH}",
            "d^2 / 2: the same as k2",
            "verl",
            peers={"verl": "k2+"},
        ),
        CatalogueEntry(
            "k3+",
            f"the value of k3, {_THROUGH}",
            "sg(exp(-d) - 1 + d) + d^2/2 - sg(d^2/2)",
            "verl; arXiv 2510.01555",
            peers={"verl": "k3+"},
        ),
        CatalogueEntry(
            "abs+",
            f"the value of abs, {_THROUGH}",
            "sg(|d|) + d^2/2 - sg(d^2/2)",
            "verl",
            peers={"verl": "abs+"},
        ),
    ]
)

_COEF = Hyperparameter("coef", 0.001, "weight of the KL, at the start", 0.0)

KL_CONTROLLERS = by_name(
    [
        CatalogueEntry(
            "fixed",
            "the coefficient never changes",
            "coef",
            "verl",
            (_COEF,),
            peers={"verl": "kl_ctrl.type fixed", "TRL": "beta"},
        ),
        CatalogueEntry(
            "adaptive",
            "the coefficient grows while the KL is above its target and shrinks while below",
            "coef <- coef (1 + clip(kl/target - 1, -0.2, 0.2) min(n/horizon, 1)), n = sequences "
            "of the step",
            "Ziegler et al., arXiv 1909.08593, section 2.2",
            (
                _COEF,
                Hyperparameter("target", 0.1, "KL that is wanted", 0.0, low_allowed=False),
                Hyperparameter(
                    "horizon",
                    10000,
                    "number of sequences over which a deviation of 20% or more changes the "
                    "coefficient by 20%",
                    1,
                ),
            ),
            peers={"verl": "kl_ctrl.type adaptive, whose state is not checkpointed"},
        ),
    ]
)
