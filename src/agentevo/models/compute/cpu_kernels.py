"""AgentEvo's own kernels for a decoder's pass without gradients on an x86 CPU in float32. They
compute the operations around the matrix products, and the products of few rows.

    cpu_kernels() -> CpuKernels   built for this machine, compared with PyTorch
                  -> None         PyTorch's operators do the same, at about two thirds of the speed

To generate tokens, few rows are multiplied by all weights. This is as fast as reading the memory if
the kernel prefetches while it multiplies, which oneDNN's kernel does not do (docs/lab-notebook.md,
2026-11-27). In addition, a layer has about forty small operations whose calls take longer than
their arithmetic. These kernels need five calls.

The numbers of a row depend on that row alone, to the last bit. Products have exactly the bits of
oneDNN, which computes the products of many rows.

Builds the C code in `models/compute/cpu/` for this machine, once, and loads it.

    $AGENTEVO_CACHE/cpu_kernels/KEY-CONTENT.so      (default ~/.cache/agentevo/cpu_kernels/...)

KEY is the digest of the sources and the compiler's options. CONTENT is the digest of the file
itself, and is compared before the file is loaded: a damaged file is built again. A file is loaded
only if it belongs to this user and no other user can write it. As with Triton and `torch.compile`,
the machine needs a C compiler: $CC, or `cc`, `gcc` or `clang`.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from agentevo.models.compute.windows import Chunk, Window
from agentevo.runtime.files import PARTIAL, cache_root

SOURCES = Path(__file__).parent / "cpu"
SETTING = "AGENTEVO_CPU_KERNELS"
"""The environment variable; `off` disables the kernels."""
COMPILERS = ("cc", "gcc", "clang")
OPTIONS = (
    "-std=gnu11",
    "-O3",
    "-shared",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-Wl,-Bsymbolic",  # its functions call one another, not those of the same name elsewhere
)
INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma", "-mno-avx512f"),
    "AVX512": ("-mavx2", "-mfma", "-mavx512f"),
}
"""PyTorch's name of the processor's capability -> the compiler's options."""
BUILD_TIMEOUT_S = 120.0
OTHER_COMPILER = "set CC to another compiler"
OTHER_DISK = "set AGENTEVO_CACHE to a folder of another disk"
OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class KernelsUnavailableError(Exception):
    """The kernels can't be used on this machine. It has the reason and, if there is one, the
    remedy."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.remedy = remedy


def load_library(capability: str | None = None) -> ctypes.CDLL:
    """The kernels for the processor's capability as PyTorch reports it, or for another key of
    INSTRUCTIONS. Builds them if needed (a few seconds). Raises KernelsUnavailableError."""
    if os.environ.get(SETTING, "").strip().lower() == "off":
        raise KernelsUnavailableError(f"{SETTING}=off")
    if platform.system() != "Linux" or platform.machine() not in {"x86_64", "AMD64"}:
        raise KernelsUnavailableError("they are for Linux on x86 processors")

    instructions = INSTRUCTIONS.get(capability or torch.backends.cpu.get_cpu_capability())
    if instructions is None:
        raise KernelsUnavailableError("the processor has neither AVX2 nor AVX-512")

    openmp = _openmp()
    try:
        library = ctypes.CDLL(str(_find_or_build((*OPTIONS, *instructions))))
    except OSError as error:  # the disk is full, read-only, or mounted with noexec
        raise KernelsUnavailableError(
            f"they can't be stored or loaded: {error}", OTHER_DISK
        ) from error

    library.use_openmp.restype = None
    library.use_openmp(*(ctypes.cast(function, ctypes.c_void_p) for function in openmp))
    return library


def _openmp() -> list[ctypes._FuncPointer]:
    """The functions of the OpenMP library that PyTorch uses in this process."""
    for name in (None, "libgomp.so.1"):
        try:
            library = ctypes.CDLL(name)
            return [getattr(library, function) for function in OPENMP]
        except (OSError, AttributeError):
            continue
    raise KernelsUnavailableError("PyTorch runs without GNU's or Intel's OpenMP here")


def _find_or_build(options: tuple[str, ...]) -> Path:
    """The library built with these options. Builds it if the cache does not have it."""
    sources = sorted(file for file in SOURCES.iterdir() if file.suffix in {".c", ".h"})
    digest = hashlib.sha256(" ".join((*options, *platform.libc_ver())).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())

    key = digest.hexdigest()[:20]
    folder = _own_folder()
    for file in folder.glob(f"{key}-*.so"):
        if _is_ours(file) and file.name == _name(key, file):
            return file

    return _build(
        [str(source) for source in sources if source.suffix == ".c"], options, folder, key
    )


def _build(sources: list[str], options: tuple[str, ...], folder: Path, key: str) -> Path:
    compiler = os.environ.get("CC") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        raise KernelsUnavailableError(
            "no C compiler was found", "install gcc or clang, or set CC to one"
        )

    _drop_old_partials(folder)
    handle, unfinished = tempfile.mkstemp(suffix=PARTIAL, dir=folder)
    os.close(handle)
    try:
        command = [*compiler.split(), *options, *sources, "-o", unfinished, "-lm"]
        done = subprocess.run(command, capture_output=True, timeout=BUILD_TIMEOUT_S)
        if done.returncode:
            error_text = done.stderr.decode(errors="replace").strip()[-500:] or "it failed"
            remedy = OTHER_DISK if os.strerror(errno.ENOSPC) in error_text else OTHER_COMPILER
            raise KernelsUnavailableError(f"{compiler} can't build them: {error_text}", remedy)

        os.chmod(unfinished, 0o700)
        target = folder / _name(key, Path(unfinished))
        os.replace(unfinished, target)
        return target
    except subprocess.TimeoutExpired:
        raise KernelsUnavailableError(
            f"{compiler} took more than {BUILD_TIMEOUT_S:g} s to build them", OTHER_COMPILER
        ) from None
    except OSError as error:
        raise KernelsUnavailableError(
            f"{compiler} can't build them: {error}", OTHER_COMPILER
        ) from error
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _drop_old_partials(folder: Path) -> None:
    """Deletes files of processes that were killed during a build."""
    for file in folder.glob(f"*{PARTIAL}"):
        with suppress(FileNotFoundError):  # another process deletes them, too
            if time.time() - file.stat().st_mtime > 2 * BUILD_TIMEOUT_S:
                file.unlink()


def _name(key: str, file: Path) -> str:
    return f"{key}-{hashlib.sha256(file.read_bytes()).hexdigest()[:20]}.so"


def _own_folder() -> Path:
    try:
        folder = cache_root() / "cpu_kernels"
    except RuntimeError as error:  # a user without an account, and no $HOME
        raise KernelsUnavailableError(str(error), "set AGENTEVO_CACHE to a folder") from error

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise KernelsUnavailableError(
            f"{folder} can't be made ({error.strerror})", "set AGENTEVO_CACHE to a folder of yours"
        ) from error

    if not _is_ours(folder):
        raise KernelsUnavailableError(
            f"other users can write into {folder}, whose files are run", f"chmod 700 {folder}"
        )

    return folder


def _is_ours(path: Path) -> bool:
    """Whether the file belongs to this user, and no other user can write it."""
    facts = path.stat()
    return facts.st_uid == os.getuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


FEW_ROWS = 64
"""For at most this many rows, these products are faster than oneDNN's (`benchmarks/linear.py`)."""
WHOLE = 16
"""The size of a head, and of a row that goes through the gate, must be a multiple of this."""
BLOCK = 64
"""The number of outputs that are stored together in a packed matrix."""
TOLERANCE = 2e-6

