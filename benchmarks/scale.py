"""What engines of others cost behind our doors, and what more engine processes bring.

    build/vllm/bin/python benchmarks/scale.py [--only vllm] [--at-once 16] [--repeats 3] [--save]
    .venv/bin/python benchmarks/scale.py --only engines

`engines_2` and `engines_4` are tokens/s of so many `agentevo serve` processes of our own engine,
one thread each, `--at-once` requests at each, over those of one times so many or, if these are
fewer, times the cores: 1 is linear. All are up throughout, those that are not asked idle.

`make test-vllm` makes the other environment. `vllm_through_serve` is tokens/s of `agentevo serve`
with `engine.type=vllm`, asked by our client, over those of vLLM's own server on the same weights,
asked at its token-in, token-out route by aiohttp (as vLLM's own benchmark does). Both keep the same
log-probs, cache and limits (no prompt is cut into pieces, at which vLLM's worker ends on a CPU when
requests have seeds), take the same prompts and seeds in turns, and are idle while the other
is timed; both must complete every request to its last token, else there is no figure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import yaml

from agentevo.config import RunConfig, build_config
from agentevo.inference.serving.directory import EngineDirectory
from agentevo.inference.serving.remote import RemoteEngine
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.models.files.load import LoadedModel
from agentevo.runs.folder.identity import ensure_run_folder
from agentevo.runs.orchestration.components import load_policy
from agentevo.types import SamplingParams
from figures import Figure, NotComparableError, write_results
from machine import describe_machine

CONTEXT = 512
PROMPT = 200
NEW_TOKENS = 64
REQUESTS = 128
RECIPE: dict[str, Any] = {
    "model": {
        "name": "tiny",
        "device": "cpu",
        "tiny": {
            "hidden_size": 256,
            "num_layers": 4,
            "num_heads": 4,
            "context_length": CONTEXT,
            "tokenizer": "byte",
        },
    },
    "environment": {"type": "coins"},
    "engine": {"type": "vllm", "kv_cache_gb": 1.0, "max_running": 64, "timeout_s": 1200},
    "run": {"threads": 1},
}
START_S = 1200.0
Ask = Callable[[list[int], int], Awaitable[int]]
"""Completes a prompt under a seed; returns how many tokens came."""


def prompts(count: int, seed: int) -> list[list[int]]:
    """Ones that share nothing, so that nobody's cache helps."""
    draw = random.Random(seed)
    return [[draw.randrange(10, 250) for _ in range(PROMPT)] for _ in range(count)]


@contextmanager
def started(command: list[str], log: Path, is_up: Callable[[], bool]) -> Iterator[None]:
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)

    try:
        until = time.monotonic() + START_S
        while not is_up():
            if process.poll() is not None or time.monotonic() > until:
                raise NotComparableError(
                    f"{' '.join(command[1:5])} did not start: {log.read_text()[-2000:]}"
                )
            time.sleep(0.5)

        yield
    finally:
        process.terminate()
        process.wait(120)


@contextmanager
def our_server(
    config: RunConfig, loaded: LoadedModel, scratch: Path, tree: dict[str, Any] = RECIPE
) -> Iterator[None]:
    """`agentevo serve` of the recipe, with these weights."""
    scratch.mkdir(exist_ok=True)
    recipe = scratch / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree))
    ensure_run_folder(config)
    WeightsFolder(config.run_dir / "weights").write(0, loaded.model, keep=3)

    command = [sys.executable, "-m", "agentevo", "serve", str(recipe), f"run.dir={config.run_dir}"]
    engines = EngineDirectory(config.run_dir / "engines")
    with started(command, scratch / "ours.log", lambda: bool(engines.living(5.0))):
        yield


@contextmanager
def bare_server(loaded: LoadedModel, scratch: Path) -> Iterator[str]:
    """vLLM's own server of the same weights; gives its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    loaded.model.save_pretrained(scratch / "model")
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(scratch / "model"),
        "--served-model-name",
        "bare",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--skip-tokenizer-init",
        "--dtype",
        "float32",
        "--max-model-len",
        str(CONTEXT),
        "--enforce-eager",
        "--max-num-seqs",
        str(RECIPE["engine"]["max_running"]),
        "--kv-cache-memory-bytes",
        str(int(RECIPE["engine"]["kv_cache_gb"] * 2**30)),
        "--logprobs-mode",
        "processed_logprobs",
        "--generation-config",
        "vllm",
        "--no-enable-chunked-prefill",  # else it dies: seeds
        "--max-num-batched-tokens",
        "4096",
        "--disable-log-stats",
        "--enable-scale-out",
        "--uvicorn-log-level",
        "warning",
    ]

    def is_up() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with started(command, scratch / "bare.log", is_up):
        yield f"http://127.0.0.1:{port}"


async def timed(ask: Ask, batch: list[list[int]], at_once: int, seed: int) -> dict[str, float]:
    """Tokens/s and this process's CPU ms per request, `at_once` at a time."""
    places = asyncio.Semaphore(at_once)

    async def one(number: int, prompt: list[int]) -> int:
        async with places:
            return await ask(prompt, seed + number)

    wall = time.perf_counter()
    cpu = time.process_time()
    counts = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(batch)))
    seconds = time.perf_counter() - wall

    if counts != [NEW_TOKENS] * len(batch):
        raise NotComparableError(f"{sorted(set(counts))} tokens came, not {NEW_TOKENS} each")

    return {
        "tokens_per_s": sum(counts) / seconds,
        "client_cpu_ms": (time.process_time() - cpu) / len(batch) * 1e3,
    }


