"""Samples tokens from logits: temperature, filters, sampling, and the log-prob under the sampling
distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from agentevo.models.grammar import unpack_mask
from agentevo.types import Alternatives, SamplingParams
from agentevo.types.penalties import PenaltyChanges

_BLOCK = 256


def filter_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits [V] of one row, already divided by the temperature; tokens outside top-k, top-p or
    min-p become -inf.

    They are applied in this order, each to the result of the previous one. The most likely token
    always stays.
    """
    if 0 < params.top_k < logits.shape[-1]:
        threshold = torch.topk(logits, params.top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))

    if params.top_p < 1:
        ordered, order = torch.sort(logits, descending=True, stable=True)
        probs = torch.softmax(ordered.double(), dim=-1)
        before = torch.cumsum(probs, dim=-1) - probs  # mass of the more likely tokens
        logits = logits.masked_fill(
            torch.zeros_like(logits, dtype=torch.bool).scatter(0, order, before >= params.top_p),
            float("-inf"),
        )

    if params.min_p > 0:
        floor = logits.max() + torch.log(torch.tensor(params.min_p, dtype=logits.dtype))
        logits = logits.masked_fill(logits < floor, float("-inf"))

    return logits


def keep_allowed(logits: torch.Tensor, masks: Sequence[np.ndarray | None]) -> None:
    """Sets the logits [B, V] of tokens that are not in their row's mask [W] to -inf, in place. A
    row without a mask is unchanged."""
    for row, mask in enumerate(masks):
        if mask is not None:
            forbidden = torch.from_numpy(~unpack_mask(mask, logits.shape[-1]))
            logits[row].masked_fill_(forbidden.to(logits.device), float("-inf"))


def penalise(logits: torch.Tensor, changes: Sequence[PenaltyChanges | None]) -> None:
    """Applies the penalties of each row to logits [B, V] float32, in place. A row without penalties
    is unchanged."""
    for row, change in enumerate(changes):
        if change is not None:
            tokens, offsets, repeated = (torch.from_numpy(a).to(logits.device) for a in change)
            z = logits[row, tokens]
            logits[row, tokens] = torch.where(z > 0, z / repeated, z * repeated) + offsets


def draw(
    logits: torch.Tensor,
    params: list[SamplingParams],
    uniforms: list[float],
    masks: Sequence[np.ndarray | None] = (),
    changes: Sequence[PenaltyChanges | None] = (),
) -> tuple[list[int], list[float]]:
    """Samples one token per row of logits [B, V], by inverting the cumulative distribution at
    `uniforms` [B] in [0, 1). Greedy at temperature 0. `masks`: for each row the allowed tokens, as
    in `keep_allowed`; empty if nothing is constrained. `changes`: see `penalise`; empty if no row
    has penalties.

    A row's result depends on that row alone. Returns token ids and natural log-probs. Overwrites
    `logits`.
    """
    return draw_with_alternatives(logits, params, uniforms, masks, changes)[:2]


