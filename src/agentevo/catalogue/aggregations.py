"""Aggregations of the losses of many tokens to one number, by name."""

from __future__ import annotations

from agentevo.catalogue import CatalogueEntry, Hyperparameter, by_name

AGGREGATIONS = by_name(
    [
        CatalogueEntry(
            name="token-mean",
            meaning="every trained token counts the same, so long sequences weigh more",
            formula="sum_{i,t} m_it l_it / sum_{i,t} m_it",
            source="DAPO, arXiv 2503.14476, eq. 12",
            peers={"verl": "token-mean", "TRL": "loss_type dapo (bnpo: per micro-batch)"},
        ),
        CatalogueEntry(
            name="seq-mean-token-sum",
            meaning="mean over sequences of the sum over their tokens: the plain policy gradient",
            formula="1/N sum_i sum_t m_it l_it, N = sequences with trained tokens",
            source="REINFORCE; Dr.GRPO before its constant divisor, arXiv 2503.20783",
            peers={"verl": "seq-mean-token-sum", "TRL": "loss_type luspo"},
        ),
        CatalogueEntry(
            name="seq-mean-token-mean",
            meaning="every sequence counts the same, so tokens of long sequences weigh less",
            formula="1/N sum_i (sum_t m_it l_it / sum_t m_it), N = sequences with trained tokens",
            source="GRPO, arXiv 2402.03300, eq. 3",
            peers={"verl": "seq-mean-token-mean", "TRL": "loss_type grpo"},
        ),
        CatalogueEntry(
            name="seq-mean-token-sum-norm",
            meaning="mean over sequences of the sum over tokens, divided by one constant length: "
            "no length bias",
            formula="1/(N norm) sum_i sum_t m_it l_it, N = sequences with trained tokens",
            source="Dr.GRPO, arXiv 2503.20783, listing 1",
            hyper=(
                Hyperparameter(
                    "norm",
                    None,
                    "constant that every sequence's sum is divided by, e.g. the longest response "
                    "allowed",
                    0.0,
                    low_allowed=False,
                ),
            ),
            peers={
                "verl": "seq-mean-token-sum-norm with loss_scale_factor (before 0.9: no 1/N)",
                "TRL": "loss_type dr_grpo, norm = max_completion_length",
            },
        ),
        CatalogueEntry(
            name="per-trajectory-token-mean",
            meaning="every trajectory counts the same, however many rows (branches, turns) it "
            "was cut into",
            formula="1/K sum_k (sum_{i in k} sum_t m_it l_it / sum_{i in k} sum_t m_it), K = "
            "trajectories with trained tokens",
            source="AgentEvo; equals seq-mean-token-mean where each trajectory is one row",
        ),
    ]
)
