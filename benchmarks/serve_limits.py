"""What a large `max_tokens` costs those who come after it: `agentevo serve --openai`, 200 short
requests after one that allowed 60,000 tokens and drew 4, against the same without.

    .venv/bin/python benchmarks/serve_limits.py [--requests 200] [--save]

Two servers of one model, each a process of its own, get every short request one after the other, in
turns; each begins a conversation of its own, so idle sessions pile up in both. 1 means that the
large limit cost nothing.

    ratio serve_limit_latency    median seconds of a request, without over after the large limit
    ratio serve_limit_memory     the most MiB that the server held after a request, likewise
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from figures import Figure, write_results
from machine import describe_machine

RECIPE = """\
run: {{dir: {folder}}}
environment: {{type: coins}}
engine: {{kv_cache_gb: 4}}
model:
  name: tiny
  device: cpu
  tiny: {{tokenizer: byte, hidden_size: 256, num_layers: 4, context_length: 65536}}
"""
LARGE = 60_000
"""Tokens that a request allows."""
DRAWN = 4
"""Tokens that it draws."""
SHORT = 8
LETTER = {"logit_bias": {"70": 100.0}}
"""All tokens are this one, so that a stop string can end the answer after so many."""
START_S = 300.0


class Server:
    """`agentevo serve --openai` while it runs, and one client of it."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        base = (folder / "serving" / "url").read_text().strip()
        key = (folder / "serving" / "secret").read_text().strip()
        headers = {"Authorization": f"Bearer {key}"}
        self._client = httpx.Client(base_url=base, headers=headers, timeout=START_S)
        self._process = psutil.Process(process.pid)

    def ask(self, question: str, **more: Any) -> tuple[str, int]:
        """The answer's text, and how many tokens were drawn."""
        messages = [{"role": "user", "content": question}]
        body = {"model": "policy", "messages": messages, **LETTER, **more}
        answer = self._client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        said = answer.json()
        return said["choices"][0]["message"]["content"], said["usage"]["completion_tokens"]

    def memory_mib(self) -> float:
        return float(self._process.memory_info().rss) / 2**20


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """A server of a tiny model without training."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        recipe = Path(name) / "recipe.yaml"
        recipe.write_text(RECIPE.format(folder=folder))
        command = [sys.executable, "-m", "agentevo", "serve", "--openai", str(recipe)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + START_S
            while not (folder / "serving" / "url").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{' '.join(command)} has not begun to serve")
                time.sleep(0.1)
            yield Server(folder, process)
        finally:
            process.terminate()
            process.wait(60)


def measure(requests: int) -> list[Figure]:
    """Both figures."""
    seconds: dict[str, list[float]] = {"without": [], "after": []}
    with server() as without, server() as after:
        servers = {"without": without, "after": after}
        for each in servers.values():
            text, _ = each.ask("What comes?", max_tokens=DRAWN)

        _, drawn = after.ask("What comes?", max_tokens=LARGE, stop=[text])
        if drawn != DRAWN:
            raise RuntimeError(f"the answer with a large limit has {drawn} tokens, not {DRAWN}")

        memory = {name: each.memory_mib() for name, each in servers.items()}
        print(f"MiB before the short requests: {memory}", file=sys.stderr)
        for number in range(requests):
            for name, each in list(servers.items())[:: 1 if number % 2 else -1]:
                begun = time.perf_counter()
                each.ask(f"Question {number}", max_tokens=SHORT)
                seconds[name].append(time.perf_counter() - begun)
                memory[name] = max(memory[name], each.memory_mib())

    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"most MiB {memory}", file=sys.stderr)
    print(f"median seconds {medians}", file=sys.stderr)
    latency = medians["without"] / medians["after"]
    held = memory["without"] / memory["after"]
    raw = {"requests": requests, "large": LARGE, "seconds": seconds, "mib": memory}
    return [
        Figure("serve_limit_latency", latency, "seconds of a request, without over after", raw),
        Figure("serve_limit_memory", held, "MiB of the server, without over after", raw),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    before = describe_machine()
    figures = measure(arguments.requests)
    for figure in figures:
        print(figure.line())

    if arguments.save:
        print(write_results(figures, {}, {}, before, part="serve_limits"), file=sys.stderr)


if __name__ == "__main__":
    main()
