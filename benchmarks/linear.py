"""What a float32 matrix product reaches on this machine: PyTorch's own `F.linear` against oneDNN, which `agentevo.models.linear` uses.

    .venv/bin/python benchmarks/linear.py

Prints GFLOP/s for the shapes of SmolLM2-135M, reading other weights each time, as the layers of a model do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from agentevo.models.linear import available
from agentevo.models.linear import product as onednn

SHAPES = ((576, 1536), (1536, 576), (576, 49152))
ROWS = (1, 4, 16, 64, 256, 1024)
BYTES_CYCLED = 240e6
MIN_SECONDS = 0.5


def gflops(product: Callable[[torch.Tensor, torch.Tensor], object], x: torch.Tensor, weights: list[torch.Tensor]) -> float:
    """Best of the passes over all weights that fit in MIN_SECONDS, after one that warms up."""
    best, deadline = float("inf"), 0.0
    while not deadline or time.perf_counter() < deadline:
        started = time.perf_counter()
        for weight in weights:
            product(x, weight)
        seconds = time.perf_counter() - started
        if deadline:
            best = min(best, seconds)
        else:
            deadline = time.perf_counter() + MIN_SECONDS
    return 2 * x.shape[0] * weights[0].numel() * len(weights) / max(best, 1e-9) / 1e9


@torch.inference_mode()
def main() -> None:
    for inputs, outputs in SHAPES:
        weights = [torch.randn(outputs, inputs) for _ in range(max(1, int(BYTES_CYCLED / (4 * inputs * outputs))))]
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            line = f"{inputs:5d} -> {outputs:5d}, {rows:4d} rows: F.linear {gflops(torch.nn.functional.linear, x, weights):4.0f} GFLOP/s"
            print(
                f"{line}, oneDNN {gflops(onednn, x, weights):4.0f} GFLOP/s" if available() else f"{line}, oneDNN is not in this build",
                flush=True,
            )


if __name__ == "__main__":
    main()
