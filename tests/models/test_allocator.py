"""Freed blocks between blocks in use go back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

LATER = """
import sys
from pathlib import Path
import torch
from agentevo.models.compute.activations import give_back_freed_blocks

def resident_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

if sys.argv[1] == "given back":
    give_back_freed_blocks()
del_me = torch.ones(5 * 2**20)  # 20 MiB: freed, it raises the size up to which glibc keeps blocks
del del_me
blocks = [torch.ones(6 * 2**18) for _ in range(40)]  # 6 MiB each
before = resident_mib()
del blocks[::2]
print(before - resident_mib())
"""


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(("way", "low", "high"), [("given back", 100, 140), ("kept", -20, 40)])
@pytest.mark.cold_start
def test_blocks_of_some_mebibytes(way, low, high):
    done = subprocess.run(
        [sys.executable, "-c", LATER, way], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert low < float(done.stdout) < high, "20 blocks of 6 MiB"
