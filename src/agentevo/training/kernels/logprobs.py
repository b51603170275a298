"""Log-probs and entropies of chosen tokens from logits: one saved copy of the logits instead of the
several that autograd would keep, and temporaries of a few rows, which stay in the processor's
cache."""

from __future__ import annotations

from typing import Any

import torch

BLOCK_ROWS = 32


class _SelectedLogprobs(torch.autograd.Function):
    """Gradient, with z = logits / T, p = softmax(z), H its entropy: dlogp_y/dz = e_y - p and dH/dz
    = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse, entropy = logits.new_empty(len(logits)), logits.new_empty(len(logits))  # [R]
        for start in range(0, len(logits), BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            scaled = logits[block] / temperature  # [B, V]
            top = scaled.amax(-1)
            weights = (scaled - top.unsqueeze(1)).exp_()
            total = weights.sum(-1)
            lse[block] = top + total.log()
            entropy[block] = lse[block] - weights.mul_(scaled).sum(-1) / total
        ctx.save_for_backward(logits, lse, entropy, rows, targets)
        ctx.temperature = temperature
        return logits[rows, targets] / temperature - lse[rows], entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, lse, entropy, rows, targets = ctx.saved_tensors
        grad_logp, grad_entropy = grads
        row_sum = torch.zeros_like(lse).index_add_(0, rows, grad_logp)  # [R]
        of_entropy = bool((grad_entropy != 0).any())
        grad = torch.empty_like(logits)
        for start in range(0, len(logits), BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            logp = torch.div(logits[block], ctx.temperature).sub_(lse[block].unsqueeze(1))
            torch.exp(logp, out=grad[block])
            if of_entropy:
                factor = logp.add_(entropy[block].unsqueeze(1)).mul_(
                    -grad_entropy[block].unsqueeze(1)
                )
                grad[block].mul_(factor.sub_(row_sum[block].unsqueeze(1)))
            else:
                grad[block].mul_(-row_sum[block].unsqueeze(1))
        grad.index_put_((rows, targets), grad_logp, accumulate=True)
        return (grad if ctx.temperature == 1.0 else grad.div_(ctx.temperature)), None, None, None


def selected_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [R, V], rows [M] and targets [M] int64 -> log-probs [M] of token targets[m] under
    softmax(logits[rows[m]] / temperature), and the entropy [R] of each row, in nats. Both
    differentiable; computed in float32."""
    return _SelectedLogprobs.apply(logits.float(), rows, targets, temperature)


@torch.no_grad()
def sum_of_squares(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """logits [R, V] -> sum over the vocabulary of p^2, p = softmax(logits / temperature): the
    chance that two draws agree. [R] float32"""
    squares = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for start in range(0, len(logits), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        squares[block] = torch.softmax(logits[block].float() / temperature, -1).square_().sum(-1)
    return squares
