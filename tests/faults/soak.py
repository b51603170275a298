"""The long version of these tests, run by hand (`make soak`): a run of everything with random kills
of random parts, for twenty minutes.

What must hold at the end is what tests/faults/test_kills.py asks, and besides: memory, open files,
files on the disk and leases don't grow, and when all parts have been asked to end, no process and
no lease is left.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import psutil
from fault_checks import Account, check
from fault_environment import SMALL, under
from fault_processes import Component, ForkServer

from agentevo.config import RunConfig, build_config
from agentevo.store.opening import open_store

KINDS = ("serve", "serve", "sample", "sample", "learn")
SAMPLE_S = 1.0
CALM_S = 5.0
"""Nobody is killed so shortly before the end: leases of the dead have run out by then
(rollout.lease_s is 1) and were taken over."""
GROWTH = 1.15
"""Memory in the last third of the time may be this many times that in the middle one; both are
means."""
SPREAD = {"open_files": 20, "stored_files": 20, "leases": 6}
"""What the most in the last third of the time may be above that in the middle one."""
PR_SET_CHILD_SUBREAPER = 36
"""prctl(2)."""


@dataclass(frozen=True)
class Footprint:
    """At one moment."""

    memory_mb: float
    """Resident, a part."""
    open_files: int
    """And sockets, of all parts."""
    stored_files: int
    """In the run's folder."""
    leases: int
    """Tasks that somebody holds, or died over."""

    @classmethod
    def of(cls, parts: Sequence[Component], config: RunConfig) -> Footprint:
        processes = [psutil.Process(part.process.pid) for part in parts]
        return cls(
            memory_mb=fmean(process.memory_info().rss / 1e6 for process in processes),
            open_files=sum(process.num_fds() for process in processes),
            stored_files=sum(len(names) for _, _, names in os.walk(config.run_dir)),
            leases=asyncio.run(_num_leases(config)),
        )


async def _num_leases(config: RunConfig) -> int:
    async with await open_store(config.store_url) as store:
        return len([task async for task in store.tasks(state="leased")])


def soak(minutes: float, every_s: float, policy: str, seed: int, folder: Path) -> dict[str, object]:
    """Kills a random part about every `every_s` seconds; returns the summary. Raises
    AssertionError."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
    rng = random.Random(seed)
    fork_server = ForkServer()
    ours = set(psutil.Process().children(recursive=True))

    config = build_config(
        SMALL,
        [
            "trainer.steps=1000000000",
            "evaluation.every=50",
            "rollout.engines=2",
            f"run.dir={folder / 'run'}",
            *under(policy),
        ],
    )
    parts = [
        Component(fork_server, kind, f"{kind}-{index}", config, folder)
        for index, kind in enumerate(KINDS)
    ]
    try:
        kills, seen = _attack(parts, config, minutes, every_s, rng)
        end(parts)
    finally:
        for part in parts:
            if part.process is not None and part.process.is_alive():
                part.kill()

    _, left = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - ours, timeout=1.0)
    assert not left, f"processes are left: {left}"

    found = check(config, complete=False)
    leased = [name for name, task in found.tasks.items() if task.state == "leased"]
    assert not leased, f"leases are left: {leased}"
    return {"minutes": minutes, "policy": policy, "kills": kills} | summary(found) | growth(seen)


def _attack(
    parts: Sequence[Component],
    config: RunConfig,
    minutes: float,
    every_s: float,
    rng: random.Random,
) -> tuple[int, list[Footprint]]:
    """(kills, a look at every second)."""
    for part in parts:
        part.start()

    seen: list[Footprint] = []
    kills = 0
    ends = time.monotonic() + 60.0 * minutes
    next_kill = time.monotonic() + every_s
    while time.monotonic() < ends:
        time.sleep(SAMPLE_S)
        for part in parts:
            assert part.process.is_alive(), (
                f"{part.name} ended by itself with {part.process.exitcode}:\n{part.tail()}"
            )

        with suppress(psutil.NoSuchProcess):  # the next look says whose
            seen.append(Footprint.of(parts, config))

        if next_kill <= time.monotonic() < ends - CALM_S:
            victim = rng.choice(parts)
            victim.kill()
            victim.start()
            kills += 1
            next_kill = time.monotonic() + rng.uniform(0.2, 1.8) * every_s

    return kills, seen


def end(parts: Sequence[Component]) -> None:
    """The trainer first, by Ctrl-C: it ends its step and saves."""
    *services, trainer = parts
    psutil.Process(trainer.process.pid).send_signal(signal.SIGINT)
    trainer.process.join(60.0)

    assert trainer.process.exitcode is not None, (
        f"{trainer.name} goes on after Ctrl-C:\n{trainer.tail()}"
    )
    assert trainer.tail(1) == "KeyboardInterrupt", trainer.tail()
    for part in reversed(services):
        code = part.end()
        assert code == 0, f"{part.name}, asked to end, ended with {code}:\n{part.tail()}"


def summary(found: Account) -> dict[str, object]:
    return {
        "steps": len(found.steps),
        "trained": sum(found.trained.values()),
        "ages": {str(age): count for age, count in sorted(found.ages.items())},
        "masked_tokens": found.audit.masked_tokens,
        "tasks": {state: count for state, count in found.audit.tasks.items() if count},
        "leases_expired": sum(task.num_expiries for task in found.tasks.values()),
    }


def growth(seen: Sequence[Footprint]) -> dict[str, list[float]]:
    """Mean memory, and the most of everything else, in the middle and in the last third of the
    time. Raises AssertionError."""
    third = len(seen) // 3
    rows = [[asdict(one) for one in part] for part in (seen[third : 2 * third], seen[2 * third :])]
    found = {name: [float(max(one[name] for one in part)) for part in rows] for name in SPREAD}
    for name, (middle, last) in found.items():
        assert last <= middle + SPREAD[name], f"{name} grow: at most {middle:g}, then {last:g}"

    memory = [fmean(one["memory_mb"] for one in part) for part in rows]
    assert memory[1] <= GROWTH * memory[0], (
        f"memory grows: {memory[0]:.0f} MB a process, then {memory[1]:.0f} MB"
    )
    return {"memory_mb": [round(one, 1) for one in memory]} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every-s", type=float, default=30.0, help="mean time between kills")
    parser.add_argument("--policy", default="wait", choices=["wait", "cancel", "mask", "correct"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the summary there, as JSON")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="agentevo-soak-"))
    result = soak(asked.minutes, asked.every_s, asked.policy, asked.seed, folder)
    print(json.dumps(result, indent=2))

    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
