"""Cgroups as a further wall. What needs memory and pids handed down is tried where this machine has
that; moving, killing and deleting wherever it has cgroups of version 2 at all."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from open_sandbox import OpenSandbox

from agentevo.environments.sandbox import cgroups, local
from agentevo.environments.sandbox.cgroups import CgroupPlace, ControlGroup
from agentevo.environments.sandbox.section import SandboxSection
from agentevo.errors import SandboxError


@pytest.fixture
def group():
    """A real one, without limits."""
    try:
        top = cgroups._own_folders()[-1]
        folder = top / f"{cgroups.PREFIX}test-{time.monotonic_ns()}"
        folder.mkdir()
    except (OSError, IndexError) as error:
        pytest.skip(f"no cgroup can be made here: {error}")

    yield ControlGroup(folder)
    with suppress(OSError):
        folder.rmdir()


def test_all_that_is_in_a_group_ends_with_it(group):
    folder: Path = group._folder
    shell = ["setsid", "sh", "-c", "(setsid sleep 100 &) ; (setsid sleep 100 &) ; read x"]
    with subprocess.Popen(shell, stdin=subprocess.PIPE) as process:
        while len((folder / "cgroup.procs").read_text().split()) < 1:
            group.add([process.pid, 2**22 - 7])  # one that is no more is no error
        (folder / "inner").mkdir()
        group.end(time.monotonic() + 300)
        assert process.wait(300) == -9 and not folder.exists()


def test_where_no_limit_is_handed_down_there_is_no_group_and_the_reason(monkeypatch):
    monkeypatch.setattr(cgroups, "place", lambda: CgroupPlace(None, problem="of the moon"))
    assert cgroups.new_group(1024, 32) is None
    with pytest.raises(SandboxError, match="of the moon"):
        OpenSandbox(SandboxSection(type="none", cpus=0.5), {})


def test_a_group_that_can_not_be_used_starts_no_sandbox(monkeypatch, tmp_path):
    """Files in place of the kernel's: what can't be written is refused, and nothing is left."""
    monkeypatch.setattr(cgroups, "place", lambda: CgroupPlace(tmp_path / "no", frozenset({"pids"})))
    with pytest.raises(SandboxError, match="can't be started"):
        OpenSandbox(SandboxSection(type="none"), {})


def handed_down() -> CgroupPlace:
    found = cgroups.place()
    if found.folder is None:
        pytest.skip(found.problem)
    return found


MANY = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        block = bytearray(40 << 20)
        time.sleep(60)
time.sleep(60)
"""
FORKS = """
import os, time
num = 0
try:
    while num < 500:
        if os.fork() == 0:
            time.sleep(60)
        num += 1
except OSError as error:
    print(num < 30, type(error).__name__)
"""


def test_the_kernel_keeps_the_limits(kind, monkeypatch):
    folder = handed_down().folder
    monkeypatch.setattr(local.watch, "add", lambda watched: None)

    sandbox = OpenSandbox(SandboxSection(type=kind, memory_mib=100, processes=24, disk_mib=16), {})
    try:
        assert len(list(folder.glob(f"{cgroups.PREFIX}*"))) == 1
        memory = sandbox(lambda one: one.run(MANY))
        assert memory.error.type == "OutOfMemory" and memory.files_lost
        forks = sandbox(lambda one: one.run(FORKS))
        assert forks.stdout == "True BlockingIOError\n"
    finally:
        sandbox.close()

    assert list(folder.glob(f"{cgroups.PREFIX}*")) == []


def test_cpus_bounds_what_all_compute_together(kind):
    if "cpu" not in handed_down().controllers:
        pytest.skip("cpu is not handed down")

    code = "import time\nc, t = time.process_time(), time.monotonic()\n"
    code += "while time.monotonic() < t + 2: pass\n(time.process_time() - c) < 1"
    sandbox = OpenSandbox(SandboxSection(type=kind, cpus=0.2), {})
    try:
        assert sandbox(lambda one: one.run(code)).value == "True"
    finally:
        sandbox.close()


def test_sandboxes_that_start_together_find_one_place(tmp_path, monkeypatch):
    (tmp_path / "cgroup.subtree_control").write_text("memory pids")
    tried = []
    monkeypatch.setattr(cgroups, "_own_folders", lambda: [tmp_path])
    monkeypatch.setattr(cgroups, "_try", lambda folder: tried.append(folder) or time.sleep(0.1))
    cgroups._find_place.cache_clear()

    try:
        with ThreadPoolExecutor(4) as threads:
            places = list(threads.map(lambda _: cgroups.place(), range(4)))
    finally:
        cgroups._find_place.cache_clear()

    assert {place.folder for place in places} == {tmp_path} and len(tried) == 1
