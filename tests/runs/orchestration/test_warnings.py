"""What a run has been warned of, and where that is kept."""

from __future__ import annotations

import json
import shutil

import pytest
from slow import soak

from agentevo.api.run import train
from agentevo.observability import FindingMonitor, RunWarning
from agentevo.observability.run_warnings import WARNINGS
from agentevo.runs.folder.run_folder import read_store


@pytest.fixture
def warned_at_every_step(monkeypatch):
    monkeypatch.setattr(
        FindingMonitor,
        "observe",
        lambda self, step, *_: [RunWarning(code="odd", step=step, message="odd")],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost",
    [("step-000003",), *soak(("step-000003", "step-000002"))],
    ids=["one", "all"],
)
def test_a_step_records_its_own_warnings_and_a_resume_puts_them_together(
    lost, warned_at_every_step, tmp_path, small_config, quiet_view
):
    """Each record holding all of them would make a run's store grow with the square of its
    length."""
    config = small_config(tmp_path / "run", "cold_start.episodes=0", "evaluation.every=0")
    with pytest.raises(KeyboardInterrupt):
        train(config, view=quiet_view(step=3))

    for name in lost:
        shutil.rmtree(config.run_dir / "checkpoints" / name)

    train(config, resume=True, view=quiet_view())

    async def recorded(store):
        return [step.record["progress"]["warnings"] for step in await store.steps()]

    assert read_store(config.run_dir, recorded) == [[f"step {step}: odd"] for step in (1, 2, 3, 4)]

    kept = [f"step {step}: odd" for step in (1, 2, 3, 4)]
    assert json.loads((config.run_dir / WARNINGS).read_text())["warnings"] == kept

    *of_steps, _, _ = json.loads((config.run_dir / "summary.json").read_text())["warnings"]
    assert of_steps == kept, "then those of the end"