def asking(remote: RemoteEngine) -> Ask:
    async def ask(prompt: list[int], seed: int) -> int:
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, seed=seed)
        found = await remote.generate(prompt, sampling, deadline_s=1200)
        return len(found.logprobs)

    return ask


async def compare(config: RunConfig, url: str, at_once: int, repeats: int) -> Figure:
    """`repeats` rounds after one that warms up."""
    import aiohttp

    remote = RemoteEngine(EngineDirectory(config.run_dir / "engines"))
    timeout = aiohttp.ClientTimeout(total=1200)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        ours = asking(remote)

        async def bare(prompt: list[int], seed: int) -> int:
            params = {
                "max_tokens": NEW_TOKENS,
                "temperature": 1.0,
                "seed": seed,
                "logprobs": 0,
                "ignore_eos": True,
                "detokenize": False,
            }
            body = {"model": "bare", "token_ids": prompt, "sampling_params": params}
            async with session.post(f"{url}/inference/v1/generate", json=body) as answer:
                if answer.status != 200:
                    raise NotComparableError(f"vLLM: {answer.status} {await answer.text()}")
                (choice,) = (await answer.json())["choices"]
                return min(len(choice["token_ids"]), len(choice["logprobs"]["content"]))

        rounds: dict[str, list[dict[str, float]]] = {"ours": [], "bare": []}
        try:
            for turn in range(repeats + 1):
                order = [("ours", ours), ("bare", bare)]
                for name, ask in order if turn % 2 else order[::-1]:
                    batch = prompts(REQUESTS, 2 * turn + (name == "ours"))
                    found = await timed(ask, batch, at_once, turn * REQUESTS)
                    if turn:
                        rounds[name].append(found)
        finally:
            await remote.close()

    medians = {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]}
        for name, found in rounds.items()
    }
    return Figure(
        "vllm_through_serve",
        medians["ours"]["tokens_per_s"] / medians["bare"]["tokens_per_s"],
        f"{REQUESTS} requests of {PROMPT} + {NEW_TOKENS} tokens, {at_once} at once, through "
        "`agentevo serve` and vLLM's own server",
        {"unit": "tokens/s, CPU ms per request", "rounds": rounds, "medians": medians},
    )


def vllm_through_serve(at_once: int, repeats: int) -> list[Figure]:
    """The figures of `--only vllm`."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentevo-scale-")))
        config = build_config(RECIPE, [f"run.dir={scratch / 'run'}"])
        loaded = load_policy(config)
        url = stack.enter_context(bare_server(loaded, scratch))
        stack.enter_context(our_server(config, loaded, scratch))
        return [asyncio.run(compare(config, url, at_once, repeats))]


def more_engines(at_once: int, repeats: int) -> list[Figure]:
    """The figures of `--only engines`."""
    tree = {**RECIPE, "engine": {"kv_cache_gb": 0.5, "max_running": 64}}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentevo-scale-")))
        runs = []
        for number in range(max(COUNTS)):
            place = scratch / str(number)
            config = build_config(tree, [f"run.dir={place / 'run'}"])
            loaded = load_policy(config)
            stack.enter_context(our_server(config, loaded, place, tree))
            runs.append(config.run_dir)

        return asyncio.run(linearity(runs, at_once, repeats))


async def linearity(runs: list[Path], at_once: int, repeats: int) -> list[Figure]:
    """`repeats` rounds after one that warms up, in each of which all COUNTS have their turn."""
    remotes = [RemoteEngine(EngineDirectory(run / "engines")) for run in runs]
    rounds: dict[int, list[float]] = {count: [] for count in COUNTS}
    try:
        for turn in range(repeats + 1):
            for count in COUNTS if turn % 2 else COUNTS[::-1]:
                parts = [prompts(REQUESTS, turn * 10 + number) for number in range(count)]
                started_at = time.perf_counter()
                asked = zip(remotes, parts, strict=False)
                await asyncio.gather(
                    *(timed(asking(one), part, at_once, turn * REQUESTS) for one, part in asked)
                )

                seconds = time.perf_counter() - started_at
                if turn:
                    rounds[count].append(count * REQUESTS * NEW_TOKENS / seconds)
    finally:
        for one in remotes:
            await one.close()

    medians = {str(count): statistics.median(found) for count, found in rounds.items()}
    cores = len(os.sched_getaffinity(0))
    raw = {"unit": "tokens/s", "rounds": rounds, "medians": medians, "cores": cores}
    return [
        Figure(
            f"engines_{count}",
            medians[str(count)] / medians["1"] / min(count, cores),
            f"tokens/s of {count} engine processes over those of one, times {min(count, cores)}",
            raw,
        )
        for count in COUNTS[1:]
    ]


COUNTS = (1, 2, 4)
"""Engine processes that are asked at once."""
PARTS = {"vllm": vllm_through_serve, "engines": more_engines}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="vllm", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--at-once", type=int, default=16, help="requests at once")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds")
    parser.add_argument("--save", action="store_true", help="write the raw numbers, too")
    given = parser.parse_args()
    before = describe_machine()

    figures = []
    for part in given.only.split(","):
        try:
            figures += PARTS[part](given.at_once, given.repeats)
        except NotComparableError as error:
            print(f"failed {part}: {error}", file=sys.stderr)
            return 1

    for figure in figures:
        print(figure.line(), flush=True)
        print(figure.details(), file=sys.stderr, flush=True)

    names = f"scale_{given.only.replace(',', '_')}"
    if given.save:
        print(f"raw numbers: {write_results(figures, {}, {}, before, names)}", file=sys.stderr)

    return 0


if __name__ == "__main__":
    sys.exit(main())
