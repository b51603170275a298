"""Checkpoints that are written while the run goes on."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentevo.api.run import train
from agentevo.errors import CheckpointError
from agentevo.runs.orchestration.run_checkpoints import BackgroundSave
from agentevo.training import checkpoint
from agentevo.training.checkpoint import Checkpoints


def test_a_step_counts_when_its_files_are_there():
    saved = []
    go = threading.Event()

    def write() -> str:
        go.wait(300)
        return "ab"

    async def run() -> None:
        background = BackgroundSave(lambda *found: saved.append(found), pytest.fail)
        background.start(3, write)
        background.settle(wait=False)
        assert not saved

        go.set()
        for _ in range(30_000):  # the event loop is told without anybody asking
            await asyncio.sleep(0.01)
            if saved:
                break

        background.settle(wait=True)

    asyncio.run(run())
    assert saved == [(3, "ab")]


@pytest.mark.parametrize("error", [CheckpointError("full: make room"), RuntimeError("connection")])
def test_a_failure_is_told_at_once_and_raised_before_the_next_step(error):
    told = []

    def write() -> str:
        raise error

    async def run() -> None:
        background = BackgroundSave(lambda *found: pytest.fail("saved"), told.append)
        background.start(4, write)
        for _ in range(30_000):
            await asyncio.sleep(0.01)
            if told:
                break

        with pytest.raises(CheckpointError, match=str(error)):
            background.settle(wait=False)

        background.settle(wait=True)  # once

    asyncio.run(run())
    assert len(told) == 1
    assert str(error) in told[0]


@pytest.mark.slow
def test_a_run_that_saves_in_the_background_is_the_same(
    tmp_path, small_config, quiet_view, monkeypatch
):
    """What is saved is the step's own weights, though the next step has changed them since; a full
    disk ends the run, which goes on when there is room."""
    keys = (
        "trainer.steps=3",
        "cold_start.episodes=8",
        "evaluation.every=0",
        "checkpoint.every=1",
        "checkpoint.keep_last=9",
    )
    plain = train(small_config(tmp_path / "plain", *keys), view=quiet_view())
    config = small_config(tmp_path / "run", *keys, "checkpoint.background=true")
    write = Checkpoints._write
    threads = []

    def filling(self: Checkpoints, step: int, *given: Any) -> str:
        if step == 2:
            monkeypatch.setattr(checkpoint, "write_model", _no_room)
        return write(self, step, *given)

    def late(self: Checkpoints, step: int, *given: Any) -> str:
        threads.append(threading.current_thread().name)
        time.sleep(0.3 if "checkpoint" in threads[-1] else 0)
        return write(self, step, *given)

    monkeypatch.setattr(Checkpoints, "_write", filling)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(config, view=quiet_view())

    monkeypatch.undo()
    assert Checkpoints(config.run_dir / "checkpoints", 9).steps() == [1]

    monkeypatch.setattr(Checkpoints, "_write", late)
    run = train(config, resume=True, view=quiet_view())
    assert threads[-1].startswith("checkpoint")
    assert run.audit().violations == []

    ours, theirs = (Checkpoints(one.config.run_dir / "checkpoints", 9) for one in (run, plain))
    for step in set(ours.steps()) & set(theirs.steps()):
        found, expected = (
            load_file(folder.path(step) / "model.safetensors") for folder in (ours, theirs)
        )
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    assert ours.steps()[-1] == 3


def _no_room(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
