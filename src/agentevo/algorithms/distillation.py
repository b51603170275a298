"""On-policy distillation: a teacher's log-probs of the sampled tokens as advantages.

The gradient of the reverse KL from the policy to the teacher, KL(p || q), is the policy gradient
with the advantage log q(y) - log p(y) for each token y that the policy drew (its k1 estimate with
the sign changed; Gu et al., MiniLLM, arXiv 2306.08543; Agarwal et al., GKD, arXiv 2306.13649). A
token's advantage does not contain the log-ratios of later tokens: the discount is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentevo.algorithms.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def teacher_advantage(
    teacher_logp: Tensor,
    logp: Tensor,
    mask: Tensor,
    *,
    clip: float | None = None,
    center: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """A = log q(y) - log p(y), limited to +-clip, and its metrics.

    `teacher_logp` and `logp` [S, T]: the log-probs of the sampled tokens y by the teacher q and by
    the policy p that drew them, in nats; mask [S, T]: trained tokens. A is [S, T] float64, without
    gradient, 0 where the mask is False. Raises ValueError for NaN or infinity at a trained token.
    """
    gap = torch.where(mask, teacher_logp.detach().double() - logp.detach().double(), 0.0)
    if not bool(torch.isfinite(gap).all()):
        row, place = (~torch.isfinite(gap)).nonzero()[0].tolist()
        raise ValueError(
            f"the log-probs of teacher and policy at [{row}, {place}] are "
            f"{float(teacher_logp[row, place])} and {float(logp[row, place])}: both must be finite "
            "where a token is trained"
        )

    limited = gap if clip is None else gap.clamp(-clip, clip)
    if center:
        limited = torch.where(mask, limited - limited[mask].mean(), 0.0)

    trained = gap[mask]
    metrics = {
        "distillation/reverse_kl": float(-trained.mean()),
        "distillation/teacher_logp": float(teacher_logp[mask].double().mean()),
    }
    if clip is not None:
        metrics["distillation/clipfrac"] = float((trained.abs() > clip).double().mean())

    return limited, metrics
