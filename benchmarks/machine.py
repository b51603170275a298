"""The machine that a benchmark ran on, by what decides a ratio and by nothing else: the processor's
family and instruction sets, the number of cores, and two limits that are measured on the spot.

The GRPO step is 7.6 times TRL's on a Zen 5 with AVX-512 and 3.5 times on a Zen 3 with AVX2, the
same code on the same day: without these lines such figures can't be compared.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from agentevo.models.compute import linear

MEASURING_S = 0.5
MATMUL_SIDE = 1024
COPY_BYTES = 256 * 2**20
"""Far more than any cache holds."""

INSTRUCTION_SETS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_fp16": "AVX-512 FP16",
    "avx_vnni": "AVX-VNNI",
    "amx_tile": "AMX",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8",
    "asimd": "NEON",
    "sve": "SVE",
}
"""Flag of /proc/cpuinfo -> what people call it."""
AMD_ARCHITECTURES = {
    (0x17, range(0x00, 0x30)): "Zen or Zen+",
    (0x17, range(0x30, 0x100)): "Zen 2",
    (0x19, range(0x00, 0x10)): "Zen 3",
    (0x19, range(0x10, 0x20)): "Zen 4",
    (0x19, range(0x20, 0x60)): "Zen 3",
    (0x19, range(0x60, 0x80)): "Zen 4",
    (0x19, range(0xA0, 0xB0)): "Zen 4",
    (0x1A, range(0x00, 0x100)): "Zen 5",
}
"""(family, models) -> architecture, as Linux tells them apart in arch/x86/kernel/cpu/amd.c."""


class Limits(NamedTuple):
    """What the machine reaches at best with the threads that are set now."""

    flops_per_s: float
    """Of a product of float32 matrices."""
    bytes_per_s: float
    """Read and written, of a copy in memory."""


class Rate(NamedTuple):
    """What the work of a figure asks of the machine per second."""

    flops_per_s: float = 0.0
    bytes_per_s: float = 0.0

    def shares(self, limits: Limits) -> dict[str, float]:
        """The share of each limit that has a rate here."""
        shares = {}
        if self.flops_per_s:
            shares["of_peak_flops"] = self.flops_per_s / limits.flops_per_s
        if self.bytes_per_s:
            shares["of_peak_bytes"] = self.bytes_per_s / limits.bytes_per_s
        return shares


def describe_machine() -> dict[str, Any]:
    """What is written beside the figures. No name of the machine, no path, no variable."""
    limits = measured_limits()
    return {
        **processor(_cpuinfo()),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "peak_gflops": round(limits.flops_per_s / 1e9, 1),
        "peak_gb_per_s": round(limits.bytes_per_s / 1e9, 1),
        "load_average": os.getloadavg(),
    }


def processor(cpuinfo: Mapping[str, str]) -> dict[str, Any]:
    """Vendor, name, family, architecture where it is known, and instruction sets, from the fields
    of one processor in /proc/cpuinfo."""
    flags = set(cpuinfo.get("flags", cpuinfo.get("Features", "")).split())
    described: dict[str, Any] = {
        "vendor": cpuinfo.get("vendor_id", ""),
        "cpu": cpuinfo.get("model name", platform.processor()),
        "instruction_sets": [name for flag, name in INSTRUCTION_SETS.items() if flag in flags],
    }
    if "cpu family" in cpuinfo:
        family = int(cpuinfo["cpu family"])
        model = int(cpuinfo["model"])
        described |= {"family": family, "model": model}
        if described["vendor"] == "AuthenticAMD":
            described["architecture"] = next(
                (
                    name
                    for (known, models), name in AMD_ARCHITECTURES.items()
                    if family == known and model in models
                ),
                "unknown",
            )

    return described


def short_name(machine: Mapping[str, Any]) -> str:
    """For file names: cores and the widest vectors, e.g. "2x-avx-512"."""
    sets = machine["instruction_sets"]
    widest = next((name for name in ("AMX", "AVX-512", "AVX2", "SVE", "NEON") if name in sets), "")
    return f"{machine['cores']}x-{widest.lower() or 'cpu'}"


@cache
def measured_limits() -> Limits:
    """A short product and a short copy, each the fastest of several."""
    left, right = (torch.ones(MATMUL_SIDE, MATMUL_SIDE) for _ in range(2))
    products: list[Callable[[], object]] = [lambda: left @ right]
    if linear.available():
        products.append(lambda: linear.product(left, right))

    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    with torch.no_grad():
        product_s = min(_fastest_s(product) for product in products)
        copy_s = _fastest_s(lambda: target.copy_(source))

    return Limits(2 * MATMUL_SIDE**3 / product_s, 2 * COPY_BYTES / copy_s)


def _fastest_s(run: Callable[[], object]) -> float:
    """The first run, which warms up, does not count."""
    run()
    seconds: list[float] = []
    until = time.perf_counter() + MEASURING_S
    while len(seconds) < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)

    return min(seconds)


def _cpuinfo() -> dict[str, str]:
    """The fields of the first processor; empty where there is no such file."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return {}
    first = file.read_text().split("\n\n")[0]
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}
