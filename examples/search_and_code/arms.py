"""Runs the arms of a comparison, each once for each seed in a process of its own, as many at a time
as there are cores, and prints their table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from stages import Shares, Size

Results = dict[str, Shares]
"""Line of the table -> shares of right answers."""


DEFAULT = Size()


@dataclasses.dataclass(frozen=True)
class Arm:
    """What makes some lines of a table."""

    name: str
    play: Callable[[Path, int, Size, int], Results]
    """Of a folder, a seed, the sizes, and the size of the world."""


def main(
    doc: str,
    file: Path,
    arms: Sequence[Arm],
    kinds: Sequence[str],
    world: int,
    size: Size = DEFAULT,
) -> int:
    """The command line of a comparison; its exit code. `size`: its defaults, and by its class which
    options there are."""
    names = [arm.name for arm in arms]
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs") / file.stem)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--one", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--world", type=int, default=world, help="things that questions are about")
    for one in dataclasses.fields(size):
        parser.add_argument(
            _option(one.name), type=type(one.default), default=getattr(size, one.name)
        )

    given = parser.parse_args()
    size = type(size)(**{one.name: getattr(given, one.name) for one in dataclasses.fields(size)})
    if given.one is not None:
        arm = next(one for one in arms if one.name == given.one)
        _play(arm, given.out, given.seeds[0], size, given.world)
        return 0

    words = [sys.executable, str(file), "--out", str(given.out), "--world", str(given.world)]
    for name, value in dataclasses.asdict(size).items():
        words += [_option(name), str(value)]

    jobs = [(name, seed) for name in given.only for seed in given.seeds]
    with ThreadPoolExecutor(given.at_once) as pool:
        ended = list(pool.map(lambda job: _run(words, *job), jobs))

    print(table(given.out, kinds))
    return int(not all(ended))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _run(words: Sequence[str], name: str, seed: int) -> bool:
    """One arm of one seed in a process of its own; whether it ended well."""
    done = subprocess.run(
        [*words, "--one", name, "--seeds", str(seed)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print(f"{name}, seed {seed}:\n{done.stderr[-4000:]}", file=sys.stderr, flush=True)
    return done.returncode == 0


def _play(arm: Arm, out: Path, seed: int, size: Size, world: int) -> None:
    began = time.monotonic()
    folder = out / f"{arm.name}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    results = arm.play(folder, seed, size, world)
    used = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = {
        "arm": arm.name,
        "seed": seed,
        "results": results,
        "size": dataclasses.asdict(size) | {"world": world},
        "minutes": (time.monotonic() - began) / 60,
        "cpu_minutes": sum(one.ru_utime + one.ru_stime for one in (used, children)) / 60,
        "made": made_with(),
    }
    (folder / "result.json").write_text(json.dumps(said, indent=1))


def made_with() -> dict[str, Any]:
    """When, on what and with which versions."""
    import torch
    import transformers

    import agentevo

    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "agentevo": agentevo.__version__,
    }


def table(out: Path, kinds: Sequence[str]) -> str:
    """Of all results under the folder: the mean over the seeds and their standard deviation, and
    each seed's share of all."""
    lines: dict[str, list[Shares]] = {}
    for path in sorted(out.glob("*/result.json")):
        for title, shares in json.loads(path.read_text())["results"].items():
            lines.setdefault(title, []).append(shares)

    rows = [f"| | {' | '.join(kinds)} | all, each seed |", "|---|" + "---|" * (len(kinds) + 1)]
    for title, of_seeds in lines.items():
        over_seeds = [_mean_and_spread([one[kind] for one in of_seeds]) for kind in kinds]
        each = ", ".join(f"{one['all']:.0%}" for one in of_seeds)
        rows.append(f"| {title} | {' | '.join(over_seeds)} | {each} |")

    return "\n".join(rows)


def _mean_and_spread(shares: Sequence[float]) -> str:
    """Of the seeds; one seed has no spread."""
    spread = f" ± {100 * stdev(shares):.0f}" if len(shares) > 1 else ""
    return f"{mean(shares):.0%}{spread}"
