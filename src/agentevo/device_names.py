"""The names in recipes for the devices that models compute on. `devices` finds them; this module
does not import torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

DeviceName = Literal["auto", "cpu", "cuda", "npu", "xpu", "mps"]
"""`cuda` is NVIDIA's, and AMD's with PyTorch for ROCm; `npu` Huawei's Ascend; `xpu` Intel's; `mps`
Apple's. `auto` takes the first available of cuda, npu and xpu, else the CPU."""
CUDA = "cuda"
"""The kind that vLLM and SGLang are fastest on."""
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""Environment variables by which a process sees some of a machine's devices."""


def visible(devices: Sequence[int]) -> dict[str, str]:
    """The environment in which a process sees these devices alone, by their numbers among those
    that this process sees (a cluster may have given it some of the machine's); empty for a
    CPU's."""
    if not devices:
        return {}

    environment = {}
    for variable in VISIBILITY:
        device_ids = [name for name in os.environ.get(variable, "").split(",") if name.strip()]
        is_in_range = max(devices) < len(device_ids)
        environment[variable] = ",".join(device_ids[n] if is_in_range else str(n) for n in devices)

    return environment
