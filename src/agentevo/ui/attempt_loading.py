"""The attempt that a URL or a form names."""

from __future__ import annotations

from fastapi import Request

from agentevo.errors import AgentEvoError
from agentevo.event_loop import in_thread
from agentevo.store.records import StoredTrajectory
from agentevo.ui.attempts_page import reader_of
from agentevo.ui.context import NotFoundError, dashboard
from agentevo.ui.index.reader import IndexAway, IndexRow
from agentevo.ui.run_state import RunView


async def load_attempt(
    request: Request, view: RunView, name: str
) -> tuple[StoredTrajectory, IndexRow | None]:
    """An attempt from the store, and its row in the index. Raises NotFoundError."""
    reader, _ = await reader_of(request, view)
    try:
        row = await in_thread(reader.find, name)
    except IndexAway:
        row = None

    async with dashboard(request).stores.reading(view.source) as store:
        if row is not None:
            for _, stored in await store.written(range(row.seq, row.seq + 1), limit=1):
                if stored.trajectory.id == name:
                    return stored, row

        try:
            trajectory = await store.trajectory(name)
        except AgentEvoError as error:
            raise NotFoundError(f"There is no attempt {name[:200]} in this run's store.") from error

        async for stored in store.trajectories(group_id=trajectory.group_id):
            if stored.trajectory.id == name:
                return stored, row

    raise NotFoundError(f"The attempt {name[:200]} was deleted just now.")
