"""The devices that models compute on, and their differences.

No other module names a kind of accelerator or calls its part of torch. This module provides the
device of a recipe, memory, seeds, waiting and profiling. `torch.get_device_module` returns a kind's
part of torch, so ROCm (which PyTorch calls cuda), Ascend (the package torch_npu), XPU and MPS use
the same code. If a kernel supports only one kind, the other kinds use the CPU's code, which the
tests cover. ROCm, Ascend, XPU and MPS have not been tested on any machine.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import torch
from torch import distributed
from torch.cuda import profiler as cuda_profiler

from agentevo.errors import ModelError

CUDA = "cuda"
AUTOMATIC = (CUDA, "npu", "xpu")
"""The kinds that `auto` tries, in this order. MPS is not among them, because it lacks some
operators in some dtypes."""
_WHOSE = {
    CUDA: ("CUDA GPU", "install PyTorch for CUDA or ROCm"),
    "npu": ("Ascend NPU", "install CANN and torch_npu (pip install torch_npu)"),
    "xpu": ("XPU", "install PyTorch for XPU"),
    "mps": ("Apple GPU", "run on a Mac with Apple silicon"),
}
_AUTOCASTS = ("cpu", *_WHOSE)
_PINNED = AUTOMATIC
"""The kinds that can copy from pinned memory of the host while the CPU continues."""
_COMPILED = (CUDA,)
"""The kinds for which PyTorch's compiler makes kernels: FlexAttention, log-probs, decoder
layers."""


def find(device_type: str, key: str = "model.device") -> torch.device:
    """The device that a recipe names. Raises ModelError if there is none."""
    if device_type == "auto":
        device_type = next((kind for kind in AUTOMATIC if is_available(kind)), "cpu")
    elif device_type != "cpu" and not is_available(device_type):
        what, remedy = _WHOSE[device_type]
        raise ModelError(
            f"{key}={device_type}, but PyTorch sees no {what}: set {key}=auto or cpu, or {remedy}"
        )

    return torch.device(device_type)


def is_available(kind: str) -> bool:
    """Whether PyTorch sees an accelerator of that kind."""
    if kind == "npu":
        _add_ascend()
    if kind == "mps":
        return bool(torch.backends.mps.is_available())
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


def is_accelerator(device: torch.device) -> bool:
    """Whether memory, kernels and seeds differ from the CPU's."""
    return device.type != "cpu"


def use_device(device: torch.device, number: int) -> None:
    """Makes this process compute on the device with that number, among those of its kind."""
    if is_accelerator(device):
        _module(device).set_device(number)


