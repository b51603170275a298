"""Rewards for single tokens from a reward model: a Hugging Face token-classification model with one
output."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from agentevo.config import RewardModelSection
from agentevo.errors import TrainingError
from agentevo.training.batching.packing import PackedBatch
from agentevo.training.kernels.output_layer import token_scores


class TokenRewardModel:
    """A reward model that scores every trained token in its context, or each answer at its last
    token. It is never trained."""

    def __init__(self, model: PreTrainedModel, section: RewardModelSection) -> None:
        self.model = model.requires_grad_(False)
        self.section = section

    @torch.no_grad()
    def rewards(self, batch: PackedBatch) -> torch.Tensor:
        """[M] float32: coef times the model's output at the token itself; with at=last 0 before a
        sample's last trained token. Raises TrainingError for a batch with images."""
        if batch.images is not None:
            raise TrainingError(
                "reward_model.name: a token reward model reads text only, and attempts show "
                "images: remove it, or leave images out"
            )
        rewards = self.section.coef * token_scores(self.model, batch).float()
        if self.section.at == "all":
            return rewards

        last = batch.mask.sum(1)[batch.samples] - 1 == batch.places
        return torch.where(last, rewards, 0.0)
