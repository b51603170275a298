"""What many samplers make of one store: 16, 128 and 1,024 of them against PostgreSQL.

    .venv/bin/python benchmarks/samplers.py [--samplers 16,128,1024] [--play-s 60] [--seconds 60]
        [--save]

A simulated sampler is a client of the store as a real one is, with a connection of its own: it
leases a task, renews its claim every 10 s, waits for as long as a group would take to play (drawn
from an exponential distribution with the mean --play-s, so that they do not march in step), and
writes a group of 8 attempts of 8 turns and 512 tokens, durably, in the transaction that completes
the task. One trainer feeds tasks, and reads, reserves and commits the groups as they become ready,
32 a step. No model computes anything.

    ratio store_samplers_N    groups written a second over those that N samplers would write if the
                              store took no time

PostgreSQL, the samplers (in four processes) and the trainer share this machine's cores, so what is
measured is an upper bound of the store's times.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from servers import PostgreSQL, unused_name

from agentevo.store import Store, open_store
from agentevo.types import Task
from figures import Figure, write_results
from machine import describe_machine
from store import GROUP, group_of

PROCESSES = 4
LEASE_S = 30.0
POLL_S = 1.0
STEP = 32
"""Groups of a step."""
TOKENS = 512

Times = dict[str, list[float]]


async def sampler(url: str, name: str, play_s: float, ends: float, since: float) -> Times:
    """One sampler until `ends`; the seconds of its calls that began after `since`."""
    times: Times = defaultdict(list)
    rng = random.Random(name)

    async def timed(what: str, call: Any) -> Any:
        started = time.time()
        result = await call
        if since <= started < ends:
            times[what].append(time.time() - started)
        return result

    async with await open_store(url, timeout_s=300, create=False) as store:
        await asyncio.sleep(rng.random() * play_s / 2)
        while time.time() < ends:
            lease = await timed("lease", store.lease_task(name, lease_s=LEASE_S))
            if lease is None:
                await asyncio.sleep(POLL_S)
                continue

            group = group_of(f"{lease.task.id}", rng, tokens=TOKENS)
            until = time.time() + rng.expovariate(1 / play_s)
            while (left := until - time.time()) > 0:
                await asyncio.sleep(min(left, LEASE_S / 3))
                lease = await timed("renew", store.renew(lease))

            await timed(
                "write", store.write_trajectories(group, split="train", step=1, lease=lease)
            )

    return times


def warm(_: int) -> None:
    """A process that has imported all it needs."""
    time.sleep(2)


def some_samplers(url: str, names: list[str], play_s: float, ends: float, since: float) -> Times:
    """Those of one process."""

    async def all_of_them() -> Times:
        times: Times = defaultdict(list)
        for of_one in await asyncio.gather(
            *(sampler(url, name, play_s, ends, since) for name in names)
        ):
            for what, seconds in of_one.items():
                times[what] += seconds
        return times

    return dict(asyncio.run(all_of_them()))


async def trainer(store: Store, count: int, ends: float, since: float) -> Times:
    """Feeds tasks and commits steps until `ends`."""
    times: Times = defaultdict(list)
    fed = step = 0
    while time.time() < ends:
        counts = await store.counts()
        wanted = 2 * count - counts.get("tasks/queued", 0)
        if wanted > 0:
            await store.add_tasks([Task(id=f"t{fed + n}") for n in range(wanted)])
            fed += wanted

        groups = await store.ready_groups("train", size=GROUP, limit=STEP)
        if len(groups) < STEP:
            await asyncio.sleep(0.5)
            continue

        started = time.time()
        step += 1
        ids = [
            stored.trajectory.id
            for group in groups
            async for stored in store.trajectories(group_id=group)
        ]
        read = time.time()
        await store.reserve(ids, step)
        await store.commit_step(step, {}, ids=ids)

        if started >= since:
            times["read a step"].append(read - started)
            times["commit a step"].append(time.time() - read)

    return times


async def measure(url: str, count: int, play_s: float, seconds: float) -> dict[str, Any]:
    """The calls of `seconds` after a ramp of 1.5 times the time that a group takes."""
    async with await open_store(url, timeout_s=300) as store:
        await store.add_tasks([Task(id=f"first{n}") for n in range(2 * count)])
        shares = [[f"s{n}" for n in range(p, count, PROCESSES)] for p in range(PROCESSES)]
        context = multiprocessing.get_context("spawn")
        with context.Pool(PROCESSES) as pool:
            await asyncio.to_thread(pool.map, warm, range(PROCESSES), 1)
            since = time.time() + 10 + 1.5 * play_s
            ends = since + seconds
            of_processes = [
                asyncio.to_thread(pool.apply, some_samplers, (url, names, play_s, ends, since))
                for names in shares
            ]
            *of_samplers, of_trainer = await asyncio.gather(
                *of_processes, trainer(store, count, ends, since)
            )

    times: Times = defaultdict(list)
    for found in (*of_samplers, of_trainer):
        for what, some in found.items():
            times[what] += some

    calls = {
        what: {
            "per_s": len(some) / seconds,
            "median_ms": 1e3 * statistics.median(some),
            "p99_ms": 1e3 * sorted(some)[int(0.99 * len(some))],
        }
        for what, some in sorted(times.items())
    }
    written = calls["write"]["per_s"]
    return {"samplers": count, "groups_per_s": written, "share": written * play_s / count, **calls}


def main() -> int:
    parser = argparse.ArgumentParser(description="What many samplers make of one store.")
    parser.add_argument("--samplers", default="16,128,1024")
    parser.add_argument("--play-s", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    before = describe_machine()

    figures = []
    server = PostgreSQL()
    try:
        server.start(durable=True, connections=1500)
        for count in map(int, args.samplers.split(",")):
            url = server.url(unused_name())
            found = asyncio.run(measure(url, count, args.play_s, args.seconds))
            print(found, file=sys.stderr, flush=True)
            meaning = f"groups written over those asked for, {count:,} samplers"
            raw = {"medians": found, "unit": "ms", "play_s": args.play_s}
            figures.append(Figure(f"store_samplers_{count}", found["share"], meaning, raw))
            print(figures[-1].line(), flush=True)
    finally:
        server.delete()

    if args.save:
        print(write_results(figures, {}, {}, before, "samplers"), file=sys.stderr)

    return 0


if __name__ == "__main__":
    sys.exit(main())
