"""The reference policy: what the policy is kept near to."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from agentevo.config import AlgorithmSection
from agentevo.training.packing import PackedBatch


class Reference:
    """A copy of the policy as it is now that stays, or follows it; see `AlgorithmSection.reference`.

    A policy that trains adapters (PEFT) is its own frozen reference with them turned off: no copy is kept.
    """

    def __init__(self, policy: PreTrainedModel, section: AlgorithmSection) -> None:
        self.section = section
        self.adapters_off = section.reference == "frozen" and hasattr(policy, "disable_adapter")
        self.model = policy if self.adapters_off else copy.deepcopy(policy).requires_grad_(False)

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """[M]"""
        model: Any = self.model
        with model.disable_adapter() if self.adapters_off else nullcontext():
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
            for ours, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
                ours.lerp_(theirs, share)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.adapters_off else self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict."""
        if not self.adapters_off:
            self.model.load_state_dict(state)
