"""Whole runs under the section `memory`: cold start, RL and supervised training obey it, and
resumed runs stay the same."""

from __future__ import annotations

import pytest
import torch
from slow import soak

from agentevo.api.run import sft, train
from agentevo.errors import ConfigError
from agentevo.models.compute import activations
from agentevo.observability import read_metrics
from agentevo.training.checkpoint import Checkpoints

BFLOAT16 = (
    "model.dtype=bfloat16",
    "memory.checkpointing=full",
    "algorithm.drop_zero_variance=false",
    "trainer.steps=2",
    "evaluation.every=0",
    "checkpoint.every=1",
)
SFT = (
    "cold_start.episodes=0",
    "data.demonstrations=8",
    "sft.batch_conversations=4",
    "evaluation.every=0",
    "checkpoint.every=0",
)


KEPT = ("trainer.steps=1", "evaluation.every=0", "cold_start.episodes=0")


@pytest.fixture
def checkpointed(monkeypatch):
    """Counts layers that are computed with checkpointing."""
    calls = []
    original = activations.checkpoint
    monkeypatch.setattr(
        activations,
        "checkpoint",
        lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs),
    )
    return calls


@pytest.mark.slow
def test_a_run_in_bfloat16_goes_on_bit_for_bit(
    tmp_path, small_config, quiet_view, outcome_of, assert_same, checkpointed
):
    train(small_config(tmp_path / "whole", *BFLOAT16), view=quiet_view())
    assert checkpointed
    with pytest.raises(KeyboardInterrupt):
        train(small_config(tmp_path / "parts", *BFLOAT16), view=quiet_view(step=1))

    train(small_config(tmp_path / "parts", *BFLOAT16), resume=True, view=quiet_view())
    whole = outcome_of(tmp_path / "whole")
    assert_same(outcome_of(tmp_path / "parts"), whole)
    assert {one.dtype for one in whole["weights"].values()} == {torch.bfloat16}

    masters = whole["trainer"]["optimization"]["masters"]
    assert {master.dtype for master in masters} == {torch.float32}
    assert not all(torch.equal(master, master.bfloat16().float()) for master in masters)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", *soak("selective")])
def test_supervised_training_is_the_same_with_less_kept(
    mode, tmp_path, small_config, quiet_view, checkpointed
):
    losses = []
    for name, more in (("plain", ()), ("less", (f"memory.checkpointing={mode}",))):
        checkpointed.clear()
        run = sft(small_config(tmp_path / name, *SFT, *more), view=quiet_view())
        assert bool(checkpointed) == (name == "less")

        losses.append(
            [
                row["sft/loss"]
                for row in read_metrics(run.dir / "metrics.jsonl")
                if "sft/loss" in row
            ]
        )

    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_what_this_machine_can_not_do_is_refused_before_anything_is_made(
    tmp_path, small_config, quiet_view, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for command, more in ((train, ()), (sft, SFT)):
        config = small_config(tmp_path / "run", *more, "memory.offload_optimizer=true")
        with pytest.raises(ConfigError, match=r"memory\.offload_optimizer"):
            command(config, view=quiet_view())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_keeps_its_optimizer(tmp_path, small_config, quiet_view):
    train(small_config(tmp_path / "run", *KEPT), view=quiet_view())
    assert Checkpoints(tmp_path / "run" / "checkpoints", 1).steps() == [1]

    pytest.importorskip("torchao")
    with pytest.raises(ConfigError, match=r"memory\.optimizer"):
        train(
            small_config(tmp_path / "run", *KEPT, "trainer.steps=2", "memory.optimizer=adamw_8bit"),
            resume=True,
            view=quiet_view(),
        )
