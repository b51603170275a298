"""A run that is asked to stop: within an evaluation, by SIGTERM, before its model is loaded."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from agentevo.api.run import sft, train
from agentevo.errors import ModelError
from agentevo.observability import LiveView, read_metrics
from agentevo.runs.folder.run_folder import read_store
from agentevo.runs.orchestration import checks
from agentevo.runs.processes.learn import learn
from agentevo.training import supervised


def counts(folder: Any) -> dict[str, int]:
    async def read(store: Any) -> dict[str, int]:
        return await store.counts()

    return read_store(folder, read)


@pytest.mark.slow
def test_ctrl_c_within_an_evaluation_stops_within_it(tmp_path, small_config, quiet_view):
    """No attempt of it is finished first, and nothing is logged of it."""
    config = small_config(tmp_path / "run", "cold_start.episodes=8", "evaluation.tasks=50")
    with pytest.raises(KeyboardInterrupt):
        train(config, view=quiet_view(phase=("evaluating", "before")))
    assert counts(config.run_dir)["trajectories/eval/ready"] == 0
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    assert not any(key.startswith("val-core/") for row in rows for key in row)


@pytest.mark.slow
def test_the_step_whose_evaluation_is_broken_off_is_done_again(
    tmp_path, small_config, quiet_view, capsys
):
    config = small_config(
        tmp_path / "run", "cold_start.episodes=8", "trainer.steps=1", "evaluation.samples=0"
    )
    with pytest.raises(KeyboardInterrupt):
        train(config, view=quiet_view(phase=("evaluating", "after")))
    assert counts(config.run_dir)["steps"] == 0
    run = train(config, resume=True, view=quiet_view())
    assert run.summary["steps"] == 1 and run.audit().violations == []


@pytest.mark.slow
@pytest.mark.parametrize("which", ["before", "after"])
def test_a_held_out_loss_stops_between_its_batches(
    tmp_path, small_config, quiet_view, monkeypatch, which
):
    """The pass that is under way comes to its end, and no other begins."""
    config = small_config(
        tmp_path / "run",
        "data.demonstrations=12",
        "data.eval_share=0.5",
        "sft.batch_conversations=12",
        "sft.micro_batch_tokens=256",
        "cold_start.episodes=0",
        "evaluation.every=0",
        "evaluation.samples=0",
        "evaluation.tasks=1",
    )
    view = Phases()
    passes = []
    compute = supervised.allowed_logits

    def allowed_logits(*words: Any, **more: Any) -> Any:
        if view.seen[-1] == f"evaluating {which}":
            passes.append(view.seen[-1])
            if len(passes) == 1:
                os.kill(os.getpid(), signal.SIGINT)
        return compute(*words, **more)

    monkeypatch.setattr(supervised, "allowed_logits", allowed_logits)
    with pytest.raises(KeyboardInterrupt):
        sft(config, view=view)

    assert len(passes) == 1
    assert counts(config.run_dir)["steps"] == 0

    run = sft(config, resume=True, view=quiet_view())
    assert run.summary["steps"] == 1 and run.audit().violations == []


@pytest.mark.slow
def test_ctrl_c_while_steps_are_done_again_stops_before_the_next_one(
    tmp_path, small_config, quiet_view
):
    config = small_config(
        tmp_path / "run", "cold_start.episodes=0", "trainer.steps=3", "evaluation.samples=0"
    )
    run = train(config, view=quiet_view())
    summary = (config.run_dir / "summary.json").read_text()
    shutil.rmtree(config.run_dir / "checkpoints")

    view = Phases(at="doing again step 2 (2/3)")
    with pytest.raises(KeyboardInterrupt):
        train(config, resume=True, view=view)

    assert not any(phase.startswith(("doing again step 3", "saving")) for phase in view.seen)
    assert (config.run_dir / "summary.json").read_text() == summary

    run = train(config, resume=True, view=quiet_view())
    assert run.checkpoint_path("last").name == "step-000003" and run.audit().violations == []


@pytest.mark.slow
def test_ctrl_c_while_the_solver_plays_stops_before_its_next_episode(tmp_path, small_config):
    config = small_config(tmp_path / "run", "cold_start.episodes=160")
    view = Phases(at="demonstrating episode 0/160")
    with pytest.raises(KeyboardInterrupt):
        train(config, view=view)
    assert len([phase for phase in view.seen if phase.startswith("demonstrating")]) == 1


class Phases(LiveView):
    """Remembers the phases, and presses Ctrl-C when `at` comes."""

    def __init__(self, at: str = "") -> None:
        super().__init__("test", stream=io.StringIO(), plain=True)
        self.seen: list[str] = []
        self._at = at

    def phase(self, name: str, detail: str = "") -> None:
        super().phase(name, detail)
        self.seen.append(f"{name} {detail}")
        if self.seen[-1] == self._at:
            os.kill(os.getpid(), signal.SIGINT)


class Terminated(LiveView):
    """Sends SIGTERM after the first step."""

    def __init__(self) -> None:
        super().__init__("test", stream=io.StringIO(), plain=True)

    def step(self, step: int, *args: Any, **kwargs: Any) -> None:
        super().step(step, *args, **kwargs)
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_sigterm_ends_a_run_as_cleanly_as_ctrl_c(tmp_path, small_config, quiet_view):
    config = small_config(
        tmp_path / "run", "cold_start.episodes=8", "trainer.steps=2", "checkpoint.every=0"
    )
    with pytest.raises(SystemExit) as ended:
        train(config, view=Terminated())

    assert ended.value.code == 143
    assert (config.run_dir / "checkpoints" / "step-000001" / "checkpoint.json").is_file()

    run = train(config, resume=True, view=quiet_view())
    assert run.summary["steps"] == 2 and run.audit().violations == []


def test_a_trainer_whose_model_can_t_be_loaded_leaves_no_folder(
    tmp_path, small_config, monkeypatch
):
    def torn(*_: Any, **__: Any) -> None:
        raise ModelError("the weights are torn")

    config = small_config(tmp_path / "run", "rollout.samplers=0")
    monkeypatch.setattr(checks, "load_policy", torn)
    with pytest.raises(ModelError):
        learn(config)

    assert not config.run_dir.exists()


@pytest.mark.slow
def test_a_second_ctrl_c_prints_no_traceback(tmp_path):
    command = [sys.executable, "-m", "agentevo", "train", "coins", f"run.dir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        [*command, "evaluation.tasks=500", "evaluation.samples=4", "tracking.report=false"],
        stdout=(tmp_path / "out").open("w"),
        stderr=subprocess.STDOUT,
    )
    out = tmp_path / "out"

    def wait_for(text: str) -> None:
        while text not in out.read_text():
            assert process.poll() is None, out.read_text()
            time.sleep(0.01)

    wait_for("evaluating")
    process.send_signal(signal.SIGINT)
    wait_for("stopping")
    process.send_signal(signal.SIGINT)

    assert process.wait() == 130
    assert "Traceback" not in out.read_text() and "Error" not in out.read_text(), out.read_text()
