"""What the store costs: trajectories per second written, leased and read, against peers, and
whether that stays so as it fills up.

    .venv/bin/python benchmarks/store.py [--backends sqlite,postgresql,mongodb]
        [--rows 1000,10000,100000] [--million] [--no-peers]

A trajectory has 8 turns and 4,096 tokens, half of them drawn by the policy. Everybody does what a
worker and a trainer do with a group of 8 attempts: lease its task, write the attempts (ours:
durably, in one transaction with the end of the lease), read them all back. Peers keep everything in
memory: TransferQueue in its own Ray actors, Agent Lightning's store in the caller's process
(`store_vs_agentlightning`) and, as its trainer runs it, behind its HTTP server (`..._http`). Ours
starts from `Trajectory` records with lists of numbers and gives such records back; TransferQueue
starts from tensors that are ready.

PostgreSQL is a throw-away cluster with its default durability. MongoDB is AGENTEVO_TEST_MONGODB's
server, else SecantusDB, which stands in for it in tests and says little of MongoDB's speed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from servers import MongoDB, PostgreSQL, unused_name

import peers
from agentevo.store import Store, open_store
from agentevo.types import Task, Trajectory, Turn
from figures import Figure, write_results
from machine import describe_machine

TURNS = 8
TOKENS = 4096
GROUP = 8
GROUPS = 16
"""Groups in one timed round."""
BACKENDS = ("sqlite", "postgresql", "mongodb")
ROWS = (1_000, 10_000, 100_000)
OPERATIONS = ("lease", "write", "ready", "read", "reserve", "commit")


def trajectory(name: str, group: str, rng: random.Random, *, tokens: int = TOKENS) -> Trajectory:
    """Ids as frequent as words are, log-probs mostly near 0, one version."""
    half = tokens // TURNS // 2

    def ids() -> list[int]:
        return [int(50_000 ** rng.random()) for _ in range(half)]

    def turn(index: int) -> Turn:
        return Turn(
            index=index,
            parent=index - 1 if index else None,
            prompt_ids=ids(),
            completion_ids=ids(),
            logprobs=[
                -rng.expovariate(1.0) if rng.random() < 0.5 else -1e-3 * rng.random()
                for _ in range(half)
            ],
            versions=[7] * half,
            finish_reason="stop",
        )

    return Trajectory(
        id=name,
        task_id=group,
        group_id=group,
        turns=[turn(i) for i in range(TURNS)],
        reward=rng.random(),
    )


def group_of(name: str, rng: random.Random, *, tokens: int = TOKENS) -> list[Trajectory]:
    return [trajectory(f"{name}#{i}", name, rng, tokens=tokens) for i in range(GROUP)]


class Stopwatch:
    """Seconds by the name of what was done."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in OPERATIONS}

    async def time(self, name: str, call: Awaitable[Any]) -> Any:
        started = time.perf_counter()
        result = await call
        self.seconds[name].append(time.perf_counter() - started)
        return result

    def total(self, name: str) -> float:
        return sum(self.seconds[name])


async def one_round(store: Store, number: int, first_step: int, rng: random.Random) -> Stopwatch:
    """GROUPS groups leased, written, found, read, reserved and committed."""
    watch = Stopwatch()
    names = [f"round{number}-{unused_name()}-{i}" for i in range(GROUPS)]
    groups = [group_of(name, rng) for name in names]

    await store.add_tasks([Task(id=name) for name in names])
    for members in groups:
        lease = await watch.time("lease", store.lease_task("bench", lease_s=600))
        await watch.time(
            "write", store.write_trajectories(members, split="train", step=1, lease=lease)
        )

    for step in range(first_step, first_step + GROUPS):
        (found,) = await watch.time("ready", store.ready_groups("train", size=GROUP, limit=1))

        async def read(group: str = found) -> list[Trajectory]:
            return [stored.trajectory async for stored in store.trajectories(group_id=group)]

        members = await watch.time("read", read())
        assert (
            len(members) == GROUP
            and sum(len(turn.completion_ids) for turn in members[0].turns) == TOKENS // 2
        )

        ids = [member.id for member in members]
        await watch.time("reserve", store.reserve(ids, step))
        await watch.time("commit", store.commit_step(step, {}, ids=ids))

    return watch