logger = logging.getLogger(__name__)

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long
_FLOAT = ctypes.c_float


class Matrix(ctypes.Structure):
    """`matrix` of cpu/products.c. The code that creates it must keep its tensors alive."""

    _fields_ = (
        ("packed", _POINTER),
        ("bias", _POINTER),
        ("inputs", _LONG),
        ("outputs", _LONG),
        ("stretch", _LONG),
    )


class KernelCache(ctypes.Structure):
    """`cache` of cpu/attention.c."""

    _fields_ = (
        ("keys", _POINTER),
        ("values", _POINTER),
        ("groups", _LONG),
        ("dim", _LONG),
        ("blocks", _LONG),
        ("places", _LONG),
    )

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> KernelCache:
        """The cache of one layer's keys [slots, G, blocks, D, KEY_BLOCK] and values [slots, G,
        places, D]."""
        assert keys.is_contiguous() and values.is_contiguous()
        _, groups, places, dim = values.shape
        return cls(keys.data_ptr(), values.data_ptr(), groups, dim, keys.shape[2], places)


class Prefix(ctypes.Structure):
    """`prefix` of cpu/attention.c."""

    _fields_ = (
        ("keys", _POINTER),
        ("values", _POINTER),
        ("blocks", _LONG),
        ("length", _LONG),
    )

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Prefix:
        """The prefix of keys [G, blocks, D, KEY_BLOCK] and values [G, P, D]."""
        assert keys.is_contiguous() and values.is_contiguous()
        return cls(keys.data_ptr(), values.data_ptr(), keys.shape[1], values.shape[1])


