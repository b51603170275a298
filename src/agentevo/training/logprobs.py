"""Log-probs and entropies of chosen tokens from logits, with one saved copy of the logits instead of the several that autograd would
keep."""

from __future__ import annotations

from typing import Any

import torch


class _SelectedLogprobs(torch.autograd.Function):
    """Gradient, with z = logits / T, p = softmax(z), H its entropy: dlogp_y/dz = e_y - p and dH/dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits if temperature == 1.0 else logits / temperature  # [R, V]
        lse = torch.logsumexp(scaled, dim=-1)  # [R]
        weights = torch.exp(scaled - lse.unsqueeze(1))
        entropy = lse - (weights * scaled).sum(-1)  # [R]
        ctx.save_for_backward(logits, lse, entropy, rows, targets)
        ctx.temperature = temperature
        return scaled[rows, targets] - lse[rows], entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, lse, entropy, rows, targets = ctx.saved_tensors
        grad_logp, grad_entropy = grads
        logp = logits / ctx.temperature - lse.unsqueeze(1)
        grad = torch.exp(logp)
        row_sum = torch.zeros_like(lse).index_add_(0, rows, grad_logp)  # [R]
        if bool((grad_entropy != 0).any()):
            grad.mul_(-row_sum.unsqueeze(1) - grad_entropy.unsqueeze(1) * (logp + entropy.unsqueeze(1)))
        else:
            grad.mul_(-row_sum.unsqueeze(1))
        grad.index_put_((rows, targets), grad_logp, accumulate=True)
        return (grad if ctx.temperature == 1.0 else grad.div_(ctx.temperature)), None, None, None


def selected_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [R, V], rows [M] and targets [M] int64 -> log-probs [M] of token targets[m] under softmax(logits[rows[m]] / temperature), and
    the entropy [R] of each row, in nats. Both differentiable; computed in float32."""
    return _SelectedLogprobs.apply(logits.float(), rows, targets, temperature)
