"""A real run in a process of its own, asked through its folder to pause, save, resume and stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_fixtures import SMALL

from agentevo.api.run import train
from agentevo.cli.main import main
from agentevo.observability import read_metrics
from agentevo.observability.current_activity import NOW, read_moment
from agentevo.runs.folder.control import ask, read_session

LONGEST_S = 300.0
FEW = ("cold_start.episodes=8", "evaluation.every=0", "checkpoint.every=0")


def until(found: Callable[[], object]) -> None:
    ends = time.monotonic() + LONGEST_S
    while not found():
        assert time.monotonic() < ends
        time.sleep(0.05)


def last_step(folder: Path) -> int:
    log = folder / "metrics.jsonl"
    return max((int(row["step"]) for row in read_metrics(log)), default=0) if log.exists() else 0


@pytest.fixture
def under_way(tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    """A run's folder and its process, which has done a step."""
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))

    folder = tmp_path / "run"
    command = [sys.executable, "-m", "agentevo", "train", str(tmp_path / "small.yaml")]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            [*command, f"run.dir={folder}", "trainer.steps=100000", *FEW],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            until(lambda: process.poll() is not None or last_step(folder) >= 1)
            assert process.poll() is None, (tmp_path / "out").read_text()
            yield folder, process
        finally:
            process.kill()
            process.wait(LONGEST_S)


@pytest.mark.slow
def test_a_run_pauses_saves_resumes_and_stops_as_it_is_asked(
    under_way: tuple[Path, Any],
    small_config: Callable[..., Any],
    quiet_view: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, process = under_way

    def command(do: str) -> str:
        assert main(["control", str(folder), do, "--wait", str(LONGEST_S)]) == 0
        return capsys.readouterr().out

    assert "paused after step" in command("pause")

    step = last_step(folder)
    until(lambda: read_moment(folder / NOW).phase == "paused")
    assert main(["top", str(folder), "--once"]) == 0
    assert "paused, after step" in capsys.readouterr().out
    assert f"the checkpoint of step {step} exists" in command("save")
    assert (folder / "checkpoints" / f"step-{step:06d}" / "checkpoint.json").is_file()
    assert last_step(folder) == step  # it still stands
    assert "the run continues" in command("resume")

    until(lambda: last_step(folder) > step + 1)
    session = read_session(folder)
    assert session is not None

    command("stop")
    assert process.wait(LONGEST_S) == 128 + signal.SIGTERM
    assert main(["control", str(folder), "stop"]) == 2  # nobody is there any more
    assert "the run is not training" in capsys.readouterr().err

    # What was meant for the process that has ended doesn't stop the next one.
    ask(folder, "stop", id="left-behind-1", session=session.id, who="me")
    done = last_step(folder)
    config = small_config(folder, f"trainer.steps={done + 1}", *FEW)
    run = train(config, resume=True, view=quiet_view())
    assert run.summary["steps"] == done + 1
    assert run.audit().violations == []


@pytest.mark.slow
def test_ctrl_c_ends_a_pause_at_once(under_way: tuple[Path, Any]) -> None:
    folder, process = under_way
    assert main(["control", str(folder), "pause", "--wait", str(LONGEST_S)]) == 0
    process.send_signal(signal.SIGINT)
    assert process.wait(LONGEST_S) == 130

    session = read_session(folder)
    assert session is not None
    assert session.has_ended
    assert not session.is_paused
