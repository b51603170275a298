"""What a user's code sets for the whole process or thread, and a run shares with it."""

from __future__ import annotations

import os

import pytest
import torch

from agentevo.agents import EnvironmentAgent
from agentevo.api.run import train


@pytest.fixture
def own_settings(monkeypatch, tmp_path):
    """Puts back what the runs of a test leave on its thread."""
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    torch.set_default_device(None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "staleness", [0, pytest.param(1, marks=pytest.mark.slow, id="beside the trainer")]
)
def test_what_an_agent_sets_changes_no_number_and_no_folder(
    staleness,
    small_config,
    quiet_view,
    outcome_of,
    assert_same,
    monkeypatch,
    tmp_path,
    own_settings,
):
    """Gradients, inference mode and autocast, the default device, and the current folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = EnvironmentAgent.run
    outcomes = []
    modes = []

    async def rude_run(self, task, policy):
        os.chdir(elsewhere)
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_default_device("meta")
        modes.append(torch.inference_mode())
        modes[-1].__enter__()
        return await run(self, task, policy)

    for name in ("polite", "rude"):
        config = small_config(
            f"runs/{name}",
            f"rollout.staleness={staleness}",
            "run.name=same",
            f"trainer.steps={1 + staleness}",
            "cold_start.episodes=0",
            "evaluation.every=1",
        )
        with monkeypatch.context() as patch:
            if name == "rude":
                patch.setattr(EnvironmentAgent, "run", rude_run)
            train(config, view=quiet_view())
            while modes:
                modes.pop().__exit__(None, None, None)

        outcomes.append(outcome_of(tmp_path / "runs" / name))

    assert_same(*outcomes)
    assert not list(elsewhere.iterdir())
