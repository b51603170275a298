"""The CPU's kernels are built once, from what lies in the package; nobody else's code is run."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentevo.models.compute import cpu_kernels
from agentevo.models.compute.cpu_kernels import CpuKernels, KernelsUnavailableError, load_library
from agentevo.runs.doctor import checks

pytestmark = pytest.mark.skipif(
    bool(cpu_kernels.why_not()[0]), reason=f"no kernels here: {cpu_kernels.why_not()[0]}"
)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where kernels are kept: nothing there yet."""
    monkeypatch.setenv("AGENTEVO_CACHE", str(tmp_path))
    return tmp_path / "cpu_kernels"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Where the first call of the compiler leaves its library for later ones."""
    return tmp_path_factory.mktemp("built") / "library"


COMPILER = """\
#!/bin/sh
echo >> "{calls}"
if [ ! -f "{built}" ]; then
  cc "$@" -O0 || exit
  for word; do [ "$before" = -o ] && cp "$word" "{built}"; before=$word; done
  exit
fi
while [ "$1" != -o ]; do shift; done
exec cp "{built}" "$2"
"""


@pytest.fixture
def counting_compiler(tmp_path, built, monkeypatch) -> Path:
    """A compiler that notes each call in the file that this returns. It optimizes nothing, and
    gives what it has compiled once again."""
    calls = tmp_path / "calls"
    script = tmp_path / "compiler"
    script.write_text(COMPILER.format(calls=calls, built=built))
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    calls.touch()
    return calls


def num_calls(calls: Path) -> int:
    return len(calls.read_text().splitlines())


@pytest.mark.slow
def test_built_once_and_again_when_damaged_or_changed(folder, counting_compiler, monkeypatch):
    load_library()
    load_library()
    assert num_calls(counting_compiler) == 1

    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    file.unlink()  # not written over: this process has it mapped
    file.write_bytes(b"half of a library")
    load_library()
    assert num_calls(counting_compiler) == 2

    monkeypatch.setattr(cpu_kernels, "OPTIONS", (*cpu_kernels.OPTIONS, "-DANOTHER"))
    load_library()
    assert num_calls(counting_compiler) == 3


@pytest.mark.slow
def test_what_others_can_write_is_not_loaded(folder, counting_compiler):
    load_library()
    (file,) = folder.iterdir()
    file.chmod(0o777)
    load_library()

    assert num_calls(counting_compiler) == 2  # built anew, in its place
    assert stat.S_IMODE(file.stat().st_mode) == 0o700

    folder.chmod(0o777)
    with pytest.raises(KernelsUnavailableError, match="other users can write into") as refused:
        load_library()

    assert refused.value.remedy == f"chmod 700 {folder}"


@pytest.mark.parametrize(
    ("change", "why", "remedy"),
    [
        ({"PATH": "/nowhere"}, "no C compiler was found", "install gcc or clang"),
        ({"CC": "false"}, "false can't build them: it failed", "another compiler"),
        ({"CC": "/no/such/compiler"}, "can't build them: .*No such file", "another compiler"),
        ({"AGENTEVO_CPU_KERNELS": "off"}, "AGENTEVO_CPU_KERNELS=off", ""),
        ({"AGENTEVO_CACHE": "/proc/nobody"}, "/proc/nobody/cpu_kernels can't be made", "CACHE"),
    ],
)
def test_without_kernels_the_reason_is_said_and_nothing_left(
    folder, monkeypatch, change, why, remedy
):
    for name, value in change.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(KernelsUnavailableError, match=why) as error:
        load_library()

    assert remedy in error.value.remedy
    assert not folder.exists() or not list(folder.iterdir())

    check = checks.judge_kernels(str(error.value), error.value.remedy)
    assert check.status == ("warning" if remedy else "good") and "two thirds" in check.finding


def no_room(*args, **kwargs):
    raise OSError(errno.EROFS, "Read-only file system", "somewhere")


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_where_nothing_can_be_kept_there_are_no_kernels(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cpu_kernels.tempfile, "mkstemp", no_room)
        with pytest.raises(KernelsUnavailableError, match=r"can't be stored.*Read-only") as error:
            load_library()

    assert "another disk" in error.value.remedy

    monkeypatch.delenv("AGENTEVO_CACHE")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(KernelsUnavailableError, match="home directory") as error:
        load_library()

    assert "AGENTEVO_CACHE" in error.value.remedy


def test_a_compiler_may_say_what_is_no_text(folder, tmp_path, monkeypatch):
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\nprintf 'bad \\377 name' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(KernelsUnavailableError, match="bad \ufffd name"):
        load_library()


def test_a_full_disk_is_not_the_compilers_fault(folder, tmp_path, monkeypatch):
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\necho 'ld: final link failed: No space left on device' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))

    with pytest.raises(KernelsUnavailableError, match="No space left") as error:
        load_library()

    assert "another disk" in error.value.remedy


@pytest.mark.slow
def test_what_killed_builds_left_is_removed(folder, counting_compiler):
    folder.mkdir(mode=0o700)
    old = folder / "old.partial"
    recent = folder / "recent.partial"
    for file in (old, recent):
        file.touch()

    os.utime(old, (0, 0))
    load_library()
    assert recent.exists() and not old.exists()


@pytest.mark.slow
def test_a_function_of_the_same_name_elsewhere_is_not_called(folder, counting_compiler, tmp_path):
    source = tmp_path / "other.c"
    other = tmp_path / "other.so"
    source.write_text("void my_part(long n, long *first, long *end) { *first = *end = 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", other], check=True)
    ctypes.CDLL(str(other), mode=ctypes.RTLD_GLOBAL)
    with torch.inference_mode():
        cpu_kernels._compare(CpuKernels(load_library()))


def test_a_compiler_that_hangs_is_ended(folder, tmp_path, monkeypatch):
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setattr(cpu_kernels, "BUILD_TIMEOUT_S", 0.2)

    with pytest.raises(KernelsUnavailableError, match=r"took more than 0\.2 s"):
        load_library()

    assert not list(folder.iterdir())


@pytest.mark.soak
def test_processes_that_build_at_once(folder, counting_compiler):
    program = "from agentevo.models.compute.cpu_kernels import why_not; print(why_not()[0])"
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ)
        for _ in range(2)
    ]
    for process in running:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and out == b"\n"

    assert num_calls(counting_compiler) > 1
    assert {file.suffix for file in folder.iterdir()} == {".so"}


def test_the_sources_are_in_the_package():
    names = {file.name for file in cpu_kernels.SOURCES.iterdir()}
    assert {"products.c", "attention.c", "rows.c", "threads.c", "vectors.h"} <= names
