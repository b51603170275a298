"""The reference policy: what the policy is kept near to."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from agentevo.config import AlgorithmSection
from agentevo.training.packing import PackedBatch
from agentevo.training.twin import load_weights, trained_parameters, twin_of, weights_of


class Reference:
    """The policy as it is now, that stays or follows it; see `AlgorithmSection.reference`. Of a policy with adapters (PEFT) only these are
    copied: the base is the same one."""

    def __init__(self, policy: PreTrainedModel, section: AlgorithmSection) -> None:
        self.section = section
        self.model = twin_of(policy)
        self.weights = trained_parameters(self.model)
        for parameter in self.weights.values():
            parameter.requires_grad_(False)

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """[M]"""
        return batch.forward(self.model)[0]

    @torch.no_grad()
    def follow(self, policy: PreTrainedModel, step: int) -> None:
        """After RL step `step`, counted from 1."""
        if self.section.reference == "frozen":
            return
        share = 1.0 - self.section.reference_decay
        if self.section.reference == "synced":
            share = float(step % self.section.reference_every == 0)
        if share:
            theirs = trained_parameters(policy)
            for name, ours in self.weights.items():
                ours.lerp_(theirs[name], share)

    def state_dict(self) -> dict[str, Any]:
        return weights_of(self.weights)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict."""
        load_weights(self.weights, state)
