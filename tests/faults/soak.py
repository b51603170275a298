"""The long version of these tests, run by hand (`make soak`): a run of everything with random kills of random parts, for twenty minutes.

What must hold at the end is what tests/faults/test_kills.py asks, and besides: memory, open files, processes and leases don't grow.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from statistics import fmean

import psutil
from fault_checks import check
from fault_lives import Component, Nursery
from fault_world import SMALL

from agentevo.config import RunConfig, build_config

SAMPLE_S = 1.0
GROWTH = 1.3
"""Memory in the last third of the time may be this many times that in the middle one."""
KINDS = ("serve", "serve", "sample", "sample", "learn")


def footprint(parts: list[Component]) -> tuple[float, int]:
    """(resident memory in MB, open files and sockets) of the living parts."""
    memory, files = 0.0, 0
    for part in parts:
        try:
            process = psutil.Process(part.process.pid)
            memory += process.memory_info().rss / 1e6
            files += process.num_fds()
        except psutil.NoSuchProcess:
            continue
    return memory / len(parts), files


def soak(minutes: float, every_s: float, policy: str, seed: int, folder: Path) -> dict[str, object]:
    """Kills a random part about every `every_s` seconds; returns the summary."""
    rng, nursery = random.Random(seed), Nursery()
    steps = [
        "trainer.steps=1000000000",
        "evaluation.every=50",
        f"rollout.policy={policy}",
        f"run.dir={folder / 'run'}",
        "rollout.engines=2",
    ]
    config = build_config(SMALL, steps)
    parts = [Component(nursery, kind, f"{kind}-{index}", config, folder) for index, kind in enumerate(KINDS)]
    seen: list[tuple[float, int]] = []
    kills = 0
    for part in parts:
        part.start()
    ends, next_kill = time.monotonic() + 60.0 * minutes, time.monotonic() + every_s
    while time.monotonic() < ends:
        time.sleep(SAMPLE_S)
        for part in parts:
            if not part.process.is_alive():
                raise SystemExit(f"{part.name} ended by itself with {part.process.exitcode}:\n{part.tail()}")
        seen.append(footprint(parts))
        if time.monotonic() >= next_kill:
            victim = rng.choice(parts)
            victim.kill()
            victim.start()
            kills += 1
            next_kill = time.monotonic() + rng.uniform(0.2, 1.8) * every_s
    for part in reversed(parts):  # the trainer first, by Ctrl-C: it ends its step and saves
        if part.kind == "learn":
            psutil.Process(part.process.pid).send_signal(2)
            part.process.join(60.0)
        else:
            part.end()
    return summary(config, seen, kills, minutes)


def summary(config: RunConfig, seen: list[tuple[float, int]], kills: int, minutes: float) -> dict[str, object]:
    """Checks what the run has come to. Raises AssertionError."""
    found = check(config, complete=False)
    third = len(seen) // 3
    memory = [fmean(one[0] for one in part) for part in (seen[third : 2 * third], seen[2 * third :])]
    files = [max(one[1] for one in part) for part in (seen[third : 2 * third], seen[2 * third :])]
    left = [one for one in psutil.Process().children(recursive=True) if one.parent() != psutil.Process()]
    assert memory[1] < GROWTH * memory[0], f"memory grows: {memory[0]:.0f} MB a process, then {memory[1]:.0f} MB"
    assert files[1] <= files[0] + 20, f"open files grow: at most {files[0]}, then {files[1]}"
    assert not left, f"processes are left: {left}"
    return {
        "minutes": minutes,
        "kills": kills,
        "steps": len(found.steps),
        "trained": sum(found.trained.values()),
        "ages": {str(age): count for age, count in sorted(found.ages.items())},
        "memory_mb": [round(one, 1) for one in memory],
        "open_files": files,
        "tasks": {state: count for state, count in found.audit.tasks.items() if count},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every-s", type=float, default=30.0, help="mean time between kills")
    parser.add_argument("--policy", default="wait", choices=["wait", "cancel", "mask"])
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
