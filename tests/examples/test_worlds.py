"""Other people's worlds with their real packages: verifiers, an OpenEnv server, BrowserGym."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from browser_site import require_chromium

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "frameworks"
sys.path.insert(0, str(FOLDER))

import table  # noqa: E402

sys.path.remove(str(FOLDER))

pytestmark = [pytest.mark.examples, pytest.mark.slow, pytest.mark.timeout(1800)]


def python_of(group: str) -> str:
    """The Python that has the packages of requirements/GROUP.txt."""
    try:
        return table.python_of(table.Example(group, group, group, ""))
    except table.NotInstalledError as error:
        pytest.skip(f"its packages can't be installed here: {error}")


def ran(*words: str | Path) -> str:
    done = subprocess.run(
        [*map(str, words)], cwd=ROOT, env={**os.environ}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("group", "file"),
    [("verifiers", "test_verifiers.py"), ("verifiers4", "test_verifiers_tasksets.py")],
)
def test_environments_of_verifiers_with_the_real_package(group, file):
    pytest_of_it = (python_of(group), "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider")
    assert "skipped" not in ran(*pytest_of_it, f"tests/integrations/{file}")


@pytest.mark.parametrize(
    ("group", "example"), [("verifiers", "verifiers_hunt"), ("openenv", "openenv_hunt")]
)
def test_a_world_trains(group, example, tmp_path):
    """A short one: whole histories are recorded, rewards are the world's, and held-out tasks are
    played."""
    short = ("--steps", "1", "--conversations", "64", "--held-out", "4", "--out", tmp_path)
    ran(python_of(group), FOLDER / f"{example}.py", *short)
    assert json.loads((tmp_path / "result.json").read_text()).keys() == {"before", "after"}
    attempts = agentevo_trajectories(tmp_path / "run")
    assert attempts and all(attempt["status"] == "completed" for attempt in attempts)
    assert {attempt["reward"] for attempt in attempts} <= {0.0, 1.0}
    assert all(
        attempt["parents"][0] is None and None not in attempt["parents"][1:] for attempt in attempts
    )


def test_browsergym_plays_through_gymnasium(tmp_path):
    """Two attempts at once, each with browsers of its own."""
    require_chromium()
    short = ("trainer.steps=1", "trainer.groups_per_step=1", "trainer.group_size=2")
    ran(
        python_of("browsergym"),
        "-m",
        "agentevo",
        "train",
        FOLDER / "browsergym.yaml",
        f"run.dir={tmp_path}/run",
        "evaluation.tasks=1",
        *short,
    )
    attempts = agentevo_trajectories(tmp_path / "run")
    assert len(attempts) == 2
    assert all(attempt["status"] == "completed" for attempt in attempts)


def agentevo_trajectories(folder: Path) -> list[dict]:
    """The training attempts, read without the agent of the run."""
    from agentevo.runs.folder.run_folder import read_store

    async def read(store):
        return [
            {
                "status": stored.trajectory.status,
                "reward": stored.trajectory.reward,
                "parents": [turn.parent for turn in stored.trajectory.turns],
            }
            async for stored in store.trajectories(split="train")
        ]

    return read_store(folder, read)
