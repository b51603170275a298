"""What recipes call the devices that models compute on. `devices` finds them; here is no torch."""

from __future__ import annotations

from typing import Literal

DeviceName = Literal["auto", "cpu", "cuda", "npu", "xpu", "mps"]
"""`cuda` is NVIDIA's, and AMD's with PyTorch for ROCm; `npu` Huawei's Ascend; `xpu` Intel's; `mps`
Apple's. `auto` takes the first of cuda, npu and xpu that is there, else the CPU."""
