"""Computes log-probs and entropies of given tokens from logits. It saves one copy of the logits,
where autograd would save several. Temporaries have only a few rows, so they stay in the processor's
cache."""

from __future__ import annotations

from typing import Any

import torch

BLOCK_ROWS = 32


class _SelectedLogprobs(torch.autograd.Function):
    """The gradient, with z = logits / T, p = softmax(z), and H the entropy of p: dlogp_y/dz = e_y -
    p and dH/dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The largest score and the log of the sum are kept separate: in one number, a large score
        # would remove the digits that express the model's certainty.
        top, total, mean = (logits.new_empty(len(logits)) for _ in range(3))  # [R]
        for start in range(0, len(logits), BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            below = logits[block] / temperature  # [B, V]
            top[block] = below.amax(-1)
            weights = below.sub_(top[block].unsqueeze(1)).exp()
            total[block] = weights.sum(-1)
            mean[block] = weights.mul_(below).sum(-1) / total[block]

        ctx.save_for_backward(logits, top, total, mean, rows, targets)
        ctx.temperature = temperature
        picked = logits[rows, targets] / temperature
        log_total = total.log()
        return (picked - top[rows]) - log_total[rows], log_total - mean

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, top, total, mean, rows, targets = ctx.saved_tensors
        grad_logp, grad_entropy = grads
        row_sum = torch.zeros_like(total).index_add_(0, rows, grad_logp) / total  # [R]
        of_entropy = bool((grad_entropy != 0).any())
        grad = torch.empty_like(logits)
        for start in range(0, len(logits), BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            below = torch.div(logits[block], ctx.temperature).sub_(top[block].unsqueeze(1))
            torch.exp(below, out=grad[block])

            if of_entropy:
                factor = below.sub_(mean[block].unsqueeze(1)).mul_(
                    -(grad_entropy[block] / total[block]).unsqueeze(1)
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
    softmax(logits[rows[m]] / temperature), and the entropy [R] of each row, in nats. Both are
    differentiable, and computed in float32."""
    return _SelectedLogprobs.apply(logits.float(), rows, targets, temperature)


@torch.no_grad()
def sum_of_squares(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """logits [R, V] -> the sum over the vocabulary of p^2 with p = softmax(logits / temperature),
    which is the probability that two samples agree. [R] float32"""
    squares = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for start in range(0, len(logits), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        squares[block] = torch.softmax(logits[block].float() / temperature, -1).square_().sum(-1)
    return squares
