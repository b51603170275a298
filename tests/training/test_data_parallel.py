"""Processes that share each minibatch end with the weights and metrics of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from agentevo.errors import TrainingError
from agentevo.training import parallel

sys.path.insert(0, str(Path(__file__).parent))
import data_parallel_runs as runs
from preset_gradients import NAMES, WHOLE, find_gradient

pytestmark = pytest.mark.slow


def spawned(folder: Path, shape: str, count: int):
    """What each of `count` processes finds."""
    outs = [folder / f"{process}.pt" for process in range(count)]
    commands = [
        [sys.executable, runs.__file__, shape, str(process), str(folder / "meeting"), str(out)]
        for process, out in enumerate(outs)
    ]
    processes = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors

    return [torch.load(out) for out in outs]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """What each of two ranks finds."""
    return spawned(tmp_path_factory.mktemp("ranks"), "2", 2)


@pytest.fixture(scope="module")
def of_mesh(tmp_path_factory):
    """What each of four processes finds, two of which are one rank."""
    return spawned(tmp_path_factory.mktemp("mesh"), "2x2", 4)


def check_equal(found, name: str) -> None:
    """One process's run (weights, metrics) is that of a single process."""
    with torch.random.fork_rng(devices=[]):
        parameters, metrics = runs.RUNS[name]()

    weights = torch.cat([p.detach().flatten() for p in parameters])
    theirs, told = found
    torch.testing.assert_close(theirs, weights, rtol=0, atol=1e-5)
    assert len(told) == len(metrics)

    for one, metric in zip(told, metrics, strict=True):
        assert one.keys() == metric.keys()
        for key, value in metric.items():
            if key not in (
                "trainer/distinct_tokens",
                "trainer/distinct_flops",
            ):  # a group that is cut is computed on both
                assert one[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("name", runs.RUNS)
def test_two_ranks_equal_one(name, of_ranks):
    for _, found, _ in of_ranks:
        check_equal(found[name], name)
    assert torch.equal(*(found[name][0] for _, found, _ in of_ranks)), "ranks never drift apart"


@pytest.mark.parametrize("name", NAMES)
def test_short_micro_batches_on_two_ranks_give_the_whole_batch_s_gradient(name, of_ranks):
    with torch.random.fork_rng(devices=[]):
        whole = find_gradient(runs.model_of(5), name, WHOLE)

    assert float(whole.norm()) > 1e-3, "the preset teaches something"
    for *_, gradients in of_ranks:
        difference = float((gradients[name] - whole).norm() / whole.norm())
        assert difference < 1e-5


def test_each_rank_computes_its_own_half(of_ranks):
    one, other = (parts for parts, *_ in of_ranks)
    assert len(one) == len(other) > 1
    assert sorted(index for part in [*one, *other] for index in part) == list(range(16))


def test_updates_moved_the_weights(of_ranks):
    start = torch.cat([p.detach().flatten() for p in runs.model_of(1).parameters()])
    moved = of_ranks[0][1]["grpo"][0]
    assert float((moved - start).abs().max()) > 1e-3


@pytest.mark.slow
def test_processes_that_are_one_rank_count_once(of_mesh):
    """A mesh of 2 (dp) by 2: losses, gradients, tables and metrics are those of two ranks."""
    assert [one["ranks"] for one in of_mesh] == [(0, 2, 4), (0, 2, 4), (1, 2, 4), (1, 2, 4)]
    assert [one["gathered"] for one in of_mesh] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert of_mesh[0]["summed"] == {"tokens": 21.0, "0": 1.0, "2": 1.0}
    assert of_mesh[0]["parts"] == of_mesh[1]["parts"] != of_mesh[2]["parts"] == of_mesh[3]["parts"]

    split = [index for one in (of_mesh[0], of_mesh[2]) for part in one["parts"] for index in part]
    assert sorted(split) == list(range(16))

    for name in of_mesh[0]["runs"]:
        for one in of_mesh:
            check_equal(one["runs"][name], name)


@pytest.mark.slow
def test_the_first_process_of_all_writes_and_all_know_what_became_of_it(of_mesh):
    first, *others = (one["writes"] for one in of_mesh)
    assert all(one == first for one in others)
    one, two, refusal = first
    assert (one[0], two[0]) == ("step-000001", "step-000002")
    assert one[2:] == two[2:] == (1, 0.5)
    assert "step-000003 could not be written" in refusal


def test_a_mesh_without_data_parallel_ranks_is_refused():
    mesh = SimpleNamespace(mesh_dim_names=("tp", "cp"))
    with pytest.raises(TrainingError, match="has the dimensions tp, cp: name the one"):
        parallel.use_mesh(mesh)
    assert parallel.num_ranks() == 1