_ARGUMENTS: dict[str, list[Any]] = {
    "product": [ctypes.POINTER(Matrix), _POINTER, _LONG, _POINTER, _POINTER, _LONG],
    "rms_norm": [_POINTER, _LONG, _LONG, _FLOAT, _POINTER, _LONG],
    "gate": [_POINTER, _POINTER, _LONG, _POINTER, _LONG],
    "softmax_rows": [_POINTER, _LONG, _LONG, _LONG],
    "rotate": [_POINTER, *[_LONG] * 5, *[_POINTER] * 4, _LONG],
    "keep": [ctypes.POINTER(KernelCache), *[_POINTER, _LONG] * 2, _POINTER, _POINTER, _LONG, _LONG],
    "attend": [
        ctypes.POINTER(KernelCache),
        *[_POINTER] * 5,
        ctypes.POINTER(Prefix),
        *[_LONG] * 3,
        _FLOAT,
        _LONG,
        _LONG,
        _POINTER,
        _POINTER,
        _LONG,
    ],
}


class CpuKernels:
    """The functions of models/compute/cpu/ for tensors. All tensors are float32 on the CPU and
    without gradients, and contiguous unless the method says otherwise."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = None
        self._library: Any = library

    def product(
        self, weight: Matrix, x: torch.Tensor, plus: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x @ weight.T + bias + plus, for x [rows, in] and plus [rows, out], added in this
        order."""
        x = x.contiguous()
        out = x.new_empty(x.shape[0], weight.outputs)
        addend = None if plus is None else plus.contiguous()
        self._library.product(
            weight,
            x.data_ptr(),
            x.shape[0],
            None if addend is None else addend.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )

        return out

    def rms_norm(self, x: torch.Tensor, epsilon: float) -> torch.Tensor:
        """x [rows, width] / sqrt(mean of squares + epsilon) (arXiv 1910.07467)."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._library.rms_norm(
            x.data_ptr(), *x.shape, epsilon, out.data_ptr(), torch.get_num_threads()
        )
        return out

    def gate_in_place(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Writes gate * sigmoid(gate) * up into `gate`. Both are [rows, width], and width is a
        multiple of WHOLE."""
        assert gate.is_contiguous() and up.is_contiguous()
        place = gate.data_ptr()
        self._library.gate(place, up.data_ptr(), gate.numel(), place, torch.get_num_threads())
        return gate

    def softmax_(self, scores: torch.Tensor) -> torch.Tensor:
        """Softmax of scores [..., K], in place. Elements of -inf change nothing, at any position.
        No row may have only -inf."""
        assert scores.is_contiguous()
        width = scores.shape[-1]
        self._library.softmax_rows(
            scores.data_ptr(), scores.numel() // width, width, torch.get_num_threads()
        )
        return scores

    def rotate(
        self, heads: torch.Tensor, num_q: int, num_k: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Applies rotary positions (arXiv 2104.09864) to query heads [T, num_q, D] and key heads
        [T, num_k, D], which are the first of heads [T, more, D]. cos and sin are [T, D]."""
        heads = heads.contiguous()
        cos = cos.contiguous()
        sin = sin.contiguous()
        tokens, _, dim = heads.shape
        q = heads.new_empty(tokens, num_q, dim)
        k = heads.new_empty(tokens, num_k, dim)
        self._library.rotate(
            heads.data_ptr(),
            tokens,
            heads.stride(0),
            num_q,
            num_k,
            dim,
            cos.data_ptr(),
            sin.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
            torch.get_num_threads(),
        )

        return q, k

    def keep(
        self,
        cache: KernelCache,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        """Writes keys and values [T, G, D] with any strides into the cache, at slots and places [T]
        int64."""
        k, v = (
            tensor if tensor.stride()[1:] == (cache.dim, 1) else tensor.contiguous()
            for tensor in (k, v)
        )
        self._library.keep(
            cache,
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            slots.data_ptr(),
            places.data_ptr(),
            k.shape[0],
            torch.get_num_threads(),
        )

    def attend(  # noqa: PLR0913, PLR0917 (in the order of the C function)
        self,
        cache: KernelCache,
        q: torch.Tensor,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        counts: torch.Tensor,
        prefix: Prefix | None,
        scaling: float,
        window: Window,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Computes softmax attention of the new tokens of B sequences, and writes it into `out` [T,
        H, D]. The queries of the sequences are rows `tokens` [B, Q] of q [T, H, D]. Each attends to
        the keys of its sequence in the window up to its own key. `sinks` [G, H / G], if there are
        any, are scores of the heads beside those of the keys. The keys of a sequence
        are in slots [B] with lengths [B], after the prefix if there is one. Of the Q rows, the
        first counts [B] are the sequence's last tokens, and the rest is padding. Indices are int64,
        and D is a multiple of WHOLE."""
        assert q.is_contiguous() and out.is_contiguous() and tokens.is_contiguous()
        assert sinks is None or (sinks.is_contiguous() and sinks.dtype == torch.float32)

        batch, queries = tokens.shape
        self._library.attend(
            cache,
            q.data_ptr(),
            tokens.data_ptr(),
            slots.data_ptr(),
            lengths.data_ptr(),
            counts.data_ptr(),
            prefix,
            batch,
            queries,
            q.shape[1] // cache.groups,
            scaling,
            window if isinstance(window, int) else 0,
            window.size if isinstance(window, Chunk) else 0,
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )


def cpu_kernels() -> CpuKernels | None:
    """The kernels of this machine, or None if there are none; `why_not` says why."""
    return _load_kernels()[0]


def why_not() -> tuple[str, str]:
    """Why `cpu_kernels` returns None, and the remedy if there is one. Empty if it does not."""
    return _load_kernels()[1:]


@cache
def _load_kernels() -> tuple[CpuKernels | None, str, str]:
    try:
        kernels = CpuKernels(load_library())
        with torch.inference_mode(), torch.device("cpu"):
            _compare(kernels)
        return kernels, "", ""
    except KernelsUnavailableError as error:
        logger.info("generation on this CPU is slower without kernels of our own: %s", error)
        return None, str(error), error.remedy


def _compare(kernels: CpuKernels) -> None:
    """Raises KernelsUnavailableError if a function's results differ from PyTorch's operators.
    Products are compared with oneDNN's, to the bit, by the code that packs a matrix."""
    numbers = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 5, 96, generator=numbers, dtype=torch.float32).mul_(4)
    epsilon = 1e-5
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    q, k = kernels.rotate(x.view(5, 3, 32), 2, 1, y[:, :32], y[:, 32:64])
    heads = x.view(5, 3, 32)
    cos = y[:, None, :32]
    sin = y[:, None, 32:64]
    low, high = heads.chunk(2, -1)
    turned = heads * cos + torch.cat([-high, low], -1) * sin
    pairs = {
        "rms_norm": (kernels.rms_norm(x, epsilon), normed),
        "rotate": (torch.cat([q, k], 1), turned),
        "softmax": (kernels.softmax_(x[:, :37].clone()), torch.softmax(x[:, :37], -1)),
        "gate": (kernels.gate_in_place(x.clone(), y), torch.nn.functional.silu(x) * y),
        "attend": _attend_both_ways(kernels, x[:, :16], y[:, :16]),
    }
    for name, (result, expected) in pairs.items():
        if not torch.allclose(result, expected, rtol=TOLERANCE, atol=TOLERANCE):
            raise KernelsUnavailableError(f"{name} gives other results than PyTorch")


def _attend_both_ways(
    kernels: CpuKernels, numbers: torch.Tensor, queries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of five tokens in slot 1 to themselves, computed by the kernels and by PyTorch.
    numbers and queries are [5, 16]."""
    keys = numbers.new_zeros(2, 1, 1, 16, 32)
    values = numbers.new_zeros(2, 1, 32, 16)
    cache = KernelCache.of(keys, values)
    k = numbers[:, None]
    v = numbers.flip(0)[:, None]
    slots = torch.ones(5, dtype=torch.int64)
    places = torch.arange(5)
    kernels.keep(cache, k, v, slots, places)

    q = queries[:, None].contiguous()
    out = numbers.new_empty(5, 1, 16)
    length = torch.tensor([5])
    kernels.attend(cache, q, places[None], slots[:1], length, length, None, 0.25, None, None, out)
    weights = torch.where(places[:, None] >= places, q[:, 0] @ k[:, 0].t() / 4, -torch.inf)
    return out, (torch.softmax(weights, -1) @ v[:, 0])[:, None]
