"""A run whose trainer lies in parts on two processes while engines elsewhere serve: no process has
the whole model."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from slow import soak
from transformers import AutoModelForCausalLM

from agentevo.cli.main import main
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.runs.folder.chain import read_head
from agentevo.training.checkpoint import Checkpoints

sys.path.insert(0, str(Path(__file__).parent))
from test_ranks import launched, rows

APART = ["rollout.samplers=1", "rollout.staleness=1", "trainer.parallel.shard=2"]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["shard", *soak("pipeline")])
def test_what_no_process_has_whole_is_published_saved_and_resumed(key, tmp_path, capsys):
    """Checkpoints are written while steps go on; with the newest gone, one process does the last
    steps again from their plans and goes on."""
    run = tmp_path / "run"
    code, said = launched(
        run, 2, *APART[:2], f"trainer.parallel.{key}=2", "trainer.steps=2",
        "checkpoint.every=1", "checkpoint.keep_last=9", "checkpoint.background=true",
    )  # fmt: skip
    assert code == 0, said

    checkpoints = Checkpoints(run / "checkpoints", 9)
    assert checkpoints.steps()[-1] == 2
    for step in checkpoints.steps():
        files = checkpoints.verify(checkpoints.path(step)).files
        assert {"trainer/.metadata", "trainer/__0_0.distcp", "trainer/__1_0.distcp"} <= set(files)

    head = read_head(run)
    assert head is not None
    assert 2 in head.checkpoints

    saved = AutoModelForCausalLM.from_pretrained(checkpoints.path(2))
    published = WeightsFolder(run / "weights").read(2)
    assert all(torch.equal(published[name], p) for name, p in saved.named_parameters())
    assert main(["audit", str(run)]) == 0

    for step in checkpoints.steps()[1:]:
        shutil.rmtree(checkpoints.path(step))

    code, said = launched(run, 1, *APART[:2], "trainer.steps=3", "--resume")
    assert code == 0, said
    assert "committed steps after it are repeated" in said
    assert "has a gradient norm" not in said
    assert 3 in rows(run, "actor/grad_norm")
    assert main(["audit", str(run)]) == 0


@pytest.mark.soak
def test_what_changed_is_all_that_is_published_of_weights_in_parts(tmp_path):
    """Engines sample with it, a checkpoint has the same weights, and who resumes alone begins with
    a full version."""
    run = tmp_path / "run"
    delta = ["rollout.weights.delta=true", "model.dtype=bfloat16", "rollout.keep_versions=9"]
    code, said = launched(
        run, 2, *APART, *delta, "trainer.steps=3", "trainer.learning_rate=1e-6",
        "checkpoint.every=1", "checkpoint.keep_last=9",
    )  # fmt: skip
    assert code == 0, said

    versions = WeightsFolder(run / "weights")
    chains = {n: versions._manifest(n, None).chain for n in versions.versions()}
    assert [len(chains[n]) for n in range(4)] == [0, 1, 2, 3]
    assert versions._manifest(3, None).grids

    saved = AutoModelForCausalLM.from_pretrained(Checkpoints(run / "checkpoints", 9).path(3))
    published = versions.read(3)
    assert all(torch.equal(published[name], p) for name, p in saved.named_parameters())
    assert main(["audit", str(run)]) == 0

    code, said = launched(run, 1, *APART[:2], *delta, "trainer.steps=4", "--resume")
    assert code == 0, said
    assert not versions._manifest(4, None).chain


@pytest.mark.soak
def test_weights_in_parts_are_sent_over_a_process_group(tmp_path):
    """Gathered one by one; no file has them but the checkpoints, of which engines know nothing."""
    run = tmp_path / "run"
    code, said = launched(
        run, 2, *APART, "rollout.transport=broadcast", "trainer.steps=3", "checkpoint.every=1",
    )  # fmt: skip
    assert code == 0, said
    assert not list((run / "weights").rglob("*.safetensors"))
    assert '"version":3' in (run / "weights" / "latest.json").read_text()
    assert main(["audit", str(run)]) == 0

    code, said = launched(
        run, 1, *APART[:2], "rollout.transport=broadcast", "trainer.steps=4", "--resume"
    )
    assert code == 0, said
    assert main(["audit", str(run)]) == 0
