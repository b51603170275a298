"""What the dashboard costs: its first page, every list at a million attempts, and a training that
fifty people watch.

    .venv/bin/python benchmarks/ui.py [--only first,pages,viewers] [--attempts N] [--save FILE]

    first      the runs page with style and scripts: seconds until all of it is there, and gzipped
               bytes
    pages      milliseconds of each list over a store that holds the attempts: SQLite, PostgreSQL.
               Rows are written by SQL; the index is made by the real code, columns of all and turns
               of as many as --read-s allows, and the search is timed over those
    viewers    ratio step_time_with_viewers: CPU seconds that the trainer's process spends on a
               token while a dashboard serves 50 people over those of it alone; `_wall`: seconds of
               the clock. One training, whose steps are watched and unwatched by turns (--turns of
               --steps each; unwatched ones have the dashboard and the viewers stopped, SIGSTOP), so
               that neither the seed nor the machine's speed of that hour tells one from the other;
               it learns next to nothing, so that its last attempts are as long as its first, and
               the order changes (watched, unwatched, unwatched, watched), so that a trend is on
               neither side. The ratio is that of all watched to all unwatched turns but the first
               four, and its interval (95%) comes from drawing such fours again, 10,000 times. Each
               viewer has a connection with the cookie, an open stream of news (GET /live), and
               asks as the page does: for its part after a new version, 0.5 s after the last one at
               the earliest, and for the card of work at a sign of the run, every 3 s at most.
               Trainer, dashboard and viewers are processes of their own. The viewers stand for
               other people's machines, so theirs has the lowest priority; the dashboard has the one
               that it takes by itself. The trainer's idle OpenMP threads sleep (OMP_WAIT_POLICY):
               spinning, they would count as work where a core is shared. 44 turns of a step take
               about ten minutes on two cores

A page is asked for three times before it is timed, as somebody who clicks has columns and
connections warm; the median of --repeats counts. On a busy machine the least of them (`_least_ms`)
is nearer to what the page takes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import os
import random
import re
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx

from viewers import viewers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

TOKEN = "the-token-of-the-benchmark"
STEP = 256
"""Attempts of a step, in groups of 8."""
EVALUATED = 50


@contextlib.asynccontextmanager
async def browsing(*words: str) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A client of the application, signed in, without a socket; and what its pages share."""
    from agentevo.runs.folder.sources import Sources
    from agentevo.runtime.event_loop import in_thread
    from agentevo_ui.access import Access
    from agentevo_ui.app import make_app

    app, shared = make_app(Sources(list(words)), Access(token=TOKEN))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1:1", timeout=120
    ) as client:
        try:
            await client.get("/", params={"token": TOKEN})
            yield client, shared
        finally:
            await shared.watcher.close()
            await shared.stores.close()
            await in_thread(shared.indexes.close)


async def first(folder: str) -> dict[str, float]:
    """Seconds and gzipped bytes of the first page with all that it loads."""
    async with browsing(folder) as (client, _):
        began = time.perf_counter()
        page = await client.get("/")
        wanted = {part.split('"')[0] for part in page.text.split('"/static')[1:]}
        answers = await asyncio.gather(*(client.get(f"/static{path}") for path in wanted))
        took = time.perf_counter() - began

    size = sum(len(gzip.compress(answer.content, 6)) for answer in (page, *answers))
    return {"first_load_s": took, "first_load_gzipped_bytes": size}


def rows_of(count: int) -> Iterator[dict[str, Any]]:
    """Rows of `trajectories` in their order: half of a step's groups are dropped, and in place of
    every EVALUATED-th step held-out tasks are attempted."""
    for number in range(count):
        step, member = divmod(number, STEP)
        is_held_out = step % EVALUATED == EVALUATED - 1
        group, attempt = divmod(member, 8)
        is_dropped = group % 2 == 1 and not is_held_out
        is_failed = number % 97 == 0
        state = "failed" if is_failed else "dropped" if is_dropped else "committed"
        task = f"held-{group}" if is_held_out else f"task-{(step * 32 + group) % 5000}"
        label = "greedy" if is_held_out else f"train-{group}"
        good = (number * 7919) % 10 < 4
        yield {
            "seq": number + 1,
            "id": f"{task}/{label}@{step + 1}#{attempt}",
            "task_id": task,
            "group_id": f"{task}/{label}@{step + 1}",
            "attempt": attempt,
            "split": "eval" if is_held_out else "train",
            "step": step + 1,
            "status": "failed" if is_failed else "completed",
            "state": state,
            "trained_step": step + 1 if state == "committed" else None,
            "drop_reason": "no-spread" if state == "dropped" else None,
            "reward": float(good) - (number % 13) / 100,
            "success": good,
            "error": "the episode took longer than agent.timeout_s=60 s" if is_failed else None,
            "truncated": number % 31 == 0,
            "metrics": json.dumps({"num_actions": number % 9, "reward_parts/rule": float(good)}),
            "num_turns": 1 + number % 3,
            "num_completion_tokens": 20 + (number * 31) % 400,
            "started_at": 1.7e9 + number,
            "duration_s": 1.0 + (number % 50) / 10,
            "written_at": 1.7e9 + number,
            "digest": b"0" * 16,
        }


