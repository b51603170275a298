"""The peak rate of a device, in floating-point operations per second in dense matrix products. MFU
is a share of this rate.

For GPUs, the rates are the makers' figures without sparsity. A device that is not in the table (any
CPU, and other GPUs) is measured once per process, by a matrix product of a suitable size. Programs
can reach a measured rate, so MFU relative to it is higher than relative to a maker's figure.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from agentevo.models.compute import linear
from agentevo.runtime.devices import allows_tf32, is_accelerator, name_of, synchronize

TERA = 1e12


class Peaks(NamedTuple):
    """The peak rates of a GPU in TFLOP/s."""

    bfloat16: float
    tf32: float
    float32: float


GPUS = {
    r"\bB200\b": Peaks(2250.0, 1125.0, 75.0),
    r"\bH200 NVL\b": Peaks(835.5, 417.5, 60.0),
    r"\b(H200|GH200)\b": Peaks(989.5, 494.5, 67.0),
    r"\bH100 NVL\b": Peaks(835.5, 417.5, 60.0),
    r"\bH100 PCIe\b": Peaks(756.0, 378.0, 51.0),
    r"\bH(100|800)\b": Peaks(989.5, 494.5, 67.0),
    r"\bA(100|800)\b": Peaks(312.0, 156.0, 19.5),
    r"\bA40\b": Peaks(149.7, 74.8, 37.4),
    r"\bA10\b": Peaks(125.0, 62.5, 31.2),
    r"\bL40S\b": Peaks(362.0, 183.0, 91.6),
    r"\bL40\b": Peaks(181.0, 90.5, 90.5),
    r"\bL4\b": Peaks(121.0, 60.0, 30.3),
    r"\bRTX 4090$": Peaks(165.2, 82.6, 82.6),
    r"\bRTX 3090$": Peaks(71.0, 35.6, 35.6),
}
"""Part of the device's name -> its rates. The first match counts. Sources: NVIDIA's data sheets of
B200 (HGX), H200, H100, A100, A40, A10, L40S, L40 and L4, halved if they are given with sparsity;
its Ada and Ampere GA102 white papers for the RTX cards (16-bit with float32 sums)."""

MEASURING_S = 0.1
SIDE_ON_CPU = 512
"""The side of the square matrices that are multiplied on a CPU."""
SIDE = 8192
"""The side of the square matrices that are multiplied on other devices."""


class Peak(NamedTuple):
    """A device's peak rate. See the module."""

    flops_per_s: float
    source: str
    """The source of the figure, for display."""


def device_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """The peak rate for products of matrices of that dtype, under the current settings (threads,
    TF32)."""
    if is_accelerator(device):
        peak = known_peak(name_of(device), dtype, tf32=allows_tf32())
        if peak is not None:
            return peak
    return _measure(device.type, dtype, torch.get_num_threads(), allows_tf32())


def known_peak(name: str, dtype: torch.dtype, *, tf32: bool) -> Peak | None:
    """The peak rate of the GPU with this name. None if it is not in the table. tf32: whether
    float32 products may use TF32."""
    peaks = next((peaks for pattern, peaks in GPUS.items() if re.search(pattern, name)), None)
    if peaks is None or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    kind = "bfloat16" if dtype != torch.float32 else "tf32" if tf32 else "float32"
    return Peak(getattr(peaks, kind) * TERA, f"{name}, {kind}, data sheet")


@cache
def _measure(device: str, dtype: torch.dtype, threads: int, tf32: bool) -> Peak:
    """Measures several products and returns the fastest. `threads` and `tf32` only distinguish
    cached measurements."""
    side = SIDE_ON_CPU if device == "cpu" else SIDE
    left, right = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    products: list[Callable[[], torch.Tensor]] = [lambda: left @ right]
    if device == "cpu" and dtype == torch.float32 and linear.available():
        products.append(lambda: linear.product(left, right))

    fastest = min(_seconds(product, device) for product in products)
    where = f"cpu, {threads} threads" if device == "cpu" else name_of(torch.device(device))
    return Peak(2 * side**3 / fastest, f"{where}, {str(dtype).removeprefix('torch.')}, measured")


@torch.no_grad()
def _seconds(product: Callable[[], torch.Tensor], device: str) -> float:
    """The seconds of the fastest run. The first run warms up and does not count."""
    seconds: list[float] = []
    until = time.perf_counter() + MEASURING_S
    while len(seconds) < 3 or time.perf_counter() < until:
        started_at = time.perf_counter()
        product()
        synchronize(torch.device(device))
        seconds.append(time.perf_counter() - started_at)

    return min(seconds[1:])
