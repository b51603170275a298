"""What the embedded engine's choices for a CPU are worth on this machine:
`models/compute/fused.py`, `models/compute/cpu_kernels.py`, and FEW_QUERIES and FEW_SCORES of
`inference/embedded/cache_rows.py`.

    .venv/bin/python benchmarks/passes.py

Prints milliseconds of one forward pass of SmolLM2-135M without attention, by number of tokens,
through its own layers and through `FusedLayer`; then microseconds of one layer's attention by
number of query rows, through matrix products, through weighted sums, and through our own kernels.
Medians of alternating repetitions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from agentevo.inference.embedded import cache_attention, cache_rows
from agentevo.inference.embedded.batch import build_batch
from agentevo.inference.embedded.cache_attention import CacheAttention
from agentevo.inference.embedded.kv_cache import KEY_BLOCK, KVCache, num_blocks
from agentevo.inference.embedded.scheduler import Sequence as Running
from agentevo.models.compute.cpu_kernels import cpu_kernels
from ours import load, model_folder

TOKENS = (1, 16, 64, 256, 512, 1024, 3072)
TOKENS_EACH = (1, 2, 3, 4, 5, 6, 8, 16)
"""New tokens of each sequence."""
SHAPES = ((16, 500), (64, 112))
"""Sequences, and keys that each sees."""
LAYERS = 30
QUERY_HEADS = 9
KV_HEADS = 3
HEAD_DIM = 64
BUDGET_S = 2.0


class NoAttention:
    """A plan that gives each query back: what is left of the pass is everything else."""

    def attend(self, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return query


def medians(ways: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each way, taken in turns for BUDGET_S, after one round that warms up."""
    taken: list[list[float]] = [[] for _ in ways]
    for way in ways:
        way()

    deadline = time.perf_counter() + BUDGET_S
    while len(taken[0]) < 3 or time.perf_counter() < deadline:
        for way, seconds in zip(ways, taken, strict=True):
            started = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - started)

    return [statistics.median(seconds) for seconds in taken]


def passes(folder: Path) -> None:
    model = load(folder).model
    own = load(folder).model
    for layer in own.modules():
        vars(layer).pop("forward", None)  # the FusedLayer that hides the class's own method

    for tokens in TOKENS:
        ids = torch.randint(100, 4000, (1, tokens))
        positions = torch.arange(tokens)[None]

        def run(which: Any, ids: torch.Tensor = ids, positions: torch.Tensor = positions) -> object:
            keep = torch.tensor([0])
            return which(
                input_ids=ids,
                position_ids=positions,
                use_cache=False,
                plan=NoAttention(),
                logits_to_keep=keep,
            )

        plain, fused = medians([lambda run=run: run(own), lambda run=run: run(model)])
        line = f"{tokens:5d} tokens: own layers {1e3 * plain:7.1f} ms, fused {1e3 * fused:7.1f} ms"
        print(f"{line}, {1e6 * fused / tokens:6.0f} us a token", flush=True)


def attention() -> None:
    for sequences, keys in SHAPES:
        cache = KVCache()
        cache.resize(sequences, num_blocks(keys) * KEY_BLOCK, [])
        for tokens in TOKENS_EACH:
            work = [
                (Running(slot, [0] * keys, None, cached=keys - tokens), tokens)
                for slot in range(sequences)
            ]
            plan = build_batch(cache, work, torch.device("cpu")).plan
            query = torch.randn(sequences * tokens, QUERY_HEADS, HEAD_DIM)
            new = torch.randn(sequences * tokens, KV_HEADS, HEAD_DIM)

            def run(
                few: int,
                own: bool = False,
                plan: CacheAttention = plan,
                query: torch.Tensor = query,
                new: torch.Tensor = new,
            ) -> None:
                cache_rows.FEW_QUERIES = cache_rows.FEW_SCORES = few
                cache_attention.cpu_kernels = cpu_kernels if own else lambda: None
                plan._calls = 0  # another pass
                for _ in range(LAYERS):
                    plan.attend(query, new, new, 0.125, None, None)

            products, sums, kernels = (
                1e6 * seconds / LAYERS
                for seconds in medians(
                    [
                        lambda run=run: run(0),
                        lambda run=run: run(10**6),
                        lambda run=run: run(0, own=True),
                    ]
                )
            )
            rows = tokens * QUERY_HEADS // KV_HEADS
            print(
                f"{sequences} x {keys} keys, {rows:3d} query rows: products {products:6.0f} us, "
                f"weighted sums {sums:6.0f} us, own kernels {kernels:6.0f} us",
                flush=True,
            )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="folder of SmolLM2-135M-Instruct; downloaded when left out"
    )
    folder = parser.parse_args().model or model_folder()
    attention()
    passes(folder)


if __name__ == "__main__":
    main()
