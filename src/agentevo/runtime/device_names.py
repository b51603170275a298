"""The names in recipes for the devices that models compute on. `devices` finds the devices. This
module does not import torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

DeviceName = Literal["auto", "cpu", "cuda", "npu", "xpu", "mps"]
"""`cuda` is NVIDIA's, and AMD's with PyTorch for ROCm. `npu` is Huawei's Ascend, `xpu` Intel's, and
`mps` Apple's. `auto` takes the first available of cuda, npu and xpu, else the CPU."""
CUDA = "cuda"
"""The kind on which vLLM and SGLang are fastest."""
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""The environment variables that restrict which of a machine's devices a process sees."""


def visible(devices: Sequence[int]) -> dict[str, str]:
    """The environment in which a process sees only these devices. They are numbers among the
    devices that this process sees, because a cluster may have given it only some of the machine's.
    Empty for a CPU."""
    if not devices:
        return {}

    environment = {}
    for variable in VISIBILITY:
        device_ids = [name for name in os.environ.get(variable, "").split(",") if name.strip()]
        is_in_range = max(devices) < len(device_ids)
        environment[variable] = ",".join(device_ids[n] if is_in_range else str(n) for n in devices)

    return environment