def blobs() -> list[bytes]:
    """The turns of a few attempts, as the store packs them: 200 words each."""

    from agentevo.store.codec import encode_trajectories
    from agentevo.types import Message, Trajectory, Turn

    dice = random.Random(0)
    made = []
    words = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]
    for number in range(200):
        said = " ".join(dice.choices(words, k=100))
        turns = [
            Turn(
                index=index,
                parent=index - 1 if index else None,
                prompt_ids=[dice.randrange(5000) for _ in range(80)],
                completion_ids=[dice.randrange(5000) for _ in range(60)],
                logprobs=[-dice.expovariate(1) for _ in range(60)],
                versions=[1] * 60,
                finish_reason="stop",
                messages=[
                    Message("user", f"turn {index}: {said}"),
                    Message("assistant", said[:300]),
                ],
            )
            for index in range(2)
        ]
        one = Trajectory(id=f"x{number}", task_id="t", group_id="g", turns=turns)
        (encoded,) = encode_trajectories([one], "train", 1)
        made.append(encoded.data or b"")

    return made


def fill_sqlite(path: Path, count: int) -> None:
    """A store with `count` attempts; its tables were made by the real code."""
    packed = blobs()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")

        names = list(next(rows_of(1)))
        marks = ", ".join(f":{name}" for name in names)
        connection.executemany(
            f"INSERT INTO trajectories ({', '.join(names)}) VALUES ({marks})", rows_of(count)
        )
        connection.executemany(
            "INSERT INTO tokens VALUES (?, ?)",
            ((seq, packed[seq % len(packed)]) for seq in range(1, count + 1)),
        )
        connection.executemany("INSERT INTO steps VALUES (?, ?, ?, ?)", steps_of(count))
        connection.execute("COMMIT")


