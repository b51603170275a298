"""Applies masks of the vocabulary to scores, so that tokens that a grammar forbids have no
probability."""

from __future__ import annotations

import torch

from agentevo.models.token_rows import LOWEST


def mask_scores(scores: torch.Tensor, masks: torch.Tensor, first: int = 0) -> torch.Tensor:
    """scores [R, C] of the tokens from `first` on, a multiple of 32, and masks [R, W] int32, a bit
    for each token of the vocabulary, lowest bit first -> the scores, LOWEST where the bit is 0;
    differentiable. Tokens beyond the masks are forbidden."""
    words = masks[:, first // 32 : -(-(first + scores.shape[1]) // 32)]
    places = torch.arange(32, dtype=torch.int32, device=masks.device)
    bits = (words.unsqueeze(-1) >> places).bitwise_and_(1).flatten(1)
    forbidden = bits[:, : scores.shape[1]] == 0
    if forbidden.shape[1] < scores.shape[1]:
        beyond = scores.shape[1] - forbidden.shape[1]
        forbidden = torch.nn.functional.pad(forbidden, (0, beyond), value=True)

    return scores.masked_fill(forbidden, LOWEST)
