"""Clocks that are set: leases neither run out all at once without end, nor stay for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_attacks import finish
from fault_checks import check, expected_ids
from fault_hooks import HOUR_S, set_clock
from fault_processes import Component, PlannedKill
from slow import soak

from agentevo.config import RunConfig

pytestmark = pytest.mark.slow

Small = Callable[..., RunConfig]
Members = Callable[..., list[Component]]
APART = ("serve", "sample", "learn")


def test_the_date_changes_under_everybody(small: Small, members: Members) -> None:
    """By hours, twenty times a second. Nothing depends on it: no lease runs out, no attempt
    fails."""
    config = small("trainer.steps=6", "rollout.lease_s=20")
    finish(members(config, *APART, before="fault_hooks:wall_clock_jumps"))
    found = check(config)
    assert found.trained == expected_ids(config)
    assert not any(task.num_expiries or task.history for task in found.tasks.values())


@pytest.mark.parametrize("hours", [-5.0, *soak(5.0)], ids=["back", "forward"])
def test_the_clock_of_leases_is_set(
    hours: float, small: Small, members: Members, tmp_path: Path
) -> None:
    """A server's clock, or a reboot. Set forward, leases run out early and work is done again; set
    back, a dead sampler's lease would last for hours. Both while a sampler has just been killed
    over its work."""
    config = small("trainer.steps=6", "rollout.lease_s=2")
    set_clock(tmp_path, 0.0)
    serve, sample, learn = parts = members(config, *APART, before="fault_hooks:steady_clock_jumps")
    sample.start(PlannedKill("attempts written", 3, 0.0))
    seen = []

    def jump() -> None:
        seen.append(sample.reap())
        set_clock(tmp_path, hours * HOUR_S)
        seen.append(time.monotonic())

    thread = threading.Thread(target=jump)
    thread.start()
    serve.start()
    learn.start()
    thread.join()
    sample.start()
    learn.process.join(300.0)

    assert not learn.process.is_alive(), "\n".join(part.tail(15) for part in parts)
    assert (learn.reap(), sample.end(), serve.end()) == (0, 0, 0)
    assert seen[0] == -9

    found = check(config)
    assert found.trained == expected_ids(config)
    assert sum(task.num_expiries for task in found.tasks.values()) <= len(found.tasks)
