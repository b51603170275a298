"""A server that was started as a child ends with its parent, however that ends."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from agentevo.inference.serving.guarded_server import GuardedServer

CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
PARENT = f"""
import sys, time
from pathlib import Path
from agentevo.inference.serving.guarded_server import GuardedServer
GuardedServer([sys.executable, "-c", {CHILD!r}], Path(sys.argv[1]))
time.sleep(600)
"""


def _pid(log) -> int:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        if log.exists() and (text := log.read_text()).endswith("\n"):
            return int(text)
        time.sleep(0.02)
    raise AssertionError("the server has not started")


def _is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _until_gone(pid: int) -> None:
    until = time.monotonic() + 300
    while not _is_gone(pid):
        assert time.monotonic() < until, "the server lives on"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_parent_takes_its_server_along(tmp_path):
    log = tmp_path / "server.log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(log)])
    pid = _pid(log)
    parent.kill()
    parent.wait()
    _until_gone(pid)


def test_close_ends_it_and_an_end_of_its_own_is_told_with_the_log(tmp_path):
    server = GuardedServer([sys.executable, "-c", CHILD], tmp_path / "one.log")
    pid = _pid(tmp_path / "one.log")
    assert server.describe_end() == ""

    server.close()
    _until_gone(pid)

    broken = GuardedServer([sys.executable, "-c", "raise SystemExit('no GPU')"], tmp_path / "two")
    until = time.monotonic() + 300
    while not broken.describe_end() and time.monotonic() < until:
        time.sleep(0.02)
    assert "exit code 1" in broken.describe_end() and "no GPU" in broken.describe_end()

    broken.close()
