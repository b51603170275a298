"""The policies that a run of several agents makes, watched: whose weights have changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentevo.runs.orchestration import components


class Policies:
    """As they were at the start of the run, and as they are now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._make = components.make_policies
        self.models = {}
        self.before = {}
        monkeypatch.setattr(components, "make_policies", self)

    def __call__(self, *arguments: Any) -> Any:
        policies = self._make(*arguments)
        self.models = {name: policy.model for name, policy in policies.items()}
        self.before = {name: self.weights(name) for name in policies}
        return policies

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        state = self.models[name].state_dict()
        return {key: value.clone() for key, value in state.items()}

    def moved(self, name: str) -> set[str]:
        """Names of the weights that are not the same to the last bit."""
        now = self.weights(name)
        return {key for key, was in self.before[name].items() if not torch.equal(was, now[key])}

    def agents_moved(self) -> set[str]:
        """Whose weights are not the same."""
        return {name for name in self.before if self.moved(name)}
