"""The policy at a version: the weights after step `version`, from the first place that still has
them.

    checkpoints/step-VERSION
    weights/version-VERSION     the weights published to engines
    the recipe itself           version 0, without a cold start

`rebuild` makes deleted weights again from the plans of the committed steps (resume.py).
"""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from agentevo.config import RunConfig
from agentevo.config.named_agents import trained_policies, with_model_of
from agentevo.errors import CheckpointError, EngineError
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.models.compute.linear import drop_packed
from agentevo.models.compute.parameters import trained_weights
from agentevo.models.files.load import LoadedModel
from agentevo.observability import LiveView
from agentevo.runs.folder.chain import KEY, OLDER_VERSION
from agentevo.runs.orchestration.agent_policies import checkpoint_of
from agentevo.runs.orchestration.cold_start import cold_start
from agentevo.runs.orchestration.components import AgentFunction, load_policy, open_components
from agentevo.runs.orchestration.resume import replay_step
from agentevo.runs.orchestration.rollout_sources import SynchronousRollouts
from agentevo.runs.orchestration.trainers import make_trainer, make_trainers
from agentevo.training.checkpoint import Checkpoints
from agentevo.types import Task

Source: TypeAlias = Path | Mapping[str, torch.Tensor]
"""The folder of a checkpoint, or the trained parameters under the model's own names. An empty
mapping means the recipe's unchanged model."""


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
        """The weights of a version. Raises CheckpointError if they are not available."""
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


def load_version(config: RunConfig, source: Source, version: int, policy: str = "") -> LoadedModel:
    """The policy with the weights of `source`. Raises CheckpointError or ModelError if they can't
    be loaded."""
    config = with_model_of(config, policy)
    if isinstance(source, Path):
        return load_policy(config, source)

    loaded = load_policy(config)
    parameters = dict(loaded.model.named_parameters())
    wrong = [
        name
        for name, tensor in source.items()
        if name not in parameters or parameters[name].shape != tensor.shape
    ]
    if wrong:
        raise CheckpointError(
            f"the weights of version {version} are not of {config.model.name}: it has no "
            f"{wrong[0]} of that shape"
        )

    with torch.no_grad():
        for name, tensor in source.items():
            parameters[name].copy_(tensor)

    drop_packed(loaded.model)
    return loaded


async def rebuild(
    config: RunConfig,
    versions: Collection[int],
    *,
    agent: AgentFunction | None = None,
    tasks: Sequence[Task] | None = None,
    policy: str = "",
) -> AsyncGenerator[dict[str, torch.Tensor], None]:
    """Yields the trained parameters by name, for each of `versions` in order. It takes one pass
    from the nearest complete checkpoint before them. With several policies, the parameters are
    those of `policy`. They are the trainer's own tensors, so they are valid until the next
    iteration.

    The updates in between are repeated, without sampling. Raises CheckpointError for a version that
    was never committed.
    """
    if not versions:
        return

    checkpoints = Checkpoints(config.run_dir / "checkpoints", config.checkpoint.keep_last)
    start = checkpoints.newest_whole(min(versions))
    path = checkpoints.path(start) if start is not None else None
    async with open_components(config, agent=agent, tasks=tasks, checkpoint=path) as parts:
        steps = [
            record
            for record in await parts.store.steps(after=start or 0)
            if record.step <= max(versions)
        ]
        if any(KEY not in record.record for record in steps):
            raise CheckpointError(f"{config.run_dir}: {OLDER_VERSION}")

        unknown = sorted(set(versions) - {start or 0} - {record.step for record in steps})
        if unknown:
            raise CheckpointError(
                f"version {unknown[0]} can't be rebuilt: {config.run_dir} has no committed "
                f"step {unknown[0]}"
            )

        trainers = make_trainers(parts)
        trainer, source = make_trainer(parts, SynchronousRollouts(parts), trainers)
        if path is not None:
            trainer.load_state_dict(checkpoints.load(path)[0])
        else:
            if config.cold_start.episodes:
                cold_start(
                    parts,
                    LiveView(config.run.name, plain=True, stream=io.StringIO()),
                    lambda: False,
                    trainers,
                )
            trainer.begin()

        for version in range(start or 0, max(versions) + 1):
            if version > (start or 0):
                await replay_step(trainer, source, steps[version - (start or 0) - 1])
            if version in versions:
                yield trained_weights(parts.policies[policy].model if policy else parts.model)
