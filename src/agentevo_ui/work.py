"""The work of a run from its store: tasks and attempts by their state in the ledger, the running
attempts with their processes, and the leased tasks.

The store is queried once for all viewers and pages, and then not for REST times as long as the
query took. So the cost for a run is small even for a large store.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

from agentevo.errors import AgentEvoError
from agentevo.runs.folder.run_state import RunView
from agentevo.store import Store
from agentevo_ui.stores import Stores

FRESH_S = 2.0
REST = 10.0
WITHIN_S = 10.0
MAX_CALLS = 2_000
"""The maximum number of running calls that are counted."""
MAX_LEASED = 200
MAX_RUNS = 200


class PlayingProcess(NamedTuple):
    """A process that plays attempts at this moment."""

    recorder: str
    num_attempts: int
    oldest_at: float


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
    """The number of running attempts, at most MAX_CALLS."""
    is_cut: bool = False
    """Whether there are more."""
    players: tuple[PlayingProcess, ...] = ()
    """The processes, those with the most attempts first."""
    leased: tuple[tuple[str, int, int], ...] = ()
    """(task, how often it was leased, how often its worker was lost), at most MAX_LEASED."""
    problem: str = ""


@dataclass
class _CachedWork:
    work: QueuedWork = field(default_factory=QueuedWork)
    asked_at: float = -1e9
    rests_s: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Works:
    """The work of the shown runs. It belongs to the dashboard's event loop."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._works: dict[str, _CachedWork] = {}

    async def of(self, view: RunView) -> QueuedWork:
        """The work of a run, queried again if it is old. An unreachable store becomes a
        sentence."""
        entry = self._works.setdefault(view.key, _CachedWork())
        while len(self._works) > MAX_RUNS:
            del self._works[next(iter(self._works))]

        async with entry.lock:
            if time.monotonic() - entry.asked_at >= max(FRESH_S, entry.rests_s):
                started = time.monotonic()
                entry.work = await self._ask(view)
                entry.asked_at = time.monotonic()
                entry.rests_s = REST * (entry.asked_at - started)

        return entry.work

    async def _ask(self, view: RunView) -> QueuedWork:
        try:
            async with asyncio.timeout(WITHIN_S), self._stores.reading(view.source) as store:
                return await _count_work(store)
        except (AgentEvoError, TimeoutError) as error:
            why = str(error) or f"the store did not answer within {WITHIN_S:.0f} s"
            return QueuedWork(problem=why)


async def _count_work(store: Store) -> QueuedWork:
    counts = await store.counts()
    running = [
        stored.call
        async for stored in store.calls(state="running", limit=MAX_CALLS, newest_first=True)
    ]
    attempts = [call for call in running if call.parent is None]

    oldest: dict[str, float] = {}
    for call in attempts:
        recorder = call.id.rpartition("-")[0]
        oldest[recorder] = min(oldest.get(recorder, call.started_at), call.started_at)
    players = Counter(call.id.rpartition("-")[0] for call in attempts).most_common()

    leased = []
    async with aclosing(store.tasks(state="leased")) as listed:  # type: ignore[type-var]
        async for stored in listed:
            leased.append((stored.task.id, stored.num_leases, stored.num_expiries))
            if len(leased) >= MAX_LEASED:
                break

    return QueuedWork(
        queued=counts["tasks/queued"],
        claimed=counts["tasks/leased"],
        poison=counts["tasks/poison"],
        ready=counts["trajectories/train/ready"],
        reserved=counts["trajectories/train/reserved"],
        trained=counts["trajectories/train/committed"],
        dropped=counts["trajectories/train/dropped"],
        playing=len(attempts),
        is_cut=len(running) == MAX_CALLS,
        players=tuple(PlayingProcess(name, many, oldest[name]) for name, many in players),
        leased=tuple(leased),
    )
