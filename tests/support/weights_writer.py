"""A writer of weights that is killed in the middle of its work: FOLDER VERSION DIE_AT."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from agentevo.inference.weights import weights_folder as weights
from agentevo.runtime import files


def write_and_die(folder: str, version: int, die_at: int) -> None:
    """Writes a version, and kills its own process when something reaches the disk for the
    `die_at`-th time."""
    real = files.sync_to_disk
    count = 0

    def sync(path: Path) -> None:
        nonlocal count
        real(path)
        count += 1
        if count == die_at:
            os.kill(os.getpid(), 9)

    files.sync_to_disk = weights.sync_to_disk = sync
    weights.WeightsFolder(Path(folder)).write(version, torch.nn.Linear(3, 4), keep=2)


if __name__ == "__main__":
    write_and_die(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
