"""The trainer's share of `ui.py --only viewers`: a training of which half the steps are watched.

.venv/bin/python benchmarks/viewers.py --watch URL FILE      fifty people who look at the run
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

VIEWERS = 50
WATCHED = (0, 3)
"""Which of four turns are watched."""


class Turn(NamedTuple):
    """What was spent on some steps, in seconds."""

    cpu_s: float
    """Of the trainer's process."""
    wall_s: float
    dashboard_s: float
    """CPU, of the dashboard's process."""
    tokens: float
    """Trained on."""


def viewers(folder: Path, turns: int, steps: int) -> dict[str, Any]:
    """Watched and unwatched turns of one training of `frozen_lake`."""
    told = folder / "told"
    total = turns * steps
    words = ["train", "frozen_lake", f"run.dir={folder}/lake", f"trainer.steps={total}"]
    words += ["trainer.learning_rate=1e-9", "evaluation.tasks=8", "tracking.report=false"]
    words += ["checkpoint.every=1000", "evaluation.every=1000", "cold_start.episodes=64"]
    made: list[Turn] = []
    with contextlib.ExitStack() as stack:
        dashboard, url = started(stack, [sys.executable, "-m", "agentevo", "ui", str(folder)])
        watching, _ = started(stack, [sys.executable, __file__, "--watch", url, str(told)])
        trainer = psutil.Popen(
            [sys.executable, "-m", "agentevo", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        )
        stack.callback(trainer.wait)
        stack.callback(ended, trainer)

        last = until_steps(folder / "lake" / "metrics.jsonl", 0, trainer, dashboard)
        for number in range(turns):
            for process in (dashboard, watching):
                process.resume() if number % 4 in WATCHED else process.suspend()

            now = until_steps(
                folder / "lake" / "metrics.jsonl", (number + 1) * steps, trainer, dashboard
            )
            made.append(Turn(*(b - a for a, b in zip(last, now, strict=True))))
            last = now
            print("watched" if number % 4 in WATCHED else "alone", made[-1], flush=True)

        heard, asked = json.loads(told.read_text())

    if min(heard, asked) < VIEWERS * total / 4:
        raise SystemExit(f"the viewers have heard of {heard} changes only")

    fours = [made[first : first + 4] for first in range(4, turns, 4)]
    found: dict[str, Any] = {
        "turns": [turn._asdict() for turn in made],
        "told": heard,
        "asked": asked,
        "load_average": os.getloadavg(),
    }
    for name, field in (("", "cpu_s"), ("_wall", "wall_s")):
        found[f"step_time_with_viewers{name}"] = ratio(fours, field)
        draw = random.Random(0)
        again = sorted(ratio(draw.choices(fours, k=len(fours)), field) for _ in range(10_000))
        found[f"step_time_with_viewers{name}_interval"] = [again[250], again[-251]]

    return found


def ratio(fours: Sequence[Sequence[Turn]], field: str) -> float:
    """Seconds a token, watched to unwatched."""
    watched = [four[place] for four in fours for place in WATCHED]
    alone = [four[place] for four in fours for place in (1, 2)]
    spent, without = (sum(getattr(turn, field) for turn in kind) for kind in (watched, alone))
    tokens, others = (sum(turn.tokens for turn in kind) for kind in (watched, alone))
    return float(spent / tokens * others / without)


def started(stack: contextlib.ExitStack, program: list[str]) -> tuple[psutil.Popen, str]:
    """A process that has printed a URL, or `ready`, and is killed at the end."""
    process = psutil.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    stack.callback(process.wait)
    stack.callback(ended, process)
    for line in process.stdout:
        if found := re.search(r"http://\S+|ready", line):
            return process, found.group()
    raise SystemExit(f"{program[2:]} has ended")


def ended(process: psutil.Popen) -> None:
    """Ends it, if it has not yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def until_steps(
    path: Path, steps: int, trainer: psutil.Popen, dashboard: psutil.Popen
) -> tuple[float, float, float, float]:
    """CPU of the trainer, the clock, CPU of the dashboard and tokens that were trained on, once
    that many steps are there."""
    while True:
        lines = path.read_bytes().splitlines() if path.is_file() else []
        rows = [json.loads(line) for line in lines if b'"actor/' in line]
        if len(rows) >= steps:
            spent = [sum(one.cpu_times()[:2]) for one in (trainer, dashboard)]
            tokens = sum(row["perf/total_num_tokens"] for row in rows[:steps])
            return spent[0], time.perf_counter(), spent[1], tokens

        if trainer.poll() is not None:
            raise SystemExit(f"the training has ended before step {steps}: {trainer.returncode}")

        time.sleep(0.02)


async def watch(url: str, told: str) -> None:
    """VIEWERS people who look at the run's page, until this is killed."""
    os.nice(19)
    heard = 0
    asked = 0
    address = httpx.URL(url)
    base = str(address.copy_with(path="/", query=None)).rstrip("/")

    def note() -> None:
        path = Path(told)
        path.with_suffix(".new").write_text(json.dumps([heard, asked]))
        path.with_suffix(".new").rename(path)

    async def ask(client: httpx.AsyncClient, path: str) -> None:
        nonlocal asked
        answer = await client.get(path, headers={"HX-Request": "true"})
        answer.raise_for_status()
        asked += 1

    async def one(client: httpx.AsyncClient) -> None:
        nonlocal heard
        version = -1
        part_at = 0.0
        work_at = 0.0

        await client.get(url)
        while (await client.get("/runs/lake")).status_code != 200:
            await asyncio.sleep(1)

        while True:
            with contextlib.suppress(httpx.HTTPError):
                async with client.stream("GET", "/live", params={"run": "lake"}) as stream:
                    async for line in stream.aiter_lines():
                        if not line.startswith("data: "):
                            continue

                        heard += 1
                        news = json.loads(line.removeprefix("data: "))
                        now = time.monotonic()
                        if news["version"] != version and now - part_at >= 0.5:
                            version = news["version"]
                            part_at = now
                            await ask(client, "/runs/lake")

                        if now - work_at >= 3:
                            work_at = now
                            await ask(client, "/runs/lake/work")

                        note()

    async with contextlib.AsyncExitStack() as stack:
        options = {"base_url": base, "timeout": httpx.Timeout(60), "trust_env": False}
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(**options)) for _ in range(VIEWERS)
        ]
        note()
        print("ready", flush=True)
        await asyncio.gather(*map(one, clients))


if __name__ == "__main__":
    asyncio.run(watch(sys.argv[2], sys.argv[3]))
