"""A run that was interrupted and resumed is, to the last bit, the run that was not."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from byte_policy import byte_policy
from slow import soak

from agentevo.agents import Outcome
from agentevo.api.run import train
from agentevo.config import build_config, to_yaml
from agentevo.errors import CheckpointError, ConfigError
from agentevo.observability import LiveView
from agentevo.runs.folder.chain import End, HeadFile, link
from agentevo.runs.orchestration.run_record import RunRecord
from agentevo.training.checkpoint import Checkpoints
from agentevo.types import Message, Task

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_config, quiet_view, outcome_of):
    """The run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(small_config(folder), view=quiet_view())
    return outcome_of(folder)


def test_the_run_has_something_to_lose(whole):
    """Steps that train, groups that differ, dropped ones, warnings aside: else the comparisons
    below would say little."""
    rows = [row for row in whole["metrics"] if "actor/grad_norm" in row]
    assert len(rows) >= 3
    assert any("actor/kl_loss" in row and row["actor/kl_loss"] > 0 for row in rows)
    assert sum("val-core/frozen_lake/success/greedy" in row for row in whole["metrics"]) == 3
    assert whole["trainer"]["roles"]["reference"]


def test_the_same_configuration_twice_is_the_same_run(
    whole, tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    train(small_config(tmp_path / "run"), view=quiet_view())
    assert_same(outcome_of(tmp_path / "run"), whole)


@pytest.mark.slow
def test_another_seed_is_another_run(whole, tmp_path, small_config, quiet_view, outcome_of):
    train(
        small_config(tmp_path / "run", "run.seed=6", "trainer.steps=1", "evaluation.every=0"),
        view=quiet_view(),
    )
    other = outcome_of(tmp_path / "run")
    for name, entry in other["trajectories"].items():
        if name in whole["trajectories"]:
            assert entry[4] != whole["trajectories"][name][4]


@pytest.mark.parametrize(
    "interruption",
    [
        {"step": 2},
        {"phase": ("evaluating", "before")},
        *soak(
            {"step": 1},
            {"step": 3},
            {"phase": ("training", "step 3")},
            {"phase": ("evaluating", "step 2")},
        ),
    ],
    ids=str,
)
def test_a_clean_stop_and_a_resume(
    interruption, whole, tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    config = small_config(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(config, view=quiet_view(**interruption))

    stopped = json.loads((config.run_dir / "summary.json").read_text())
    assert stopped["steps"] == interruption.get(
        "step", {"step 3": 3, "before": 0, "step 2": 1}.get(interruption.get("phase", "  ")[1])
    )

    train(config, resume=True, view=quiet_view())
    assert_same(outcome_of(config.run_dir), whole)


@pytest.mark.soak
def test_stopping_after_every_step(
    whole, tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    config = small_config(tmp_path / "run")
    for step in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            train(config, resume=step > 1, view=quiet_view(step=step))
    train(config, resume=True, view=quiet_view())
    assert_same(outcome_of(config.run_dir), whole)


def test_a_resume_of_a_finished_run_changes_nothing(
    tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    config = small_config(tmp_path / "run", "trainer.steps=1", "cold_start.episodes=8")
    train(config, view=quiet_view())
    before = outcome_of(config.run_dir)
    told = io.StringIO()
    train(config, resume=True, view=LiveView("test", stream=told, plain=True))
    assert_same(outcome_of(config.run_dir), before)
    assert "1 step is committed and trainer.steps=1 is no more, so nothing" in told.getvalue()


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer(
    tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    """Only what depends on the number of steps differs: the schedule (constant here) and the last
    step's evaluation."""
    constant = (
        "trainer.schedule=constant",
        "trainer.steps=3",
        "evaluation.every=0",
        "cold_start.episodes=8",
    )
    train(small_config(tmp_path / "long", *constant), view=quiet_view())
    train(small_config(tmp_path / "grown", *constant, "trainer.steps=2"), view=quiet_view())
    train(small_config(tmp_path / "grown", *constant), resume=True, view=quiet_view())

    grown = outcome_of(tmp_path / "grown")
    long = outcome_of(tmp_path / "long")
    assert_same(grown["weights"], long["weights"])
    assert_same(grown["trainer"], long["trainer"])
    assert_same(grown["records"], long["records"])


@pytest.mark.slow
def test_evaluations_do_not_change_what_is_learned(
    tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    found = []
    for every, samples in ((0, 0), (1, 2)):
        folder = tmp_path / f"every-{every}"
        train(
            small_config(
                folder,
                "trainer.steps=2",
                f"evaluation.every={every}",
                f"evaluation.samples={samples}",
            ),
            view=quiet_view(),
        )
        found.append(outcome_of(folder))

    assert_same(found[0]["weights"], found[1]["weights"])
    assert_same(found[0]["records"], found[1]["records"])


async def counter(task: Task, policy) -> Outcome:
    """Three turns of one conversation; the reward counts letters, so that attempts differ."""
    messages = [Message("user", f"Say something about {task.query}.")]
    text = ""
    for _ in range(3):
        reply = await policy.generate(messages)
        text += reply.text
        messages = [*messages, reply.message, Message("user", "Go on.")]
    return Outcome(reward=sum(ord(letter) % 7 for letter in text) / 10, success=len(text) % 2 == 0)


@pytest.mark.slow
def test_an_agent_function_on_given_tasks(tmp_path, quiet_view, outcome_of, assert_same):
    tasks = [Task(id=f"t{n}", query=f"the number {n}") for n in range(7)]
    tree = {
        "model": byte_policy(hidden_size=32, num_heads=2),
        "sampling": {"max_new_tokens": 6},
        "trainer": {"steps": 4, "groups_per_step": 2, "group_size": 3, "learning_rate": 1e-3},
        "evaluation": {"tasks": 2, "every": 3},
        "checkpoint": {"every": 1},
        "tracking": {"tensorboard": False, "report": False},
        "run": {"threads": 1},
    }

    def config(name: str):
        return build_config(tree, [f"run.dir={tmp_path / name}"], needs_environment=False)

    train(config("whole"), agent=counter, tasks=tasks, view=quiet_view())
    with pytest.raises(KeyboardInterrupt):
        train(config("parts"), agent=counter, tasks=tasks, view=quiet_view(step=2))

    train(config("parts"), agent=counter, tasks=tasks, resume=True, view=quiet_view())
    one = outcome_of(tmp_path / "parts")
    other = outcome_of(tmp_path / "whole")
    one["summary"].pop("name")
    other["summary"].pop("name")
    assert_same(one, other)
    assert sum("actor/grad_norm" in row for row in one["metrics"]) == 4


@pytest.mark.slow
def test_a_stop_during_the_cold_start_starts_again(
    whole, tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    config = small_config(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(config, view=quiet_view(phase=("cold start", "2/")))
    with pytest.raises(ConfigError, match="holds a run already"):
        train(config, view=quiet_view())
    train(config, resume=True, view=quiet_view())
    assert_same(outcome_of(config.run_dir), whole)


@pytest.mark.parametrize("torn", ["newest", *soak("all")])
def test_torn_checkpoints_cost_time_only(
    torn, whole, tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    """What was committed after the newest whole checkpoint is done again from the store: not one
    token is sampled for it."""
    config = small_config(tmp_path / "run", "checkpoint.keep_last=3")
    with pytest.raises(KeyboardInterrupt):
        train(config, view=quiet_view(step=3))

    found = sorted((config.run_dir / "checkpoints").glob("step-*"))
    assert [path.name for path in found] == ["step-000002", "step-000003"]
    for path in found if torn == "all" else found[-1:]:
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-7])

    resumed = quiet_view()
    train(config, resume=True, view=resumed)
    assert_same(outcome_of(config.run_dir), whole)


KEPT = (
    "trainer.steps=3",
    "checkpoint.every=1",
    "checkpoint.keep_last=9",
    "evaluation.every=0",
    "evaluation.samples=0",
)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["all", "some"])
def test_a_store_that_has_lost_steps_costs_no_checkpoint(lost, tmp_path, small_config, quiet_view):
    config = small_config(tmp_path / "run", *KEPT)
    folder = config.run_dir / "checkpoints"
    store = config.run_dir / "store.sqlite"

    with pytest.raises(KeyboardInterrupt):
        train(config, view=quiet_view(step=1))

    older = store.read_bytes()
    train(config, resume=True, view=quiet_view())
    for path in config.run_dir.glob("store.sqlite*"):
        path.unlink()

    if lost == "some":
        store.write_bytes(older)

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    end = 0 if lost == "all" else 1
    message = rf"a checkpoint of step 3, but the store .* ends at step {end}: .*restore the store"
    with pytest.raises(CheckpointError, match=message):
        train(config, resume=True, view=quiet_view())
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before

    for path in list(folder.glob("step-00000[23]")):  # as the message says
        shutil.rmtree(path)

    (config.run_dir / "head.json").unlink()
    if lost == "some":
        run = train(config, resume=True, view=quiet_view())
        assert run.summary["steps"] == 3 and run.audit().violations == []
        assert any("head.json was missing" in warning for warning in run.summary["warnings"])


def test_a_checkpoint_whose_step_was_not_committed_goes(
    whole, tmp_path, small_config, quiet_view, outcome_of, assert_same, monkeypatch
):
    """What a kill between the two leaves; it is no sign of a store that has lost steps."""
    config = small_config(tmp_path / "run")
    commit = RunRecord.commit

    async def killed(self, *arguments):
        if self.progress.step == 2:
            raise RuntimeError("power cut")
        await commit(self, *arguments)

    monkeypatch.setattr(RunRecord, "commit", killed)
    with pytest.raises(RuntimeError, match="power cut"):
        train(config, view=quiet_view())

    monkeypatch.undo()
    assert Checkpoints(config.run_dir / "checkpoints", 1).steps() == [2]

    train(config, resume=True, view=quiet_view())
    assert_same(outcome_of(config.run_dir), whole)


@pytest.mark.parametrize("name", ["model.safetensors", *soak("checkpoint.json", "state.json")])
def test_a_checkpoint_that_can_not_be_read_now_is_kept(
    name, tmp_path, small_config, quiet_view, monkeypatch
):
    config = small_config(tmp_path / "run", *KEPT, "trainer.steps=1")
    train(config, view=quiet_view())
    victim = config.run_dir / "checkpoints" / "step-000001" / name
    opened = Path.open
    before = sorted(victim.parent.iterdir())

    def refused(path, *args, **kwargs):
        if path == victim:
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(
        CheckpointError, match=rf"step-000001/{name} can't be read now \(Too many open files\)"
    ):
        train(config, resume=True, view=quiet_view())

    monkeypatch.undo()
    assert sorted(victim.parent.iterdir()) == before

    train(config, resume=True, view=quiet_view())


def test_a_step_that_comes_out_differently_is_told_of(tmp_path, small_config, quiet_view):
    config = small_config(tmp_path / "run", *KEPT, "trainer.steps=1")
    before = train(config, view=quiet_view()).summary["warnings"]
    shutil.rmtree(config.run_dir / "checkpoints")

    with sqlite3.connect(config.run_dir / "store.sqlite") as store:
        (record,) = store.execute("SELECT record FROM steps WHERE step = 1").fetchone()
        tree = json.loads(record)
        tree["metrics"]["actor/grad_norm"] *= 2
        tree["chain"] = link(1, tree, "")
        store.execute("UPDATE steps SET record = ? WHERE step = 1", (json.dumps(tree),))

    HeadFile(config.run_dir).note_commit(End(1, tree["chain"]))
    again = train(config, resume=True, view=quiet_view()).summary["warnings"]
    told = [
        line
        for line in again
        if line.startswith("step 1, repeated from its plan, has a gradient norm of")
    ]
    assert len(told) == 1
    assert sorted(again) == sorted([*before, *told])


def test_a_plan_that_no_longer_fits_the_store_is_not_done_again(tmp_path, small_config, quiet_view):
    config = small_config(tmp_path / "run", "checkpoint.every=0", "evaluation.every=0")
    with pytest.raises(KeyboardInterrupt):
        train(config, view=quiet_view(step=1))

    shutil.rmtree(config.run_dir / "checkpoints")
    with sqlite3.connect(config.run_dir / "store.sqlite") as store:
        store.execute("UPDATE trajectories SET reward = reward + 1 WHERE trained_step = 1")
    with pytest.raises(CheckpointError, match=r"step 1 can't be repeated.*not those that were"):
        train(config, resume=True, view=quiet_view())


KILLED = """
import os, signal, sys
import torch
from agentevo.config import load_config
from agentevo.observability import LiveView
from agentevo.api.run import train
from agentevo.rollout.group import GroupAttempt

where = sys.argv[2]
attempt, save = GroupAttempt.run, torch.save

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class View(LiveView):
    def phase(self, name, detail=""):
        if f"{name} {detail}" == where:
            die()

async def one_attempt(self, *, task_id, group_id, number):
    found = await attempt(self, task_id=task_id, group_id=group_id, number=number)
    if where == "second attempt of step 3" and group_id.endswith("train@3") and number == 1:
        die()
    return found

def half_a_file(state, file):
    if where == "saving step 4" and "step-000004" in str(file.name):
        file.write(b"half")
        file.flush()
        die()
    save(state, file)

GroupAttempt.run, torch.save = one_attempt, half_a_file
view = View("killed", plain=True, stream=open(os.devnull, "w"))
train(load_config(sys.argv[1]), resume="resume" in sys.argv, view=view)
"""


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


@pytest.mark.slow
def test_a_run_that_is_killed_three_times(
    whole, tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    """SIGKILL while sampling, between update and commit, and in the middle of a checkpoint: each
    resume starts from the last whole one."""
    config = small_config(tmp_path / "run")
    recipe = tmp_path / "run.yaml"
    recipe.write_text(to_yaml(config))
    for number, where in enumerate(
        ["second attempt of step 3", "training step 3", "saving step 4"]
    ):
        words = [sys.executable, "-c", KILLED, str(recipe), where, *(["resume"] if number else [])]
        ended = subprocess.run(
            words, env=environment(), capture_output=True, text=True, timeout=250
        )
        assert ended.returncode == -signal.SIGKILL, ended.stderr

    train(config, resume=True, view=quiet_view())
    assert_same(outcome_of(config.run_dir), whole)
    assert [
        path.name
        for path in (config.run_dir / "checkpoints").iterdir()
        if path.name.endswith(".partial")
    ] == []


@pytest.mark.slow
def test_ctrl_c_at_the_command(whole, tmp_path, small_config, quiet_view, outcome_of, assert_same):
    """A signal from outside: the step in progress ends, a checkpoint is written, the exit code is a
    shell's for Ctrl-C."""
    config = small_config(tmp_path / "run")
    recipe = tmp_path / "run.yaml"
    recipe.write_text(to_yaml(config))
    with subprocess.Popen(
        [sys.executable, "-m", "agentevo", "train", str(recipe)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        metrics = config.run_dir / "metrics.jsonl"
        while process.poll() is None and not (
            metrics.is_file() and "actor/lr" in metrics.read_text()
        ):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=250)

    assert process.returncode == 130, errors
    assert "stopped cleanly" in errors
    assert Path(config.run_dir / "summary.json").is_file()

    train(config, resume=True, view=quiet_view())
    assert_same(outcome_of(config.run_dir), whole)