def draw_with_alternatives(
    logits: torch.Tensor,
    params: list[SamplingParams],
    uniforms: list[float],
    masks: Sequence[np.ndarray | None] = (),
    changes: Sequence[PenaltyChanges | None] = (),
) -> tuple[list[int], list[float], list[Alternatives]]:
    """As `draw`. Also returns for each row the `top_logprobs` likeliest tokens of the sampling
    distribution; at temperature 0 only the sampled token."""
    logits = logits.float()
    penalise(logits, changes)
    keep_allowed(logits, masks)

    temperatures = [p.temperature for p in params]
    if any(t not in (0.0, 1.0) for t in temperatures):
        scale = torch.tensor([t or 1.0 for t in temperatures], device=logits.device)
        logits = logits / scale.unsqueeze(1)

    for row, p in enumerate(params):
        if p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p):
            logits[row] = filter_logits(logits[row], p)

    most_likely = logits.argmax(dim=-1) if not all(temperatures) else None
    if most_likely is not None and not any(temperatures):
        certain: list[int] = most_likely.tolist()
        greedy_alternatives = [
            [(t, 0.0)] if p.top_logprobs else [] for t, p in zip(certain, params, strict=True)
        ]
        return certain, [0.0] * len(params), greedy_alternatives

    weights = logits.sub_(
        logits.amax(dim=-1, keepdim=True)
    ).exp_()  # [B, V], in place, because the logits are large
    tokens, totals = _invert(
        weights, torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    )
    logprobs = (weights.gather(1, tokens.unsqueeze(1)).squeeze(1).double() / totals).log().float()
    if most_likely is not None:
        greedy = torch.tensor([t == 0 for t in temperatures], device=logits.device)
        tokens = torch.where(greedy, most_likely, tokens)
        logprobs = torch.where(greedy, torch.zeros_like(logprobs), logprobs)

    drawn: list[int] = tokens.tolist()
    if not any(p.top_logprobs for p in params):
        return drawn, logprobs.tolist(), [[] for _ in drawn]

    alternatives = [
        [(token, 0.0)] if p.top_logprobs and not p.temperature else _likeliest(row, total, p)
        for token, row, total, p in zip(drawn, weights, totals, params, strict=True)
    ]
    return drawn, logprobs.tolist(), alternatives


def _likeliest(weights: torch.Tensor, total: torch.Tensor, params: SamplingParams) -> Alternatives:
    """The likeliest tokens of one row of weights [V] that sum to `total`."""
    if not params.top_logprobs:
        return []
    top = torch.topk(weights, min(params.top_logprobs, len(weights)))
    logprobs = (top.values.double() / total).log().float().tolist()
    ids = top.indices.tolist()
    return [(t, logp) for t, logp in zip(ids, logprobs, strict=True) if logp > -math.inf]


def summed_weights(weights: torch.Tensor) -> torch.Tensor:
    """The sums [B] float64 of the rows of weights [B, V] float32, added in the same order as in
    `draw`."""
    batch, vocab = weights.shape
    if vocab % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, _BLOCK - vocab % _BLOCK))
    return _block_sums(weights.view(batch, -1, _BLOCK)).cumsum(-1)[:, -1]


def _block_sums(blocks: torch.Tensor) -> torch.Tensor:
    """The sums [B, blocks] float64 of weights in blocks [B, blocks, _BLOCK]."""
    return blocks.sum(-1).double()


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of the first token whose cumulative weight exceeds uniforms * total. Finds the
    block of 256 first, then the position in it.

    weights [B, V] float32, uniforms [B] float64 -> tokens [B], totals [B] float64. Sums run in
    float64.
    """
    batch, vocab = weights.shape
    if vocab % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, _BLOCK - vocab % _BLOCK))

    blocks = weights.view(batch, -1, _BLOCK)
    block_sums = _block_sums(blocks)
    block_ends = block_sums.cumsum(-1)
    totals = block_ends[:, -1]
    target = (uniforms * totals).unsqueeze(1)
    block = torch.searchsorted(block_ends, target, right=True).clamp_max(
        block_ends.shape[1] - 1
    )  # [B, 1]
    start = block_ends.gather(1, block) - block_sums.gather(1, block)
    inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, _BLOCK)).squeeze(1)  # [B, 256]
    place = torch.searchsorted(inside.double().cumsum(-1), target - start, right=True).clamp_max(
        _BLOCK - 1
    )

    # At the end of a block, rounding may select a token of weight 0: go back to the last token of
    # positive weight.
    candidates = torch.where(
        inside > 0, torch.arange(_BLOCK, device=weights.device).expand_as(inside), -1
    )
    drawable = torch.where(candidates <= place, candidates, -1).max(dim=-1, keepdim=True).values
    drawable = torch.where(drawable < 0, inside.argmax(-1, keepdim=True), drawable)
    return (block * _BLOCK + drawable).squeeze(1), totals
