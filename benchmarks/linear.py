"""What a float32 matrix product reaches on this machine: PyTorch's own `F.linear` against oneDNN,
which `agentevo.models.compute.linear` uses, oneDNN with weights in its own layout, and
`PackedMatrix`, by which the engine generates: few rows by kernels of our own
(`models/compute/cpu_kernels.py`), unless AGENTEVO_CPU_KERNELS=off.

    .venv/bin/python benchmarks/linear.py

Prints GFLOP/s for the shapes of SmolLM2-135M, reading other weights each time, as the layers of a
model do; in GB/s the weights that are read, and for comparison what a sum over the weights reads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from agentevo.models.compute.linear import PackedMatrix, available, product

SHAPES = ((576, 1536), (1536, 576), (576, 49152))
ROWS = (1, 4, 16, 64, 256, 1024)
BYTES_CYCLED = 240e6
MIN_SECONDS = 0.5


def seconds_each(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call: best of the passes over all calls that fit in MIN_SECONDS, after one that warms
    up."""
    best = float("inf")
    deadline = 0.0
    while not deadline or time.perf_counter() < deadline:
        started = time.perf_counter()
        for call in calls:
            call()

        seconds = time.perf_counter() - started
        if deadline:
            best = min(best, seconds)
        else:
            deadline = time.perf_counter() + MIN_SECONDS

    return best / len(calls)


@torch.inference_mode()
def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    if not available():
        raise SystemExit(
            "oneDNN's linear operator is not in this build of PyTorch, or this is no x86 CPU: "
            "nothing to compare"
        )

    for inputs, outputs in SHAPES:
        size = 4 * inputs * outputs
        weights = [torch.randn(outputs, inputs) for _ in range(max(1, int(BYTES_CYCLED / size)))]
        packed = [PackedMatrix(weight) for weight in weights]
        print(
            f"{inputs} -> {outputs}: a sum over the weights reads "
            f"{size / seconds_each([w.sum for w in weights]) / 1e9:.0f} GB/s"
        )

        for rows in ROWS:
            x = torch.randn(rows, inputs)
            ways: dict[str, list[Callable[[], object]]] = {
                "F.linear": [partial(torch.nn.functional.linear, x, weight) for weight in weights],
                "oneDNN": [partial(product, x, weight) for weight in weights],
                "oneDNN packed": [partial(matrix._multiply, x, "none") for matrix in packed],
                "PackedMatrix": [partial(matrix.product, x) for matrix in packed],
            }
            seconds = {name: seconds_each(calls) for name, calls in ways.items()}
            texts = [
                f"{name} {2e-9 * rows * inputs * outputs / s:4.0f} GFLOP/s "
                f"({size / s / 1e9:3.0f} GB/s)"
                for name, s in seconds.items()
            ]
            print(f"{rows:6d} rows: {', '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