def collectives(device: torch.device) -> str:
    """The back ends over which processes exchange tensors of this device and of the CPU, as
    torch.distributed names them."""
    if not is_accelerator(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{distributed.get_default_backend_for_device(device)}"


def synchronize(device: torch.device) -> None:
    """Waits for all work that was submitted to the device."""
    if is_accelerator(device):
        _module(device).synchronize()


def synchronize_started() -> None:
    """The same for the accelerator that this process has begun to use, if any."""
    kind = next((kind for kind in _WHOSE if _has_begun(kind)), None)
    if kind is not None:
        _module(torch.device(kind)).synchronize()


def empty_cache(device: torch.device) -> None:
    """Returns torch's cached memory to the device."""
    if is_accelerator(device):
        _module(device).empty_cache()


def memory(device: torch.device) -> tuple[float, float]:
    """(free, all) bytes of the device's memory."""
    if device.type == "mps":
        total = float(torch.mps.recommended_max_memory())
        return total - torch.mps.driver_allocated_memory(), total

    if is_accelerator(device):
        module = _module(device)
        # some kinds' functions don't accept None for the current device
        at = () if device.index is None else (device.index,)
        free, total = module.mem_get_info(*at)
        return float(free), float(total)

    of_host = psutil.virtual_memory()
    return float(of_host.available), float(of_host.total)


def peak_memory(device: torch.device) -> float:
    """The most bytes of an accelerator's memory that this process has allocated at once; of a CPU's
    memory, its largest resident size."""
    if device.type == "mps":
        return float(torch.mps.driver_allocated_memory())
    if is_accelerator(device):
        return float(_module(device).max_memory_allocated())

    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def name_of(device: torch.device) -> str:
    """The maker's name of the device, such as NVIDIA H100 80GB HBM3."""
    module = _module(device) if is_accelerator(device) else None
    if module is None or not hasattr(module, "get_device_name"):
        return device.type
    return str(module.get_device_name(device))


def identity(device: torch.device) -> str:
    """The device's kind and, if there is one, a number that is unique among all machines: `cuda
    GPU-...`."""
    if device.type != CUDA:
        return device.type
    return f"{CUDA} {_module(device).get_device_properties(device).uuid}"


def are_joined_by_nccl(identities: Iterable[str]) -> bool:
    """Whether NCCL accepts devices with these identities as a group: only CUDA devices, each
    once."""
    identity_list = list(identities)
    are_apart = len(set(identity_list)) == len(identity_list)
    return (
        are_apart
        and all(device_identity.startswith(f"{CUDA} ") for device_identity in identity_list)
        and distributed.is_nccl_available()
    )


def wraps_around(kind: str) -> bool:
    """Whether sums and products of int64 on such devices are known to be modulo 2**64."""
    return kind in ("cpu", CUDA)


def all_of(device: torch.device) -> list[torch.device]:
    """All devices of an accelerator's kind that PyTorch sees, by number."""
    if not hasattr(_module(device), "device_count"):
        return [device]
    return [torch.device(device.type, n) for n in range(_module(device).device_count())]


def can_pin(device: torch.device) -> bool:
    """Whether copies from pinned memory to the device overlap with the CPU's work."""
    return device.type in _PINNED


def compiles(kind: str) -> bool:
    """Whether such devices compute attention over trees with a compiled FlexAttention, and other
    groups of operations with a single compiled kernel."""
    return kind in _COMPILED


def allows_tf32() -> bool:
    """Whether float32 products may be computed with 10 bits of mantissa."""
    return bool(torch.backends.cuda.matmul.allow_tf32)


def autocasting() -> list[str]:
    """The kinds of devices on which this thread computes in autocast's dtypes."""
    return [kind for kind in _AUTOCASTS if _is_known(kind) and torch.is_autocast_enabled(kind)]


@contextmanager
def seeded_by(device: torch.device, seed: int) -> Iterator[None]:
    """A block in which the seed alone determines random numbers, on the CPU and on this device.
    Random numbers after the block are the same as without it."""
    module = _module(device) if is_accelerator(device) else None
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed every other device
        torch.default_generator.manual_seed(seed)
        if module is None:
            yield
            return

        state = module.get_rng_state()
        try:
            module.manual_seed(seed)
            yield
        finally:
            module.set_rng_state(state)


def profiled_activity(device: torch.device) -> torch.profiler.ProfilerActivity | None:
    """The name of this device's kernels in PyTorch's profiler. None if the profiler does not see
    them."""
    activity = torch.profiler.ProfilerActivity
    return {CUDA: activity.CUDA, "xpu": activity.XPU}.get(device.type)


def has_nvtx(device: torch.device) -> bool:
    """Whether NVIDIA's Nsight can profile the device."""
    return device.type == CUDA and torch.version.hip is None


@contextmanager
def marked_for_nsight() -> Iterator[None]:
    """A block that Nsight captures. Its profiled spans and operators are NVTX ranges."""
    with ExitStack() as opened:
        cuda_profiler.start()
        opened.callback(cuda_profiler.stop)
        opened.enter_context(torch.autograd.profiler.emit_nvtx())
        yield


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _is_known(kind: str) -> bool:
    """Whether this PyTorch knows the kind. Without torch_npu, it does not know Ascend's."""
    return kind != "npu" or hasattr(torch, "npu")


def _has_begun(kind: str) -> bool:
    if kind == "mps":
        return False  # a query would initialise the device, and `auto` never chooses it
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available()) and bool(module.is_initialized())


def _add_ascend() -> None:
    """Adds Ascend's devices to torch by importing torch_npu."""
    if hasattr(torch, "npu") or importlib.util.find_spec("torch_npu") is None:
        return

    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:  # CANN's libraries are not installed
        raise ModelError(
            f"torch_npu is installed and can't be loaded ({error}): install the version of CANN "
            "that it is for and source its set_env.sh, or uninstall it"
        ) from error
