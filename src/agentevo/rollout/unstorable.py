"""Attempts that no store can hold because of a value from an agent, environment or scorer. Only
such an attempt fails, and its group is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from agentevo.errors import StoreError, StoreUnavailableError, describe_error
from agentevo.store.codec import encode_trajectories
from agentevo.types import Trajectory


async def write_storable(
    trajectories: Sequence[Trajectory], write: Callable[[list[Trajectory]], Awaitable[object]]
) -> list[Trajectory]:
    """Writes the attempts with `write`, and returns them as they were written. An attempt that the
    store refuses is written as a failed one without turns."""
    attempts = list(trajectories)
    try:
        await write(attempts)
    except StoreUnavailableError:
        raise
    except StoreError:
        storable = [_storable_or_failed(attempt) for attempt in attempts]
        if storable == attempts:
            raise
        attempts = storable
        await write(attempts)

    return attempts


def _storable_or_failed(trajectory: Trajectory) -> Trajectory:
    try:
        encode_trajectories([trajectory], "train", 0)
    except StoreError as error:
        return replace(
            trajectory,
            turns=[],
            reward=0.0,
            reward_parts={},
            metrics={},
            success=False,
            status="failed",
            error=describe_error(error),
        )

    return trajectory
