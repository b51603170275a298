"""Processes that share a training in every way come to what one process comes to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import mesh_runs as runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process comes to, in the file that the others read."""
    cases = [case for of_count in runs.CASES.values() for case in of_count]
    file = tmp_path_factory.mktemp("alone") / "alone"
    torch.save({runs.single(case): runs.trained(case, None) for case in cases}, file)
    return file


@pytest.fixture(scope="module", params=runs.CASES, ids="{} processes".format)
def found(request, alone, tmp_path_factory):
    """Of each process: case -> how far it is from one process."""
    folder, count = tmp_path_factory.mktemp("mesh"), request.param
    outs = [folder / f"{process}.pt" for process in range(count)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                runs.__file__,
                *map(str, (count, process, folder / "meeting", alone, out)),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        for process, out in enumerate(outs)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=900)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return [list(zip(runs.CASES[count], torch.load(out), strict=True)) for out in outs]


def test_weights_and_metrics_are_those_of_one_process(found):
    for of_process in found:
        for case, differences in of_process:
            assert differences["weights"] < 1e-5, (case, differences)
            assert differences["metrics"] < 1e-5, (case, differences)
            assert differences["moved"] > 1e-3, (case, differences)


def test_each_process_keeps_its_part_of_all_models(found):
    """Of the policy and of what stands beside it, moments included."""
    for of_process in found:
        for (model, kind, _, sizes), differences in of_process:
            parts = sizes.get("shard", 1) * sizes.get("tensor", 1)
            if "+" not in model:  # the norms of a layer are whole under tensor parallelism
                assert differences["held"] < 1.15 / parts, (model, kind, sizes, differences)
            assert differences["moments"] < 1.15 / parts, (model, kind, sizes, differences)
