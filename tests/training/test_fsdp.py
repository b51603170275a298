"""A model that is sharded over processes ends with the weights of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from several_processes import run_processes

sys.path.insert(0, str(Path(__file__).parent))
import fsdp_runs as runs

pytestmark = pytest.mark.soak  # CI has it as cases of test_mesh.py and test_saved_parts.py


@pytest.fixture(scope="module")
def alone():
    return runs.trained(None)


@pytest.fixture(scope="module", params=[(2, 2), (2, 4)], ids=["2 shards", "2 shards, 2 replicas"])
def found(request, tmp_path_factory):
    shard, world = request.param
    folder = tmp_path_factory.mktemp("fsdp")
    outs = [folder / f"{process}.pt" for process in range(world)]
    run_processes(
        runs.__file__,
        [(shard, process, world, folder / "meeting", out) for process, out in enumerate(outs)],
        within_s=300,
    )
    return [torch.load(out) for out in outs]


def check_weights(found, expected):
    """Of a gradient near 0, AdamW makes a step of the learning rate: a few weights, those of tokens
    that hardly occur, show in which order gradients were added up."""
    apart = torch.cat([(found[name] - tensor).abs().flatten() for name, tensor in expected.items()])
    assert apart.quantile(0.99) < 1e-5
    assert apart.max() < runs.SECTION.learning_rate


def test_weights_and_metrics_are_those_of_one_process(found, alone):
    for one in found:
        check_weights(one["after"], alone["after"])
        for ours, theirs in zip(one["metrics"], alone["metrics"], strict=True):
            for key in ("actor/grad_norm", "actor/kl_loss", "actor/pg_loss", "actor/entropy"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-5), key


def test_each_process_holds_its_part(found, alone):
    assert all(one["held"] <= alone["held"] / 2 + 64 for one in found)
