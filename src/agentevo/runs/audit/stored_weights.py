"""The policy at a version: the weights after step `version`, from the first place that still has
them.

    checkpoints/step-VERSION
    weights/version-VERSION     the weights published to engines
    the recipe itself           version 0, without a cold start
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch

from agentevo.config import RunConfig
from agentevo.config.named_agents import trained_policies, with_model_of
from agentevo.errors import CheckpointError, EngineError
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.models.compute.linear import drop_packed
from agentevo.models.files.load import LoadedModel
from agentevo.runs.orchestration.agent_policies import checkpoint_of
from agentevo.runs.orchestration.components import load_policy
from agentevo.training.checkpoint import Checkpoints

Source: TypeAlias = Path | Mapping[str, torch.Tensor]
"""The folder of a checkpoint, or the trained parameters under the model's own names. An empty
mapping means the recipe's unchanged model."""
WeightsOf: TypeAlias = Callable[[int], Source]
"""Returns the weights of a version. Raises CheckpointError if they are not available."""


class StoredVersions:
    """The weights in the folder of a run, or of one of its policies if it has several
    (config/named_agents.py)."""

    def __init__(self, config: RunConfig, policy: str = "") -> None:
        self._config = config
        self._policy = policy
        self._has: dict[int, bool] = {}
        self._is_trained = not policy or policy in trained_policies(config)
        self._checkpoints = Checkpoints(config.run_dir / "checkpoints", config.checkpoint.keep_last)
        folder = config.run_dir / "weights"
        self._published = WeightsFolder(folder) if folder.is_dir() else None

    def available_versions(self) -> list[int]:
        """The available versions, in order."""
        if not self._is_trained:
            return [0]
        untaught = [0] if not self._config.cold_start.episodes else []
        published = self._published.versions() if self._published is not None else []
        return sorted({*self._checkpoints.steps(), *published, *untaught})

    def has(self, version: int) -> bool:
        """Whether `weights_of` has this version."""
        if version not in self._has:
            try:
                self.weights_of(version)
            except CheckpointError:
                self._has[version] = False
            else:
                self._has[version] = True

        return self._has[version]

    def weights_of(self, version: int) -> Source:
        """See WeightsOf."""
        if self._is_trained and version in self._checkpoints.steps():
            path = self._checkpoints.path(version)
            return checkpoint_of(path, self._config, self._policy) or path

        if self._published is not None and version in self._published.versions():
            try:
                weights: Mapping[str, torch.Tensor] = self._published.read(version)
            except EngineError as error:
                raise CheckpointError(str(error)) from error
            return weights

        if version in self.available_versions():
            return {}

        known_versions = ", ".join(map(str, self.available_versions())) or "none"
        raise CheckpointError(
            f"{self._config.run_dir} no longer has the weights of version {version} (available: "
            f"{known_versions}): rebuild them with "
            "--rebuild, choose a trajectory of an available version, or train with "
            "checkpoint.every=1 and a "
            "larger checkpoint.keep_last"
        )


class PolicyAt:
    """Loads the policy at one version after the other. Only one is in memory."""

    def __init__(self, config: RunConfig, weights_of: WeightsOf, policy: str = "") -> None:
        self._config = with_model_of(config, policy)
        self._weights_of = weights_of

    def load(self, version: int) -> LoadedModel:
        """Raises CheckpointError or ModelError if it is not available."""
        source = self._weights_of(version)
        if isinstance(source, Path):
            return load_policy(self._config, source)

        loaded = load_policy(self._config)
        parameters = dict(loaded.model.named_parameters())
        wrong = [
            name
            for name, tensor in source.items()
            if name not in parameters or parameters[name].shape != tensor.shape
        ]
        if wrong:
            raise CheckpointError(
                f"the weights of version {version} are not of {self._config.model.name}: it has "
                f"no {wrong[0]} of that shape"
            )

        with torch.no_grad():
            for name, tensor in source.items():
                parameters[name].copy_(tensor)

        drop_packed(loaded.model)
        return loaded
