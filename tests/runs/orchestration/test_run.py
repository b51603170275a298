"""A whole run in its folder: what it leaves, what it refuses, and that nobody's failure ends it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from byte_policy import byte_policy
from transformers import AutoModelForCausalLM

from agentevo.api.run import Run, evaluate_model, train
from agentevo.config import build_config
from agentevo.errors import CheckpointError, ConfigError, EngineError, MissingExtraError
from agentevo.observability import read_metrics
from agentevo.runs.folder.lock import only_trainer
from agentevo.runtime.event_loop import run_coroutine
from agentevo.store.records import RetryPolicy
from agentevo.training.checkpoint import Checkpoints
from agentevo.types import Message, Task


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_config, quiet_view) -> Run:
    """Four steps, evaluated after each, one checkpoint and the best kept, with a report."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = small_config(
        folder,
        "evaluation.every=1",
        "checkpoint.every=1",
        "checkpoint.keep_last=1",
        "tracking.report=true",
        "tracking.tensorboard=true",
    )
    return train(config, view=quiet_view())


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


@pytest.mark.slow
def test_the_folder_of_a_run(run):
    names = {path.name for path in run.dir.iterdir()}
    assert {
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "report.html",
        "plots",
        "checkpoints",
        "store.sqlite",
        "tensorboard",
    } <= names
    assert not [name for name in names if name.endswith(".tmp")]


@pytest.mark.slow
def test_the_summary(run):
    summary = run.summary
    rows = read_metrics(run.dir / "metrics.jsonl")
    evaluations = [
        row["val-core/frozen_lake/success/greedy"]
        for row in rows
        if "val-core/frozen_lake/success/greedy" in row
    ]
    assert len(evaluations) == 5

    found = summary["eval"]
    assert (found["before"], found["after"], found["n"]) == (evaluations[0], evaluations[-1], 2)
    assert 0 <= found["random"] < found["optimal"] == 1.0
    assert set(found["sampled"]) == {"before", "after"}
    assert summary["steps"] == 4
    assert summary["wall_s"] > sum(row.get("timing_s/step") or 0.0 for row in rows)

    in_steps = sum(row.get("engine/generated_tokens") or 0.0 for row in rows)
    assert summary["tokens"]["generated"] > in_steps > 0, "evaluations generate tokens too"

    demonstrated = next(row["cold_start/tokens"] for row in rows if "cold_start/tokens" in row)
    assert summary["tokens"]["trained"] == demonstrated + sum(
        row.get("trainer/trained_tokens") or 0.0 for row in rows
    )