async def fill(store: Store, rows: int, rng: random.Random) -> int:
    """Up to `rows` small trajectories, committed in steps of 500; returns the last step."""
    counts = await store.counts()
    there = sum(count for name, count in counts.items() if name.startswith("trajectories/"))
    last = await store.last_step()
    step = last.step if last else 0
    while there < rows:
        batch = [
            trajectory(f"fill{there + i}", f"g{(there + i) // GROUP}", rng, tokens=16 * TURNS)
            for i in range(min(500, rows - there))
        ]
        tasks = [Task(id=f"fill{there}-{i}") for i in range(len(batch) // GROUP)]
        await store.add_tasks(tasks)
        await store.lease_tasks("fill", lease_s=1e9, limit=len(tasks))
        await store.write_trajectories(batch, split="train", step=step)
        step += 1
        ids = [one.id for one in batch]
        await store.reserve(ids, step)
        await store.commit_step(step, {})
        there += len(batch)

    return step


async def measure(name: str, url: str, rows: list[int], repeats: int) -> list[dict[str, Any]]:
    """For each size: trajectories per second by operation, medians of the rounds after one that
    warms up; on stderr as they come."""
    rng = random.Random(0)
    found = []
    async with await open_store(url, timeout_s=300) as store:
        for size in rows:
            step = await fill(store, size, rng)
            watches = [
                await one_round(store, number, step + 1 + number * GROUPS, rng)
                for number in range(repeats + 1)
            ][1:]
            per_s = {
                name: statistics.median(GROUP * GROUPS / watch.total(name) for watch in watches)
                for name in OPERATIONS
            }
            millis = {
                name: 1e3
                * statistics.median(second for watch in watches for second in watch.seconds[name])
                for name in OPERATIONS
            }
            columns = "".join(f"{op} {per_s[op]:8,.0f} ({millis[op]:6.1f})  " for op in OPERATIONS)
            print(f"  {name:11}{size:>9,} rows  {columns}", file=sys.stderr, flush=True)
            found.append(
                {
                    "rows": size,
                    "per_s": per_s,
                    "median_ms": millis,
                    "bytes": await store.size_bytes(),
                }
            )

    return found


def cycle(per_s: dict[str, float]) -> float:
    """Trajectories per second through lease, write and read one after the other."""
    return 1.0 / sum(1.0 / per_s[name] for name in ("lease", "write", "read"))


@contextmanager
def servers(backends: list[str]) -> Iterator[dict[str, Callable[[], str]]]:
    """Backend -> a maker of URLs of new stores."""
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-store-"))
        )
        urls: dict[str, Callable[[], str]] = {}
        for name in backends:
            if name == "sqlite":
                urls[name] = lambda: f"sqlite:///{folder / unused_name()}"
                continue

            kind = PostgreSQL if name == "postgresql" else MongoDB
            if reason := kind.why_not():
                print(f"left out: {name}: {reason}", file=sys.stderr)
                continue

            server = PostgreSQL() if name == "postgresql" else MongoDB(folder / "mongodb")
            if isinstance(server, PostgreSQL):
                server.start(durable=True)
                stack.callback(server.delete)
            else:
                stack.callback(server.stop)

            urls[name] = lambda server=server: server.url(unused_name())  # type: ignore[misc]

        yield urls


def over_backends(
    backends: list[str], rows: list[int], repeats: int
) -> tuple[dict[str, list[dict[str, Any]]], list[Figure]]:
    """For each backend that can be had here its rates by size (the table on stderr), and how flat
    they are."""
    results: dict[str, list[dict[str, Any]]] = {}
    figures = []
    print("trajectories/s (the median call in ms)", file=sys.stderr)

    with servers(backends) as urls:
        for name, make in urls.items():
            sizes = [size for size in rows if size <= 100_000 or name != "mongodb"]
            results[name] = asyncio.run(measure(name, make(), sizes, repeats))
            small = results[name][0]
            large = results[name][-1]
            if small is not large:
                shares = {op: small["median_ms"][op] / large["median_ms"][op] for op in OPERATIONS}
                raw = {"medians": shares, "unit": "of the speed", "sizes": results[name]}
                meaning = (
                    f"time of the operation that slowed down most at {small['rows']:,} "
                    f"rows over that at {large['rows']:,}"
                )
                figures.append(Figure(f"store_flatness_{name}", min(shares.values()), meaning, raw))

    return results, figures


PEERS = (peers.transfer_queue, peers.agent_lightning)


def against(
    peer: peers.Peer, results: dict[str, list[dict[str, Any]]], repeats: int
) -> list[Figure]:
    """The peer's rates, from rounds like ours, and the ratio of whole cycles: ours on SQLite, at
    the smallest size."""
    ours: dict[str, float] = results["sqlite"][0]["per_s"]
    found = []
    for mode in peer.description["modes"]:
        question = {
            "mode": mode,
            "groups": GROUPS,
            "group": GROUP,
            "turns": TURNS,
            "tokens": TOKENS,
        }
        rounds = [peer.ask(question) for _ in range(repeats + 1)][1:]
        theirs = {
            name: statistics.median(answer[name] for answer in rounds)
            for name in ("lease", "write", "read")
        }
        raw = {
            "medians": {"ours": ours, "theirs": theirs},
            "unit": "trajectories/s",
            "rounds": rounds,
        }
        found.append(
            Figure(
                f"store_vs_{mode}",
                cycle(ours) / cycle(theirs),
                f"lease, write and read on SQLite over {mode}",
                raw,
            )
        )
        print(
            f"  {mode:24}" + "".join(f"{name} {theirs[name]:8,.0f}  " for name in theirs),
            file=sys.stderr,
            flush=True,
        )

    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description="What the store costs, against peers and as it fills up."
    )
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument(
        "--rows",
        default=",".join(map(str, ROWS)),
        help="trajectories in the store while it is timed",
    )
    parser.add_argument(
        "--million",
        action="store_true",
        help="10^6 rows as well (SQLite and PostgreSQL; takes long)",
    )
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed rounds, after one that warms up"
    )
    args = parser.parse_args()
    rows = sorted(
        {int(size) for size in args.rows.split(",")} | ({1_000_000} if args.million else set())
    )

    backends = args.backends.split(",")
    if set(backends) - set(BACKENDS):
        parser.error(f"--backends takes some of {', '.join(BACKENDS)}")

    before = describe_machine()
    failures = {}
    described = {}
    results, figures = over_backends(backends, rows, args.repeats)
    for start in PEERS if "sqlite" in results and not args.no_peers else ():
        try:
            with start() as peer:
                described[peer.name] = peer.record()
                figures += against(peer, results, args.repeats)
        except peers.PeerError as error:
            failures[start.__name__] = str(error)
            print(f"failed {start.__name__}: {error}", file=sys.stderr, flush=True)

    for figure in figures:
        print(figure.line(), flush=True)

    if set(results) == set(BACKENDS) and not args.no_peers:
        print(
            f"raw numbers: {write_results(figures, failures, described, before, 'store')}",
            file=sys.stderr,
        )

    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
