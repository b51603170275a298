"""Two processes that share each minibatch end with the weights and metrics of one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("data_parallel_runs.py")
specification = importlib.util.spec_from_file_location("data_parallel_runs", PROGRAM)
assert specification is not None and specification.loader is not None
runs = importlib.util.module_from_spec(specification)
specification.loader.exec_module(runs)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """What each of two processes finds."""
    folder = tmp_path_factory.mktemp("ranks")
    outs = [folder / f"{rank}.pt" for rank in range(2)]
    commands = [
        [sys.executable, str(PROGRAM), "2", str(rank), str(folder / "meeting"), str(out)]
        for rank, out in enumerate(outs)
    ]
    processes = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    return [torch.load(out) for out in outs]


@pytest.mark.slow
@pytest.mark.parametrize("name", runs.RUNS)
def test_two_ranks_equal_one(name, of_ranks):
    with torch.random.fork_rng(devices=[]):
        parameters, metrics = runs.RUNS[name]()
    weights = torch.cat([p.detach().flatten() for p in parameters])
    for _, found in of_ranks:
        theirs, told = found[name]
        torch.testing.assert_close(theirs, weights, rtol=0, atol=1e-5)
        assert len(told) == len(metrics)
        for one, other in zip(told, metrics, strict=True):
            assert one.keys() == other.keys()
            for key, value in other.items():
                if key not in (
                    "trainer/distinct_tokens",
                    "trainer/distinct_flops",
                ):  # a group that is cut is computed on both
                    assert one[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert torch.equal(*(found[name][0] for _, found in of_ranks)), "ranks never drift apart"


def test_each_rank_computes_its_own_half(of_ranks):
    one, other = (parts for parts, _ in of_ranks)
    assert len(one) == len(other) > 1
    assert sorted(index for part in [*one, *other] for index in part) == list(range(16))


def test_updates_moved_the_weights(of_ranks):
    start = torch.cat([p.detach().flatten() for p in runs.model_of(1).parameters()])
    moved = of_ranks[0][1]["grpo"][0]
    assert float((moved - start).abs().max()) > 1e-3
