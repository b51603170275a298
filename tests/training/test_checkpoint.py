"""Checkpoints: whole or not there, the newest and the best kept, and read by any tool that reads
Hugging Face folders."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentevo.errors import CheckpointError
from agentevo.training import checkpoint as module
from agentevo.training.checkpoint import Checkpoints


@pytest.fixture
def loaded(tiny_policy):
    return tiny_policy(hidden_size=16, num_layers=1, num_heads=1)


@pytest.fixture
def save(loaded, tmp_path):
    """`save(step, value)` into a folder that keeps two; a new `Checkpoints` each time, as after a
    restart."""

    def work(step: int, value: float | None = None, keep_last: int = 2) -> Checkpoints:
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last)
        checkpoints.save(
            step,
            loaded.model,
            loaded.tokenizer,
            {"optimizer_steps": step},
            {"progress": {"step": step}},
            value,
        )
        return checkpoints

    return work


def test_what_was_saved_comes_back(loaded, save):
    checkpoints = save(7)
    path = checkpoints.find("last")
    assert path == checkpoints.path(7)
    assert checkpoints.load(path) == ({"optimizer_steps": 7}, {"progress": {"step": 7}})

    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    again = dict(model.named_parameters())
    assert all(
        torch.equal(parameter, again[name]) for name, parameter in loaded.model.named_parameters()
    )
    assert tokenizer.encode("Take the left coin") == loaded.tokenizer.encode("Take the left coin")


@pytest.mark.slow
def test_the_newest_stay_and_the_best_besides(save):
    kept = []
    for step, value in [(1, 0.1), (2, 0.9), (3, 0.3), (4, None), (5, 0.5), (6, 0.95), (7, 0.2)]:
        checkpoints = save(step, value)
        kept.append(checkpoints.steps())

    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7]]
    assert (checkpoints.best_step, checkpoints.best_value) == (6, 0.95)
    assert checkpoints.find("best") == checkpoints.path(6)
    assert checkpoints.find("last") == checkpoints.path(7)
    assert json.loads((checkpoints.folder / "index.json").read_text()) == {
        "steps": [6, 7],
        "best": {"step": 6, "value": 0.95},
    }


def test_of_equal_values_the_newer_is_best(save):
    save(1, 0.5)
    assert save(2, 0.5).best_step == 2


def test_without_any_value_best_is_the_last(save):
    save(1)
    checkpoints = save(2)
    assert checkpoints.find("best") == checkpoints.path(2)


def test_one_is_enough(save):
    for step in (1, 2, 3):
        checkpoints = save(step, 0.0, keep_last=1)
    assert checkpoints.steps() == [3]


def test_the_same_step_can_be_saved_again(save):
    save(3, 0.1)
    checkpoints = save(3, 0.7)
    assert checkpoints.steps() == [3]
    assert checkpoints.best_value == 0.7


@pytest.mark.parametrize("where", ["write_model", "torch.save"])
def test_a_checkpoint_that_fails_half_way_is_not_there(where, save, monkeypatch, tmp_path):
    save(1, 0.5)

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(*((module, where) if where == "write_model" else (torch, "save")), fail)
    with pytest.raises(
        CheckpointError,
        match=r"step-000002 could not be written \(no space.*make room.*\(steps: 1\)",
    ):
        save(2, 0.9)

    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.joinpath("checkpoints").iterdir()) == [
        "index.json",
        "step-000001",
    ]

    checkpoints = save(3)
    assert checkpoints.steps() == [1, 3]
    assert checkpoints.best_step == 1


def test_a_folder_without_its_state_does_not_count(save):
    """As a killed process, or another tool, may leave it."""
    save(1)
    checkpoints = save(2)
    (checkpoints.path(2) / "state.json").unlink()
    (checkpoints.folder / "notes").mkdir()
    assert checkpoints.steps() == [1]
    assert checkpoints.find("last") == checkpoints.path(1)


def test_nothing_saved_yet(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none", 2)
    assert checkpoints.steps() == []
    assert checkpoints.best_step is None
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoints.find("last")


def test_a_path_must_be_a_checkpoint(save, tmp_path):
    checkpoints = save(1)
    assert checkpoints.find(str(checkpoints.path(1))) == checkpoints.path(1)
    assert checkpoints.find("step-000001") == checkpoints.path(1)
    with pytest.raises(CheckpointError, match="step-000002 is not a checkpoint"):
        checkpoints.find("step-000002")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoints.find(str(tmp_path))


@pytest.mark.parametrize("name", ["trainer.pt", "state.json"])
@pytest.mark.parametrize("content", [b"", b"rubbish", b"PK\x03\x04 torn", None])
def test_a_torn_file_is_a_checkpoint_error(name, content, save):
    checkpoints = save(1)
    path = checkpoints.path(1)
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(content)

    with pytest.raises(
        CheckpointError, match=r"can't be read as a checkpoint.*resume from an older one"
    ):
        checkpoints.load(path)


def test_a_resumed_run_forgets_what_came_after(save):
    for step, value in [(1, 0.1), (2, 0.2), (3, 0.9)]:
        checkpoints = save(step, value, keep_last=9)

    checkpoints.forget_after(2)
    assert checkpoints.steps() == [1, 2]
    assert (checkpoints.best_step, checkpoints.best_value) == (2, 0.2), (
        "the best of what is left, as in a run that came no further"
    )
    assert Checkpoints(checkpoints.folder, 9).best_step == 2, "on disk too"


def test_forgetting_keeps_a_best_that_is_not_after(save):
    for step, value in [(1, 0.9), (2, 0.2), (3, 0.3)]:
        checkpoints = save(step, value, keep_last=9)
    checkpoints.forget_after(2)
    assert (checkpoints.steps(), checkpoints.best_step, checkpoints.best_value) == ([1, 2], 1, 0.9)


def test_a_best_whose_folder_is_gone_falls_back_to_the_last(save):
    save(1, 0.9)
    checkpoints = save(2, 0.1)
    shutil.rmtree(checkpoints.path(1))
    assert Checkpoints(checkpoints.folder, 2).find("best") == checkpoints.path(2)
