"""Policy losses per token, and the weights that make one number of them.

All tensors are flat, [M]: one entry per trained token of a whole minibatch or of any part of it. Because the weights are set on the whole
minibatch, loss(minibatch) = sum over its parts of sum(weights * token_loss): the result does not depend on how it is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


def aggregation_weights(name: Aggregation, lengths: Sequence[int]) -> list[float]:
    """Weight of each token of each sequence, given the sequences' trained lengths (S of them); sequences without trained tokens weigh 0.

    token-mean: 1 / sum of lengths (DAPO, arXiv 2503.14476). seq-mean-token-sum: 1 / S. seq-mean-token-mean: 1 / (S * length) (GRPO).
    S counts the sequences that have trained tokens.
    """
    total, count = sum(lengths), sum(1 for n in lengths if n)
    if not total:
        return [0.0] * len(lengths)
    if name == "token-mean":
        return [1.0 / total if n else 0.0 for n in lengths]
    if name == "seq-mean-token-sum":
        return [1.0 / count if n else 0.0 for n in lengths]
    return [1.0 / (count * n) if n else 0.0 for n in lengths]


def ppo_clip(
    logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate, max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logp - old_logp).

    Returns token losses [M] and which tokens were clipped [M] bool. The log-ratio is bounded to +-20 so that nothing overflows.
    Source: PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476, eq. 10.
    """
    ratio = torch.exp((logp - old_logp).clamp(-20.0, 20.0))
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(plain, clipped), clipped > plain


def kl_k3(logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(policy || reference) per token, exp(d) - d - 1 with d = ref_logp - logp; never negative. [M]

    Source: Schulman, "Approximating KL divergence" (2020), k3; GRPO's choice, arXiv 2402.03300, eq. 4. d is bounded to +-20.
    """
    d = (ref_logp - logp).clamp(-20.0, 20.0)
    return torch.exp(d) - d - 1.0
