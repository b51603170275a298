"""What a run has in its hands: tasks and attempts by their place in the ledger, attempts being
played, by how many processes, and the engines that live.

The store is asked once for all viewers, and then left alone for as long as REST times what the
question took, so that it costs a run little however large its store is.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from agentevo.errors import AgentEvoError
from agentevo.event_loop import in_thread
from agentevo.inference.directory import EngineDirectory
from agentevo.store import Store
from agentevo.ui.run_state import RunView
from agentevo.ui.stores import Stores

FRESH_S = 2.0
REST = 10.0
MOST_CALLS = 2000
"""Of those under way that are counted."""
LIVING_S = 10.0
"""An engine whose heart has not beaten for longer does not answer."""
MOST_RUNS = 200


class LivingEngine(NamedTuple):
    """One whose heart beats."""

    name: str
    started_at: float
    version: int | None
    """Of the weights that it served at its last heartbeat; None where it does not say."""


@dataclass(frozen=True)
class QueuedWork:
    """Counts at one moment."""

    queued: int = 0
    claimed: int = 0
    poison: int = 0
    ready: int = 0
    reserved: int = 0
    trained: int = 0
    dropped: int = 0
    playing: int = 0
    """Attempts under way, MOST_CALLS at most."""
    is_cut: bool = False
    players: int = 0
    """Processes that play them."""
    engines: tuple[LivingEngine, ...] = ()
    """In processes of their own."""
    problem: str = ""


@dataclass
class _KnownWork:
    work: QueuedWork = field(default_factory=QueuedWork)
    asked_at: float = -1e9
    rests_s: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    directory: EngineDirectory | None = None


class Works:
    """See the module. Belongs to the dashboard's event loop."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._known: dict[str, _KnownWork] = {}

    async def of(self, view: RunView) -> QueuedWork:
        """What is known of a run, asked again if it is old. A store that is away is a sentence."""
        known = self._known.setdefault(view.key, _KnownWork())
        while len(self._known) > MOST_RUNS:
            del self._known[next(iter(self._known))]

        async with known.lock:
            if time.monotonic() - known.asked_at >= max(FRESH_S, known.rests_s):
                began = time.monotonic()
                known.work = await self._ask(view, known)
                known.asked_at = time.monotonic()
                known.rests_s = REST * (known.asked_at - began)

        return known.work

    async def _ask(self, view: RunView, known: _KnownWork) -> QueuedWork:
        engines = await in_thread(_engines, view, known)
        try:
            async with self._stores.reading(view.source) as store:
                return await _count(store, engines)
        except AgentEvoError as error:
            return QueuedWork(engines=engines, problem=str(error))


async def _count(store: Store, engines: tuple[LivingEngine, ...]) -> QueuedWork:
    counts = await store.counts()
    running = [one.call async for one in store.calls(state="running", limit=MOST_CALLS)]
    attempts = [call for call in running if call.parent is None]
    return QueuedWork(
        queued=counts["tasks/queued"],
        claimed=counts["tasks/leased"],
        poison=counts["tasks/poison"],
        ready=counts["trajectories/train/ready"],
        reserved=counts["trajectories/train/reserved"],
        trained=counts["trajectories/train/committed"],
        dropped=counts["trajectories/train/dropped"],
        playing=len(attempts),
        is_cut=len(running) == MOST_CALLS,
        players=len({call.id.rpartition("-")[0] for call in attempts}),
        engines=engines,
    )


def _engines(view: RunView, known: _KnownWork) -> tuple[LivingEngine, ...]:
    folder = view.source.file("engines")
    if folder is None or not folder.is_dir():
        return ()
    if known.directory is None:
        known.directory = EngineDirectory(folder)

    try:
        living = known.directory.living(LIVING_S)
        return tuple(LivingEngine(one.name, one.started_at, one.version) for one in living)
    except OSError:  # the folder has gone
        return ()