def steps_of(count: int) -> Iterator[tuple[int, str, int, float]]:
    for step in range(1, count // STEP + 1):
        record = json.dumps({"chain": str(step), "plan": {"dropped": {"no-spread": ["x"] * 128}}})
        yield step, record, STEP // 2, 1.7e9 + step * STEP


async def fill_postgresql(url: str, count: int) -> None:
    """The same, by COPY."""
    import asyncpg

    address, _, schema = url.partition("&schema=")
    packed = blobs()
    connection = await asyncpg.connect(address.replace("postgresql://", "postgres://"))
    names = list(next(rows_of(1)))
    try:
        await connection.copy_records_to_table(
            "trajectories",
            schema_name=schema,
            columns=names,
            records=(tuple(row.values()) for row in rows_of(count)),
            timeout=3000,
        )
        await connection.copy_records_to_table(
            "tokens",
            schema_name=schema,
            records=((seq, packed[seq % len(packed)]) for seq in range(1, count + 1)),
            timeout=3000,
        )
        await connection.copy_records_to_table(
            "steps", schema_name=schema, records=steps_of(count), timeout=600
        )
        await connection.execute(f"ANALYZE {schema}.trajectories")
    finally:
        await connection.close()


def paths(key: str, count: int) -> dict[str, str]:
    """Name -> path of each page that is timed."""
    run = f"/runs/{key}"
    middle = count // STEP // 2
    one = f"task-{((middle - 1) * 32 + 2) % 5000}/train-2%40{middle}%233"
    return {
        "attempts": f"{run}/attempts",
        "attempts_by_reward": f"{run}/attempts?order=best",
        "attempts_least_likely": f"{run}/attempts?order=unlikely",
        "attempts_filtered": f"{run}/attempts?state=dropped&outcome=success&tokens_from=200"
        "&order=longest",
        "attempts_failed": f"{run}/attempts?error=timeout&order=slowest",
        "search_one_word": f"{run}/attempts?q=bal",
        "search_two_words": f"{run}/attempts?q=bal+gut*&outcome=success",
        "search_nothing": f"{run}/attempts?q=centaur",
        "data": f"{run}/data",
        "data_hardest": f"{run}/data?order=hardest",
        "data_search": f"{run}/data?q=task-49",
        "evaluation": f"{run}/evaluation",
        "evaluation_two_steps": f"{run}/evaluation?from={EVALUATED}&to={10 * EVALUATED}",
        "step": f"{run}/steps/{middle}",
        "attempt": f"{run}/attempt?id={one}",
        "compare": f"{run}/attempts/compare?a={one}&b={one[:-1]}4",
    }


async def pages(url: str, count: int, read_s: float, repeats: int) -> dict[str, float]:
    """Milliseconds of each page, and how long the index took."""
    from agentevo_ui import shared_answers

    shared_answers.PATHS = re.compile(r"(?!)")  # or all but the first answer come from memory
    found: dict[str, float] = {}
    async with browsing(url) as (client, shared):
        key = (await client.get("/")).text.split('href="/runs/')[1].split('"')[0]
        began = time.perf_counter()
        while "is being made from the store" in (await client.get(f"/runs/{key}/attempts")).text:
            await asyncio.sleep(0.2)

        found["index_columns_s"] = time.perf_counter() - began
        began = time.perf_counter()
        left = count
        while left and time.perf_counter() - began < read_s:
            await asyncio.sleep(2)
            left = shared.indexes.state(url)[0].of

        found["index_read_attempts"] = count - left
        found["index_read_per_s"] = (count - left) / (time.perf_counter() - began)
        for name, path in paths(key, count).items():
            times = []
            for number in range(repeats + 3):
                begun = time.perf_counter()
                answer = await client.get(path)
                times.append(1000 * (time.perf_counter() - begun))
                if answer.status_code != 200:
                    raise SystemExit(f"{path}: {answer.status_code}: {answer.text[-500:]}")
                if number == 0:
                    found[f"{name}_first_ms"] = times[0]

            found[f"{name}_ms"] = statistics.median(times[3:])
            found[f"{name}_least_ms"] = min(times[3:])

    from agentevo_ui.index.database import cache_file

    found["index_bytes"] = cache_file(url).stat().st_size
    return found


async def measure_pages(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """By kind of store."""
    from agentevo.store import open_store

    found: dict[str, Any] = {}
    size = (arguments.attempts, arguments.read_s, arguments.repeats)
    for kind in arguments.stores.split(","):
        with contextlib.ExitStack() as stack:
            if kind == "sqlite":
                url = f"sqlite:///{folder / 'store.sqlite'}"
            else:
                from servers import PostgreSQL

                server = PostgreSQL()
                server.start()
                stack.callback(server.delete)
                url = server.url("bench")

            async with await open_store(url):
                pass

            began = time.perf_counter()
            if kind == "sqlite":
                fill_sqlite(folder / "store.sqlite", arguments.attempts)
            else:
                await fill_postgresql(url, arguments.attempts)

            print(f"{kind}: filled in {time.perf_counter() - began:.0f} s", flush=True)
            found[kind] = await pages(url, *size)
            print(kind, json.dumps(found[kind], indent=1), flush=True)

    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="first,pages,viewers")
    parser.add_argument("--attempts", type=int, default=1_000_000)
    parser.add_argument("--stores", default="sqlite,postgresql")
    parser.add_argument("--read-s", type=float, default=3600.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--turns", type=int, default=44)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--save", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    if arguments.turns % 4 or arguments.turns < 8:
        parser.error("--turns: 8, 12, 16, ...: they are compared by fours")

    results: dict[str, Any] = {"attempts": arguments.attempts}
    with tempfile.TemporaryDirectory(prefix="agentevo-bench-ui-") as name:
        os.environ["AGENTEVO_CACHE"] = f"{name}/cache"
        only = arguments.only.split(",")
        if "first" in only:
            results |= asyncio.run(first(str(ROOT)))
        if "pages" in only:
            results |= asyncio.run(measure_pages(arguments, Path(name)))
        if "viewers" in only:
            results |= viewers(Path(name), arguments.turns, arguments.steps)

    text = json.dumps(results, indent=1)
    print(text)
    if arguments.save is not None:
        arguments.save.write_text(text + "\n")


if __name__ == "__main__":
    main()
