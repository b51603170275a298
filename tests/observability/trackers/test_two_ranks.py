"""Processes that train together are one run in the trackers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("two_ranks.py")


@pytest.mark.slow
def test_two_ranks_are_one_run_in_the_trackers(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    done = subprocess.run(
        [sys.executable, *words, str(PROGRAM), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr

    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert lines == [["begin", 0], [0, 0], [1, 0], [2, 0], ["finished", 0]]
    assert len(list(tmp_path.rglob("events.out.tfevents.*"))) == 1
    assert set(json.loads((tmp_path / "tracking.json").read_text())) == {"lines", "tensorboard"}
