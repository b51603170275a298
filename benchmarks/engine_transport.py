"""What it costs that an engine is another process: short requests per second through `agentevo
serve` over those in this process.

    .venv/bin/python benchmarks/engine_transport.py [--at-once 1,16,64,192] [--repeats 3] [--save]

A tiny random model on one thread, the same weights, prompts and seeds on both sides, which take
turns. One pair is `generate` of 3 tokens after a prompt of 41 and `release` of its conversation;
`transport_64` is pairs/s with 64 of them at once, remote over embedded. The remote engine has a
core of its own and the client another one, so a ratio above 1 is possible. Completions must be
equal, else there is no figure. The client's CPU milliseconds per pair are in the raw numbers and on
stderr; embedded, they are the engine's too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
import yaml

from agentevo.config import RunConfig, build_config
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.inference.engine import Engine
from agentevo.inference.serving.directory import EngineDirectory
from agentevo.inference.serving.remote import RemoteEngine
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.models.files.load import LoadedModel
from agentevo.runs.folder.identity import ensure_run_folder
from agentevo.runs.orchestration.components import load_policy
from agentevo.types import Completion, SamplingParams
from figures import Figure, NotComparableError, write_results
from machine import describe_machine

RECIPE: dict[str, Any] = {
    "model": {
        "name": "tiny",
        "tiny": {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "context_length": 256},
    },
    "environment": {"type": "coins"},
    "run": {"threads": 1},
}
AT_ONCE = (1, 16, 64, 192)
NEW_TOKENS = 3
START_S = 120.0


def prompt(number: int) -> list[int]:
    """A beginning that all have in common, as a system prompt is, and an end."""
    return [5, 6, 7, 8] * 10 + [number % 50]


async def load(
    engine: Engine, count: int, at_once: int
) -> tuple[dict[str, float], list[Completion]]:
    """Pairs/s and this process's CPU ms per pair of `count` pairs, `at_once` at a time; what they
    were answered."""
    places = asyncio.Semaphore(at_once)

    async def pair(number: int) -> Completion:
        async with places:
            params = SamplingParams(max_new_tokens=NEW_TOKENS, seed=number)
            completion = await engine.generate(
                prompt(number), params, session=f"s{number}", deadline_s=120
            )
            await engine.release(f"s{number}")
            return completion

    wall = time.perf_counter()
    cpu = time.process_time()
    found = await asyncio.gather(*(pair(number) for number in range(count)))
    return {
        "pairs_per_s": count / (time.perf_counter() - wall),
        "client_cpu_ms": (time.process_time() - cpu) / count * 1e3,
    }, found


@contextmanager
def served(folder: Path) -> Iterator[tuple[RunConfig, LoadedModel]]:
    """A run whose engine is a process of `agentevo serve`, for the time of the block."""
    config = build_config(RECIPE, [f"run.dir={folder / 'run'}"])
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    loaded = load_policy(config)
    ensure_run_folder(config)
    WeightsFolder(config.run_dir / "weights").write(0, loaded.model, keep=3)

    command = [sys.executable, "-m", "agentevo", "serve", str(recipe), f"run.dir={config.run_dir}"]
    process = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        deadline = time.monotonic() + START_S
        while not EngineDirectory(config.run_dir / "engines").living(5.0):
            if process.poll() is not None or time.monotonic() > deadline:
                raise NotComparableError(
                    f"{' '.join(command)} did not start serving (exit code {process.poll()})"
                )
            time.sleep(0.05)

        yield config, loaded
    finally:
        process.terminate()
        process.wait(30)


async def measure(
    config: RunConfig, loaded: LoadedModel, at_once: list[int], repeats: int
) -> list[Figure]:
    """`repeats` rounds after one that warms up. Raises NotComparableError where the two sides'
    tokens differ."""
    embedded = TorchEngine(loaded.model, loaded.tokenizer, config.engine)
    remote = RemoteEngine(EngineDirectory(config.run_dir / "engines"))
    figures = []
    try:
        for number in at_once:
            rounds: dict[str, list[dict[str, float]]] = {"remote": [], "embedded": []}
            for turn in range(repeats + 1):
                answers = []
                for name, engine in (("remote", remote), ("embedded", embedded)):
                    found, completions = await load(engine, max(400, 8 * number), number)
                    answers.append([one.ids for one in completions])
                    if turn:
                        rounds[name].append(found)

                if answers[0] != answers[1]:
                    raise NotComparableError(
                        f"{number} at once: the remote engine's tokens are not those of the "
                        "embedded one"
                    )

            medians = {
                name: {key: statistics.median(one[key] for one in found) for key in found[0]}
                for name, found in rounds.items()
            }
            value = medians["remote"]["pairs_per_s"] / medians["embedded"]["pairs_per_s"]
            raw = {"unit": "pairs/s, CPU ms per pair", "rounds": rounds, "medians": medians}
            meaning = (
                f"generate + release of {NEW_TOKENS} tokens, {number} at once, through "
                "`agentevo serve` and in this process"
            )
            figures.append(Figure(f"transport_{number}", value, meaning, raw))
    finally:
        await remote.close()

    return figures


def transport(at_once: list[int], repeats: int) -> list[Figure]:
    """The figures of `benchmarks/run.py --only transport`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="agentevo-transport-") as scratch,
            served(Path(scratch)) as (config, loaded),
        ):
            return asyncio.run(measure(config, loaded, at_once, repeats))
    finally:
        torch.set_num_threads(threads)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--at-once",
        default=",".join(map(str, AT_ONCE)),
        help="requests at once, separated by commas",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed rounds, after one that warms up"
    )
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/DATE-MACHINE-transport.json"
    )
    given = parser.parse_args()
    before = describe_machine()

    try:
        figures = transport([int(one) for one in given.at_once.split(",")], given.repeats)
    except NotComparableError as error:
        print(f"failed transport: {error}", file=sys.stderr)
        return 1

    for figure in figures:
        print(figure.line(), flush=True)
        print(figure.details(), file=sys.stderr, flush=True)

    if given.save:
        print(
            f"raw numbers: {write_results(figures, {}, {}, before, 'transport')}", file=sys.stderr
        )

    return 0


if __name__ == "__main__":
    sys.exit(main())
