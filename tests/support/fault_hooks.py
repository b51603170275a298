"""Faults that are put into a process before it begins (`Launch.before`). What they need beside the
launch is in files beside the process's log, written by the test."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from functools import partial, wraps
from pathlib import Path
from typing import Any

from fault_processes import Launch

SHORT_S = 0.5
LATE_EVERY = 23
HOUR_S = 3600.0


def short_store_deadline(launch: Launch) -> None:
    """Calls of the store exceed their deadline after half a second."""
    from agentevo.runs.folder import store_opening
    from agentevo.store.opening import open_store

    store_opening.open_store = partial(open_store, timeout_s=SHORT_S)  # type: ignore[attr-defined]


def wall_clock_jumps(launch: Launch) -> None:
    """`time.time` is set to another hour some twenty times a second, forward and back."""
    true = time.time
    shift = [0.0]
    rng = random.Random(launch.name)

    def jump() -> None:
        while True:
            time.sleep(0.05)
            shift[0] = rng.uniform(-12, 12) * HOUR_S

    threading.Thread(target=jump, daemon=True).start()
    time.time = lambda: true() + shift[0]


def steady_clock_jumps(launch: Launch) -> None:
    """The clock of leases is shifted by the seconds in the file `clock`, for all processes alike,
    as when a server's clock is set or the machine reboots."""
    from agentevo.store import clock, sqlite

    place = launch.log.parent / "clock"

    class Shifted(clock.MachineClock):
        def now(self) -> clock.Now:
            now = super().now()
            return clock.Now(now.wall, now.steady + float(place.read_text()))

    sqlite.MachineClock = Shifted  # type: ignore[misc]


def set_clock(folder: Path, seconds: float) -> None:
    """Sets the shift of `steady_clock_jumps`."""
    staging = folder / "clock.new"
    staging.write_text(repr(seconds))
    os.replace(staging, folder / "clock")


def late_answers(launch: Launch) -> None:
    """Every 23rd completion takes longer than any deadline."""
    from agentevo.inference.embedded.torch_engine import TorchEngine

    generate = TorchEngine.generate
    count = [0]

    @wraps(generate)
    async def late(self: TorchEngine, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] % LATE_EVERY == 0:
            await asyncio.sleep(60.0)
        return await generate(self, *args, **kwargs)

    TorchEngine.generate = late  # type: ignore[method-assign]
