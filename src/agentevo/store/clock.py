"""The two clocks of a store, for two purposes.

`wall` is Unix time, for people: when something was written. It may jump, and nothing depends on it.
`steady` times leases and back-offs. Every process that shares the store must read the same one, and
it must not be set:

    SQLite       the machine's monotonic clock: one for all its processes, which a change of date
                 or an NTP step leaves alone
    PostgreSQL   the server's `clock_timestamp()`
    MongoDB      the server's `localTime`

A server's clock can be set, and a monotonic one starts again at a reboot. Set forward, leases run
out early: the fencing id then refuses the first holder, and work is repeated, never counted twice.
Set back, a lease would seem to last for longer; so one that began in the future is restarted now,
and no lease has ever more time left than its own length. `lease_tasks` looks for those when it
finds nothing else.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

CLOCK_TOLERANCE_S = 1.0
"""A lease that begins more than this many seconds from now is from before the clock was set
back."""


class Now(NamedTuple):
    wall: float
    """Unix time in seconds."""
    steady: float
    """Seconds since an arbitrary moment."""


class Clock(Protocol):
    def now(self) -> Now: ...


class MachineClock:
    def now(self) -> Now:
        return Now(time.time(), time.monotonic())
