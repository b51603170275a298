"""What may change when a run is resumed, and what becomes of it."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import yaml
from byte_policy import byte_policy

from agentevo.api.run import Run, train
from agentevo.config import RunConfig, build_config, load_config
from agentevo.errors import ConfigError
from agentevo.observability import LiveView
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.folder.chain import HeadFile
from agentevo.runs.folder.creation import write_config
from agentevo.runs.folder.resume_rules import changes, check_resume
from agentevo.types import Message, Task

CURRICULUM = ("tasks.from_environment=8", "tasks.curriculum.floor=0.1")
MORE_ATTEMPTS = "tasks.curriculum.attempts=[2,100]"
ONE_STEP = ("trainer.steps=1", "cold_start.episodes=8", "evaluation.every=0")


@pytest.fixture(scope="module")
def of_one_step(tmp_path_factory, small_config, quiet_view) -> Path:
    """A folder with a finished run of one step."""
    folder = tmp_path_factory.mktemp("of_one_step")
    train(small_config(folder / "run", *ONE_STEP), view=quiet_view())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "environment.size=5",
        "model.tiny.num_layers=3",
        "agent.max_turns=3",
        "run.seed=7",
        "cold_start.episodes=2",
        "store.url=sqlite:///{folder}/elsewhere.sqlite",
    ],
)
def test_another_run_is_not_resumed(change, of_one_step, small_config, quiet_view):
    folder = of_one_step / "run"
    before = {
        path: path.read_bytes()
        for path in folder.glob("*.*")
        if path.suffix in {".yaml", ".json", ".jsonl"}
    }

    other = small_config(folder, *ONE_STEP, "trainer.steps=2", change.format(folder=of_one_step))
    with pytest.raises(
        ConfigError,
        match=rf"was started with {change.split('=')[0]}=.* and not .*give another run\.dir",
    ):
        train(other, resume=True, view=quiet_view())

    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("was", "change"),
    [
        ((), "rollout.staleness=1"),
        ((), "rollout.samplers=1"),
        (("rollout.samplers=2",), "rollout.samplers=0"),
        (("rollout.staleness=1", "rollout.samplers=2"), "rollout.samplers=0"),
        (("rollout.staleness=1",), "rollout.policy=mask"),
        (("rollout.samplers=1", "rollout.policy=mask"), "rollout.policy=wait"),
        (("rollout.staleness=1",), "trainer.groups_per_step=4"),
        (("rollout.samplers=1",), "trainer.group_size=8"),
        (("rollout.staleness=1", *CURRICULUM), "tasks.curriculum.floor=0.2"),
        (("rollout.staleness=1", *CURRICULUM), MORE_ATTEMPTS),
    ],
)
def test_what_tasks_are_queued_for_can_not_change(was, change, tmp_path, small_config):
    write_config(small_config(tmp_path / "run", *was))
    with pytest.raises(
        ConfigError,
        match=rf"was started with {change.split('=')[0]}=.*: resume it .*give another run\.dir",
    ):
        check_resume(small_config(tmp_path / "run", *was, change))


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ((), ["rollout.policy=mask", "trainer.groups_per_step=4", "trainer.group_size=8"]),
        (
            ("rollout.samplers=1", "rollout.policy=mask"),
            ["rollout.samplers=2", "rollout.policy=cancel"],
        ),
        (("rollout.staleness=1",), ["rollout.staleness=2", "algorithm.drop_zero_variance=false"]),
    ],
)
def test_what_depends_on_no_queue_can_change(was, now, tmp_path, small_config):
    write_config(small_config(tmp_path / "run", *was))
    changed = check_resume(small_config(tmp_path / "run", *was, *now))
    assert changed.keys() == {change.split("=")[0] for change in now}


def test_a_store_that_moved_is_refused_and_a_new_password_is_not(tmp_path, small_config):
    def at(url: str) -> RunConfig:
        return small_config(tmp_path / "run", f"store.url={url}")

    write_config(at("postgresql://me:${env:OLD}@one/runs"))
    for same in (
        "postgresql://me:${env:OLD}@one/runs",
        "postgresql://me:${env:NEW}@one/runs",
        "postgresql://me@one/runs",
    ):
        check_resume(at(same))

    with pytest.raises(
        ConfigError,
        match=r"was started with store\.url='postgresql://me:\$\{env:OLD\}@one/runs' and not",
    ):
        check_resume(at("postgresql://me:${env:NEW}@two/runs"))


def _without(path: Path, *keys: str) -> None:
    """config.yaml as it was written before there were these keys."""
    tree = yaml.safe_load(path.read_text())
    for key in keys:
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            inner = inner[section]
        del inner[name]

    path.write_text(yaml.safe_dump(tree))
    HeadFile(path.parent).record_file(path.name)


OLD = (
    "model.lora",
    "model.tiny.tokenizer",
    "data",
    "profile",
    "cold_start.random_action_rate",
    "environment.alphabet",
    "environment.frozen_probability",
    "algorithm.kl_in",
)


@pytest.mark.slow
def test_a_run_from_before_some_keys_existed_goes_on(
    tmp_path, quiet_view, small_config, outcome_of, assert_same
):
    config = small_config(tmp_path / "run", *ONE_STEP)
    train(config, view=quiet_view())
    before = outcome_of(config.run_dir)
    _without(tmp_path / "run" / "config.yaml", *OLD)
    assert changes(config) == {}, "they stood at their defaults"
    train(config, view=quiet_view(), resume=True)
    assert_same(outcome_of(config.run_dir), before)


@pytest.mark.slow
def test_a_key_from_after_its_beginning_may_not_change_a_run(
    of_one_step, tmp_path, quiet_view, small_config
):
    folder = tmp_path / "run"
    shutil.copytree(of_one_step / "run", folder)
    _without(folder / "config.yaml", *OLD)
    for key in ("cold_start.random_action_rate", "environment.frozen_probability"):
        with pytest.raises(ConfigError, match=rf"was started with {key}="):
            train(small_config(folder, *ONE_STEP, f"{key}=0.5"), view=quiet_view(), resume=True)


@pytest.mark.slow
def test_what_changed_on_the_way_is_said_and_written_down(tmp_path, small_config):
    train(
        small_config(tmp_path / "run", *ONE_STEP),
        view=LiveView("x", plain=True, stream=io.StringIO()),
    )
    said = io.StringIO()
    train(
        small_config(tmp_path / "run", *ONE_STEP, "trainer.steps=2"),
        resume=True,
        view=LiveView("x", plain=True, stream=said),
    )

    assert "from now on with trainer.steps=2, which was 1" in said.getvalue()
    assert load_config(tmp_path / "run" / "config.yaml").trainer.steps == 2


OWN = ("rollout.staleness=1",)
MASK = ("rollout.staleness=1", "rollout.policy=mask")
ALIKE = ("algorithm.drop_zero_variance=true", "algorithm.drop_zero_variance=false")
ROUNDS = ("algorithm.dynamic_sampling=3", "algorithm.dynamic_sampling=0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "change"),
    [
        ((), ALIKE),
        (MASK, ROUNDS),
        pytest.param((), ROUNDS, marks=pytest.mark.soak),
        pytest.param(OWN, ALIKE, marks=pytest.mark.soak),
        pytest.param(MASK, ALIKE, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_step_begun_under_another_choice_of_attempts(keys, change, tmp_path, quiet_view):
    """Killed between reservation and commit; the resume chooses others of the same attempts."""
    tasks = [Task(id=f"t{n}", query=f"the number {n}") for n in range(7)]
    tree = {
        "model": byte_policy(hidden_size=32, num_heads=2),
        "sampling": {"max_new_tokens": 4},
        "trainer": {"steps": 2, "groups_per_step": 2, "group_size": 2},
        "evaluation": {"tasks": 1, "every": 0, "samples": 0},
        "tracking": {"tensorboard": False, "report": False},
        "run": {"threads": 1, "dir": str(tmp_path / "run")},
    }
    was, now = (build_config(tree, [*keys, one], needs_environment=False) for one in change)
    alike, other = (task.id for task in TaskSource(was, tasks).train(1))

    async def agent(task: Task, policy) -> float:
        await policy.generate([Message("user", task.query)])
        return 0.0 if task.id == alike else float(policy.name.endswith("#1"))

    class PowerCut(type(quiet_view())):
        def phase(self, name, detail=""):
            if (name, detail) == ("training", "step 1"):
                raise RuntimeError("power cut")
            super().phase(name, detail)

    def groups(**which) -> set[str]:
        return {t.group_id for t in Run(was).trajectories(split="train", **which)}

    with pytest.raises(RuntimeError, match="power cut"):
        train(was, agent=agent, tasks=tasks, view=PowerCut())

    reserved = groups(state="reserved")
    own = {f"{alike}/train@1", f"{other}/train@1"}
    assert reserved
    assert keys == MASK or (
        f"{alike}/train@1" not in reserved and (change is ALIKE or not reserved <= own)
    )

    run = train(now, agent=agent, tasks=tasks, resume=True, view=quiet_view())
    assert run.summary["steps"] == 2 and run.audit().violations == []

    trained = groups(trained_step=1)
    assert trained == (
        reserved if keys == MASK else own if change is ALIKE else own - {f"{alike}/train@1"}
    )


@pytest.mark.slow
def test_what_a_resume_changes_is_changed_where_machines_meet(tmp_path, quiet_view, small_config):
    """By `train`, too: engines and samplers of the run may be elsewhere."""

    def at(*overrides: str) -> RunConfig:
        return small_config(tmp_path / "run", *ONE_STEP, *overrides)

    url = f"rollout.weights.url=file://{tmp_path / 'bucket'}"
    train(at(url, "trainer.steps=1"), view=quiet_view())
    train(at(url, "trainer.steps=2"), view=quiet_view(), resume=True)
    assert load_config(tmp_path / "bucket" / "config.yaml").trainer.steps == 2

    for other in ((), (f"rollout.weights.url=file://{tmp_path / 'other'}",)):
        with pytest.raises(ConfigError, match=r"was started with rollout\.weights\.url="):
            train(at("trainer.steps=3", *other), view=quiet_view(), resume=True)

    (tmp_path / "bucket" / "writer.json").write_text("another")
    with pytest.raises(ConfigError, match="bucket has the weights of another run"):
        train(at(url, "trainer.steps=3"), view=quiet_view(), resume=True)

    assert load_config(tmp_path / "bucket" / "config.yaml").trainer.steps == 2
    assert load_config(tmp_path / "run" / "config.yaml").trainer.steps == 2
