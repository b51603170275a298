"""The reference policy, to which the policy stays close."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from agentevo.config import AlgorithmSection
from agentevo.errors import ModelError, TrainingError
from agentevo.models.compute.parameters import trained_parameters
from agentevo.models.compute.sharded import note_change
from agentevo.models.files.load import load_base
from agentevo.models.files.model_copy import copy_policy
from agentevo.models.vision.parts import has_tower
from agentevo.training.batching.packing import PackedBatch
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.training.roles.role_weights import load_weights, weights_of
from agentevo.training.sharding.layouts import layouts_of, whole_shape


class Reference:
    """A copy of the policy that stays as it is or follows the policy, or the base model under the
    policy's adapters; see `AlgorithmSection.reference`. For a policy with PEFT adapters only the
    adapters are copied; the base is shared."""

    def __init__(self, policy: PreTrainedModel, section: AlgorithmSection) -> None:
        """Raises TrainingError for reference=base and a policy without adapters."""
        self.section = section
        self.of_base = section.reference == "base"
        if self.of_base and not hasattr(policy, "disable_adapter"):
            raise TrainingError(
                "algorithm.reference=base is the policy with its adapters off, but it has none: "
                "set reference=frozen"
            )

        self.model = policy if self.of_base else copy_policy(policy)
        self.weights = {} if self.of_base else trained_parameters(self.model)
        if section.reference_model is not None:
            self._begin_as(section.reference_model)

        for parameter in self.weights.values():
            parameter.requires_grad_(False)

    def _begin_as(self, folder: str) -> None:
        """Raises ModelError for a model of another shape, TrainingError for adapters."""
        if self.of_base or hasattr(self.model, "disable_adapter"):
            raise TrainingError(
                "algorithm.reference_model is for whole models, and the policy has adapters: "
                "remove it, or choose algorithm.reference=base"
            )

        base = load_base(folder, {}, images=has_tower(self.model))
        base_parameters = dict(base.model.named_parameters())
        layouts = layouts_of(self.model)
        own_parameters = dict(self.model.named_parameters())
        missing = [
            name
            for name, parameter in own_parameters.items()
            if name not in base_parameters
            or base_parameters[name].shape != whole_shape(parameter, layouts.get(parameter))
        ]
        if missing:
            raise ModelError(
                f"algorithm.reference_model: {folder} has no {missing[0]} of the policy's shape: "
                f"give a model of the policy's architecture and size"
            )

        initial_weights = {name: base_parameters[name].detach() for name in self.weights}
        load_weights(self.weights, initial_weights, layouts)
        for name in own_parameters.keys() - self.weights.keys():
            self._own(name, base_parameters[name].detach())
        note_change(self.model)

    def _own(self, name: str, weight: torch.Tensor) -> None:
        """Gives the reference this weight in place of an untrained one, such as a frozen tower's,
        which it shares with the policy."""
        shared = self.model.get_parameter(name)
        weight = weight.to(shared)
        if not torch.equal(weight, shared):
            place, _, last = name.rpartition(".")
            parameter = torch.nn.Parameter(weight.clone(), requires_grad=False)
            setattr(self.model.get_submodule(place), last, parameter)

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """[M]: the reference's log-probs of the batch's trained tokens."""
        model: Any = self.model
        with model.disable_adapter() if self.of_base else nullcontext():
            return token_logprobs(self.model, batch)[0]

    @torch.no_grad()
    def follow(self, policy: PreTrainedModel, step: int) -> None:
        """Updates the reference after RL step `step`, counted from 1."""
        if self.section.reference in ("frozen", "base"):
            return

        share = 1.0 - self.section.reference_decay
        if self.section.reference == "synced":
            share = float(step % self.section.reference_every == 0)

        if share:
            policy_parameters = trained_parameters(policy)
            for name, parameter in self.weights.items():
                parameter.lerp_(policy_parameters[name], share)
            note_change(self.model)

    def state_dict(self) -> dict[str, Any]:
        return weights_of(self.weights, layouts_of(self.model))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict."""
        load_weights(self.weights, state, layouts_of(self.model))
        note_change(self.model)
