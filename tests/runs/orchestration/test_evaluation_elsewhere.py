"""Evaluation through engines in other processes: a version reaches them in the middle of it, too,
and what sends it has ended when the weights change."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from broadcast_member import taken

from agentevo.inference.serving import run_engines
from agentevo.inference.serving.run_engines import RunEngines
from agentevo.inference.weights.broadcast_sender import BroadcastSender
from agentevo.inference.weights.broadcast_source import BroadcastSource
from agentevo.runs.orchestration import evaluation as module
from agentevo.runs.orchestration.evaluation import RunEvaluation
from agentevo.runs.orchestration.rollout_sources import StopAskedError
from agentevo.runtime.event_loop import in_thread


@pytest.fixture
def engines(small_config, tmp_path, monkeypatch):
    monkeypatch.setattr(run_engines, "POLL_INTERVAL_S", 0.01)
    return RunEngines(small_config(tmp_path / "run"))


def played(engines, is_stopped=lambda: False):
    parts = SimpleNamespace(
        run_engines=engines, config=SimpleNamespace(evaluation=SimpleNamespace(samples=0))
    )
    evaluation = SimpleNamespace(_parts=parts, players=None, _is_stopped=is_stopped)
    return RunEvaluation._play(evaluation, 1, full=True, label="")


@pytest.mark.slow
def test_an_engine_that_lost_the_version_has_it_before_the_evaluation_ends(
    engines, tmp_path, monkeypatch
):
    folder = tmp_path / "weights"
    notes = []
    sender = BroadcastSender(folder, torch.nn.Linear(2, 2), note=notes.append)
    engines.repair_with(sender.look_after)
    source = BroadcastSource(folder, torch.device("cpu"))

    async def evaluate(parts, step, **options):
        return await in_thread(taken, source)

    async def work():
        await sender.begin(1)
        return await played(engines)

    monkeypatch.setattr(module, "evaluate", evaluate)
    assert asyncio.run(work())[0] == 1 and notes == []


@pytest.mark.parametrize("is_stopped", [True, False])
def test_nothing_is_sent_any_more_after_it(is_stopped, engines, monkeypatch):
    """Also where somebody stops it."""
    looks = []

    async def repair():
        looks.append("begun")
        await asyncio.sleep(0.2)
        looks.append("over")

    async def evaluate(parts, step, **options):
        while "begun" not in looks or is_stopped:
            await asyncio.sleep(0.001)

    async def work():
        engines.repair_with(repair)
        try:
            await played(engines, lambda: is_stopped and "begun" in looks)
        except StopAskedError:
            assert is_stopped

        assert looks[-1] == "over"

        before = len(looks)
        await asyncio.sleep(0.1)
        assert len(looks) == before

    monkeypatch.setattr(module, "evaluate", evaluate)
    asyncio.run(asyncio.wait_for(work(), 300))
