"""Checkpoints that several processes write in parts: whole or not there, and the same to whoever
reads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from several_processes import run_processes
from slow import soak

sys.path.insert(0, str(Path(__file__).parent))
import saved_runs as runs

pytestmark = pytest.mark.slow


def together(folder: Path, what: str, key: str, size: int, world: int) -> list[dict]:
    outs = [folder / f"{what}-{process}.pt" for process in range(world)]
    meeting = folder / f"meeting-{what}"
    run_processes(
        runs.__file__,
        [
            (what, key, size, process, world, meeting, folder, out)
            for process, out in enumerate(outs)
        ],
        within_s=300,
    )
    return [torch.load(out) for out in outs]


@pytest.fixture(scope="module", params=["shard", *soak("pipeline")])
def key(request):
    return request.param


@pytest.fixture(scope="module")
def folder(key, tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def two(key, folder):
    """Saved by two processes."""
    return together(folder, "save", key, 2, 2)


@pytest.fixture(scope="module")
def alone(key, folder):
    """Saved by one."""
    trainer = runs.taught(None, key)
    assert runs.save(trainer, folder / "of-1", runs.STEPS) == "saved"
    return runs.whole_state(trainer)


@pytest.fixture(scope="module")
def four(key, folder, two, alone):
    """Two shards on each of two replicas, or four stages, which go on from either."""
    return together(folder, "load", key, 2 if key == "shard" else 4, 4)


def same_bits(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    wrong = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not wrong


def test_moments_of_two_processes_are_bit_equal_on_four_and_on_one(folder, two, four):
    for process in four:
        same_bits(process["of-2"]["state"], two[0]["state"])
    one = runs.resumed(None, folder / "of-2" / f"step-{runs.STEPS:06d}")
    same_bits(runs.whole_state(one), two[0]["state"])
    norm = one.step(runs.with_reference(one))["actor/grad_norm"]
    for found in (two[0]["metrics"], four[0]["of-2"]["metrics"]):
        assert norm == pytest.approx(found["actor/grad_norm"], rel=1e-4)


def test_moments_of_one_process_are_bit_equal_on_several(alone, four):
    for process in four:
        same_bits(process["of-1"]["state"], alone)


def test_a_process_that_can_not_write_leaves_nothing(two):
    """The first one's own file, then the other one's part."""
    first, other = two
    assert first["said"] == "saved"
    assert other["said"] == "gave"
    assert "No space left on device" in first["full"]
    assert "process 1 could not write its part" in first["part"]
    assert first["left"] == ["index.json", "step-000002"]


def test_what_is_written_later_is_what_was_copied(folder, two):
    whole = {name: tensor for name, tensor in two[0]["state"].items() if name.startswith("policy.")}
    model = runs.LlamaForCausalLM.from_pretrained(folder / "late" / f"step-{runs.STEPS:06d}")
    assert all(torch.equal(whole[f"policy.{n}"], p) for n, p in model.named_parameters())


def test_the_first_process_makes_no_whole_model(two):
    """Of twelve layers it makes hardly more than one at a time; the other one makes none."""
    first = two[0]["memory"]
    other = two[1]["memory"]
    assert first["saved"]
    assert first["published"]
    assert first["whole"] > 10 * first["layer"]

    for what in ("saving", "publishing"):
        assert first[what] < 2.5 * first["layer"], what
        assert other[what] < first["layer"], what


def test_no_process_makes_a_whole_model_of_what_it_reads(key, two):
    """Its part (of shards in float32), and hardly more than a layer beside it."""
    for process in two:
        found = process["read"]
        part = found["whole"] / (2 if key == "shard" else 4)
        assert found["reading"] < part + 2.5 * found["layer"]


@pytest.mark.parametrize("rounds", [2, *soak(8)])
def test_a_kill_leaves_whole_checkpoints(rounds, tmp_path):
    out = tmp_path / "killed.pt"
    command = [sys.executable, runs.__file__, "kill", str(tmp_path), str(rounds), str(out)]
    subprocess.run(command, check=True, timeout=500)
    assert torch.load(out) == []