@pytest.mark.slow
def test_every_step_says_what_came_in_and_what_was_dropped(run):
    steps = [row for row in read_metrics(run.dir / "metrics.jsonl") if "rollout/in" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    for row in steps:
        assert row["rollout/in"] == 12
        assert row["rollout/dropped"] == sum(
            value for key, value in row.items() if key.startswith("rollout/dropped/")
        )
        assert {
            "critic/score/mean",
            "timing_s/gen",
            "timing_s/update_actor",
            "perf/throughput",
            "num_turns/mean",
        } <= set(row)

        if row["rollout/dropped"] < 12:
            assert {"actor/entropy", "actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac"} <= set(
                row
            )
            assert abs(row["actor/ppo_kl_first"]) < 1e-4, "on-policy in every step"
            assert row["actor/logprob_diff_max"] < 1e-4


@pytest.mark.slow
def test_what_is_in_the_store(run):
    trained = run.trajectories(split="train")
    assert len(trained) == 4 * 3 * 4
    for trajectory in trained:
        step = int(trajectory.group_id.rsplit("@", 1)[1])
        assert {version for turn in trajectory.turns for version in turn.versions} <= {step - 1}, (
            "sampled from what the step before left"
        )

    committed = run.trajectories(state="committed")
    dropped = run.trajectories(state="dropped")
    assert len(committed) + len(dropped) == 48
    assert len(committed) > 0
    assert len(run.trajectories(split="eval", step=0)) == 2 * 2, "greedy and sampled"
    assert len(run.trajectories(split="eval", step=2)) == 2, "greedy only"


@pytest.mark.slow
def test_the_newest_checkpoint_and_the_best_are_kept(run):
    rows = read_metrics(run.dir / "metrics.jsonl")
    values = {
        row["step"]: row["val-core/frozen_lake/success/greedy"]
        for row in rows
        if row["step"] and "val-core/frozen_lake/n" in row
    }
    best = max(values, key=lambda step: (values[step], step))
    checkpoints = Checkpoints(run.dir / "checkpoints", 1)
    assert checkpoints.steps() == sorted({best, 4})
    assert (run.summary["best"]["step"], run.summary["best"]["value"]) == (best, values[best])
    assert run.checkpoint == checkpoints.path(best)
    assert run.checkpoint_path("last") == checkpoints.path(4)
    assert AutoModelForCausalLM.from_pretrained(run.checkpoint).config.hidden_size == 32

    with pytest.raises(CheckpointError):
        run.checkpoint_path("step-9")


@pytest.mark.slow
def test_evaluating_a_run_repeats_its_numbers_and_writes_nothing(run):
    rows = [
        row
        for row in read_metrics(run.dir / "metrics.jsonl")
        if "val-core/frozen_lake/success/sampled" in row
    ]
    before = snapshot(run.dir)
    found = run.eval(checkpoint="last")
    assert {key: found[key] for key in found if key.startswith("val-core/")} == {
        key: value for key, value in rows[-1].items() if key.startswith("val-core/")
    }
    assert snapshot(run.dir) == before


@pytest.mark.slow
def test_a_model_can_be_evaluated_without_a_run(small_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = evaluate_model(small_config(tmp_path / "none"))
    assert {"val-core/frozen_lake/success/greedy", "val-core/frozen_lake/random"} <= set(found)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_folder_with_a_run_is_refused_and_left_alone(run, small_config, quiet_view):
    before = snapshot(run.dir)
    with pytest.raises(
        ConfigError,
        match=r"holds a run already: resume it with --resume, .*run\.dir, or .*run\.overwrite=true",
    ):
        train(small_config(run.dir), view=quiet_view())
    assert snapshot(run.dir) == before


def test_a_folder_with_something_else_is_refused_even_with_overwrite(
    tmp_path, small_config, quiet_view
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    for options in ((), ("run.overwrite=true",)):
        with pytest.raises(ConfigError, match="is not empty and is not a run"):
            train(small_config(tmp_path / "run", *options), view=quiet_view())
    assert (tmp_path / "run" / "thesis.tex").read_text() == "years of work"
    assert len(list((tmp_path / "run").iterdir())) == 1


@pytest.mark.slow
def test_an_empty_folder_is_fine_and_an_old_run_can_be_overwritten(
    tmp_path, small_config, quiet_view
):
    folder = tmp_path / "run"
    folder.mkdir()
    quick = ("trainer.steps=0", "cold_start.episodes=0", "evaluation.samples=0")
    train(small_config(folder, *quick), view=quiet_view())
    (folder / "left over").write_text("x")
    train(small_config(folder, *quick, "run.overwrite=true"), view=quiet_view())
    assert not (folder / "left over").exists()


@pytest.mark.slow
@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_is_being_trained_is_left_alone(resume, tmp_path, small_config, quiet_view):
    """Its samplers read config.yaml when they start again, and its trainer writes into the
    folder."""
    folder = tmp_path / "run"
    train(small_config(folder, "trainer.steps=1", "evaluation.every=0"), view=quiet_view())
    with only_trainer(folder):
        before = snapshot(folder)
        with pytest.raises(ConfigError, match="another process trains there: stop it first"):
            train(
                small_config(folder, "trainer.steps=2", f"run.overwrite={not resume}"),
                resume=resume,
                view=quiet_view(),
            )

        assert snapshot(folder) == before

    assert (
        train(small_config(folder, "trainer.steps=2"), resume=True, view=quiet_view()).summary[
            "steps"
        ]
        == 2
    )


def test_resuming_nothing_is_refused(tmp_path, small_config, quiet_view):
    with pytest.raises(ConfigError, match="there is no run to resume"):
        train(small_config(tmp_path / "run"), resume=True, view=quiet_view())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_recipe_may_only_evaluate(tmp_path, small_config, quiet_view):
    """No steps: before is after, and the model as it is becomes the checkpoint."""
    done = train(
        small_config(tmp_path / "run", "trainer.steps=0", "cold_start.episodes=0"),
        view=quiet_view(),
    )
    assert done.summary["eval"]["before"] == done.summary["eval"]["after"]
    assert Checkpoints(done.dir / "checkpoints", 1).steps() == [0]
    assert done.summary["tokens"]["trained"] == 0


def agent_config(folder: Path, **sections):
    tree = {
        "model": byte_policy(context_length=128),
        "sampling": {"max_new_tokens": 4},
        "trainer": {"steps": 3, "groups_per_step": 2, "group_size": 3, "learning_rate": 1e-3},
        "evaluation": {"tasks": 1, "every": 0, "samples": 0},
        "tracking": {"tensorboard": False, "report": False},
    }
    return build_config(tree | sections, [f"run.dir={folder}"], needs_environment=False)


TASKS = [Task(id=f"t{n}", query="x" * n) for n in range(1, 6)]


@pytest.mark.slow
def test_agents_that_fail_cost_their_attempts_and_never_the_run(tmp_path, quiet_view):
    """One task's agent always breaks, another's asks for more than the context holds, some attempts
    hang."""

    async def agent(task, policy):
        reply = await policy.generate([Message("user", task.query)])
        if task.id == "t1":
            raise ValueError("broken")
        if task.id == "t2":
            await policy.generate([Message("user", "far too long" * 20)])
        if task.id == "t3" and len(reply.text) % 2:
            await asyncio.sleep(3600)
        return sum(map(ord, reply.text)) % 5 / 5

    config = agent_config(tmp_path / "run", agent={"timeout_s": 2.0})
    done = train(config, agent=agent, tasks=TASKS, view=quiet_view())
    assert done.summary["steps"] == 3

    failed = done.trajectories(status="failed")
    reasons = {trajectory.task_id: trajectory.error for trajectory in failed}
    assert reasons["t1"] == "ValueError: broken"
    assert reasons["t2"].startswith("RequestTooLongError: the conversation has 2")
    assert "agent.timeout_s=2 s" in reasons.get("t3", "agent.timeout_s=2 s")

    rows = [row for row in read_metrics(done.dir / "metrics.jsonl") if "rollout/in" in row]
    assert sum(row.get("rollout/dropped/failed", 0.0) for row in rows) == len(
        [t for t in failed if "train@" in t.id]
    )


@pytest.mark.slow
def test_an_engine_without_time_ends_the_run_with_what_to_do_about_it(
    tmp_path, quiet_view, monkeypatch
):
    """It is nobody's failed attempt, and no reward of 0 is trained on."""
    monkeypatch.setattr("agentevo.rollout.sampler.RETRIES", RetryPolicy(first_delay_s=0.01))

    async def agent(task, policy):
        await policy.generate([Message("user", task.query)])
        return 1.0

    config = agent_config(tmp_path / "run", engine={"timeout_s": 1e-4})
    with pytest.raises(
        EngineError,
        match=r"failed 5 times, last with: .*completion within 0\.0001 s .*: raise engine\.timeout",
    ):
        train(config, agent=agent, tasks=TASKS, view=quiet_view())

    assert Run(config).trajectories() == []


def test_an_agent_function_needs_tasks(tmp_path, quiet_view):
    async def agent(task, policy):
        return 1.0

    with pytest.raises(ConfigError, match="needs tasks"):
        train(agent_config(tmp_path / "run"), agent=agent, view=quiet_view())
    with pytest.raises(ConfigError, match="at least 2 are needed"):
        train(agent_config(tmp_path / "run"), agent=agent, tasks=TASKS[:1], view=quiet_view())

    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_training_works_from_a_notebook(tmp_path, quiet_view):
    """There an event loop runs already."""

    async def agent(task, policy):
        return float(len((await policy.generate([Message("user", task.query)])).text) % 3)

    async def cell():
        return train(agent_config(tmp_path / "run"), agent=agent, tasks=TASKS, view=quiet_view())

    assert asyncio.run(cell()).summary["steps"] == 3


def test_run_coroutine_hands_errors_back():
    async def broken():
        raise KeyError("x")

    async def cell():
        return run_coroutine(broken())

    for work in (broken(), cell()):
        with pytest.raises(KeyError):
            asyncio.run(work)


@pytest.mark.slow
def test_the_configuration_of_a_run_is_kept_whole(run):
    from agentevo.runs.folder.run_folder import run_config

    assert run_config(run.dir) == run.config
    assert json.loads((run.dir / "summary.json").read_text())["seed"] == 5


def test_samplers_without_the_extra_are_refused_before_anything_is_made(
    tmp_path, small_config, monkeypatch
):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "agentevo.inference.serving.server", raising=False)
    wanted = small_config(tmp_path / "run", "rollout.samplers=1")
    with pytest.raises(MissingExtraError, match=r"pip install 'agentevo\[serve\]'"):
        train(wanted)
    assert not wanted.run_dir.exists()
