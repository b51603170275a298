"""Rebuilds deleted weights from the plans of the committed steps (resume.py)."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Collection, Sequence

import torch

from agentevo.config import RunConfig
from agentevo.errors import CheckpointError
from agentevo.models.compute.parameters import trained_weights
from agentevo.observability import LiveView
from agentevo.runs.folder.chain import KEY, OLDER_VERSION
from agentevo.runs.orchestration.cold_start import cold_start
from agentevo.runs.orchestration.components import AgentFunction, open_components
from agentevo.runs.orchestration.resume import replay_step
from agentevo.runs.orchestration.rollout_sources import SynchronousRollouts
from agentevo.runs.orchestration.trainers import make_trainer, make_trainers
from agentevo.training.checkpoint import Checkpoints
from agentevo.types import Task


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
