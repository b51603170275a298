"""Builds the C code in `models/compute/cpu/` for this machine, once, and loads it.

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
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

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
