"""The two clocks of a store, which have different purposes.

`wall` is Unix time, for people: when a row was written. It may jump, and nothing depends on it.
`steady` times leases and back-offs. All processes that share the store must read the same steady
clock, and nothing may set it:

    SQLite       the machine's monotonic clock: one for all its processes, which a change of date
                 or an NTP step leaves alone
    PostgreSQL   the server's `clock_timestamp()`
    MongoDB      the server's `localTime`

A server's clock can be set, and a monotonic clock starts again at a reboot. If the clock is set
forward, leases expire early. The fencing id then refuses the first holder, and work is repeated but
never counted twice. If the clock is set back, a lease would seem to last longer. So a lease that
began in the future restarts now, and no lease has more time left than its own length. `lease_tasks`
searches for such leases when no other task is available.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

CLOCK_TOLERANCE_S = 1.0
"""A lease that begins more than this many seconds in the future is from before the clock was set
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
