"""Attention of some queries over some keys, together with the log of the sum of exponentials, which
merges several such parts.

Let a query's keys be split into parts with outputs o_i and l_i = log sum exp(scores). Over all
keys, l = log sum e^(l_i) and o = sum e^(l_i - l) o_i. The backward pass of a part needs only o and
l from the other parts: its probabilities are e^(scores - l) (FlashAttention-2, arXiv 2307.08691,
section 3.1; ring attention, arXiv 2310.01889, does the same).

Both kernels take q [B, H, Q, D], k and v [B, G, K, D] with H a multiple of G, any strides, and an
additive mask [B or 1, 1, Q, K] in the queries' dtype, 0 or HIDDEN, or None. `forward` returns the
output [B, H, Q, D] and the log-sum-exp [B, H, Q]. `backward` returns the gradients of q, k and v;
its `out` and `lse` are those over all parts.
"""

from __future__ import annotations

import torch

HIDDEN = -1e30
"""The additive mask of a key that is not seen. It is finite, so that a row that sees nothing has
weight 0 and not NaN."""
MATH_ROWS = 512
"""The number of queries whose scores `Math` holds at once."""


class Flash:
    """Attention with PyTorch's kernel for CPUs. It keeps no scores."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=self.scale
        )
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=self.scale
            )
        )
        return gradients


class Math:
    """Attention with matrix products and a softmax. It works on any device, and supports a cap of
    the scores, softcap * tanh(scores / softcap) (Gemma 2)."""

    def __init__(self, scale: float, softcap: float | None) -> None:
        self.scale = scale
        self.softcap = softcap

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = _repeat_keys(k, q)
        values = _repeat_keys(v, q)
        outs = []
        sums = []
        for rows in _row_slices(q):
            scores, _ = self._scores(q[:, :, rows], keys, mask, rows)
            lse = scores.logsumexp(-1)
            outs.append((scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ values)
            sums.append(lse)

        return torch.cat(outs, dim=2), torch.cat(sums, dim=2)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys = _repeat_keys(k, q)
        values = _repeat_keys(v, q)
        grad_q = []
        grad_k = torch.zeros_like(keys)
        grad_v = torch.zeros_like(values)
        for rows in _row_slices(q):
            queries = q[:, :, rows]
            above = grad[:, :, rows]
            scores, slope = self._scores(queries, keys, mask, rows)
            probs = (scores - lse[:, :, rows].unsqueeze(-1)).exp()
            grad_v += probs.to(v.dtype).transpose(-1, -2) @ above
            along = (above * out[:, :, rows]).sum(-1, keepdim=True)
            of_scores = probs * (above @ values.transpose(-1, -2) - along)
            of_scores = (of_scores if slope is None else of_scores * slope).to(q.dtype) * self.scale
            grad_q.append(of_scores @ keys)
            grad_k += of_scores.transpose(-1, -2) @ queries

        return torch.cat(grad_q, dim=2), _sum_over_heads(grad_k, k), _sum_over_heads(grad_v, v)

    def _scores(
        self, q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scores [B, H, Q, K] in at least float32, and their derivative with respect to the
        uncapped scores."""
        scores = (q @ keys.transpose(-1, -2)) * self.scale
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(scores / self.softcap)
            scores = self.softcap * bent
            slope = 1 - bent * bent

        if mask is not None:
            scores = scores + mask[:, :, rows]

        return scores, slope


def _row_slices(q: torch.Tensor) -> list[slice]:
    return [slice(start, start + MATH_ROWS) for start in range(0, q.shape[2], MATH_ROWS)]


def _repeat_keys(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[B, G, K, D] -> [B, H, K, D]. Repeats each head of k for all heads of q that share it."""
    return k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _sum_over_heads(grad: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The reverse of `_repeat_keys` for gradients."""
    return grad.view(k.shape[0], k.shape[1], -1, *k.shape[2:]).sum(dim=2)


Kernel = Flash | Math
