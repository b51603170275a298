"""`agentevo.train` takes recipes, environments and agent functions, and checks options like the
command line."""

import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

import agentevo
from agentevo.api import checked_tasks, resolve
from agentevo.config import build_config
from agentevo.config.tasks import TaskFields
from agentevo.environments import EnvironmentConfig, TextEnvironment, environments
from agentevo.errors import ConfigError, UnknownNameError
from agentevo.rollout.given_tasks import task_of
from agentevo.types import Baselines, Task


class LampConfig(EnvironmentConfig):
    type: Literal["test_lamp"] = "test_lamp"
    num_switches: int = 2
    """Switches on the wall."""


class Lamp(TextEnvironment):
    """Switch on the lamp."""

    Config: ClassVar[type[EnvironmentConfig]] = LampConfig
    instructions = "Say on."

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return "dark", {"valid": True, "effective": False, "success": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return (
            "light",
            1.0,
            True,
            False,
            {"valid": True, "effective": True, "success": action == "on"},
        )

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(["on", "off"])

    def optimal_action(self) -> str | None:
        return "on"

    def baselines(self, max_actions: int | None = None) -> Baselines:
        return Baselines(random=0.5, optimal=1.0)


async def think(task: Task, policy: Any) -> float:
    return 1.0


class Thinker:
    async def __call__(self, task: Task, policy: Any) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lamp.yaml").write_text(
        "environment: {type: test_lamp}\ntrainer: {steps: 7}\nalgorithm: {clip_high: 0.28}\n"
    )
    environments.register("test_lamp")(Lamp)


@pytest.mark.parametrize(
    ("given", "name", "num_switches"),
    [
        ("test_lamp", "test_lamp", 2),
        (LampConfig(num_switches=3), "test_lamp", 3),
        (Lamp, "test_lamp", 2),
        (Lamp(LampConfig(num_switches=4)), "test_lamp", 4),
        ("lamp.yaml", "lamp", 2),
        (Path("lamp.yaml"), "lamp", 2),
        (build_config({"environment": {"type": "coins"}, "run": {"name": "mine"}}), "mine", None),
    ],
    ids=["name", "options", "class", "object", "recipe", "path", "config"],
)
def test_what_can_be_trained_on(given, name, num_switches):
    config, agent = resolve(given)
    assert agent is None
    assert config.run.name == name
    assert getattr(config.environment, "num_switches", None) == num_switches


@pytest.mark.parametrize(
    ("given", "name"),
    [(think, "think"), (Thinker(), "Thinker"), (lambda task: 1.0, "lambda"), (len, "len")],
)
def test_a_function_is_an_agent(given, name):
    config, agent = resolve(given, trainer={"steps": 2})
    assert agent is given
    assert (config.environment, config.run.name, config.trainer.steps) == (None, name, 2)


def test_options_have_the_names_of_the_yaml_and_lie_above_the_recipe():
    config, _ = resolve(
        "lamp.yaml",
        model={"name": "tiny", "tiny": {"num_layers": 2}},
        trainer={"group_size": 4},
        environment={"num_switches": 5},
        run={"dir": Path("here")},
        overrides=["trainer.learning_rate=1e-4", "run.name=x"],
    )
    assert (
        config.model.tiny.num_layers,
        config.trainer.group_size,
        config.environment.num_switches,
    ) == (2, 4, 5)
    assert (config.trainer.steps, config.trainer.learning_rate) == (7, 1e-4)
    assert (config.run_dir, config.run.name) == (Path("here").absolute(), "x")


def test_model_and_algorithm_may_be_names_and_leave_the_rest_of_the_recipe():
    config, _ = resolve("lamp.yaml", model="tiny", algorithm="grpo")
    assert (config.model.name, config.algorithm.name, config.algorithm.clip_high) == (
        "tiny",
        "grpo",
        0.28,
    )


def test_a_section_object_changes_only_what_it_sets():
    base = build_config({"environment": {"type": "test_lamp"}, "trainer": {"steps": 3}})
    config, _ = resolve("lamp.yaml", trainer=type(base.trainer)(group_size=5))
    assert (config.trainer.steps, config.trainer.group_size) == (7, 5)


@pytest.mark.parametrize(
    ("given", "options", "expected"),
    [
        (
            "test_lam",
            {},
            "'test_lam' is no recipe, no environment and no agent: did you mean 'test_lamp'?",
        ),
        ("missing.yaml", {}, "recipe missing.yaml: no such file"),
        (
            lambda: 1.0,
            {},
            "agentevo.train: the agent '<lambda>' takes no parameters: make it `run(task)` or "
            "`run(task, policy)`, with `def` or `async def`",
        ),
        (7, {}, "can't train a int"),
        (
            "test_lamp",
            {"trainr": {"steps": 1}},
            "agentevo.train: trainr: unknown key; did you mean trainer?",
        ),
        (
            "test_lamp",
            {"trainer": {"stps": 1}},
            "agentevo.train: trainer.stps: unknown key; did you mean trainer.steps?",
        ),
        (
            "test_lamp",
            {"trainer": {"steps": "x"}},
            "agentevo.train: trainer.steps: got 'x'; needs a whole number",
        ),
        ("test_lamp", {"overrides": ["trainer.stps=1"]}, "override: trainer.stps: unknown key"),
        ("test_lamp", {"trainer": {"steps": object()}}, "agentevo.train: trainer.steps: "),
        (
            "lamp.yaml",
            {"sampling": {"top_p": 0.5}},
            "agentevo.train: sampling.top_p, top_k and min_p truncate",
        ),
    ],
)
def test_refusals(given, options, expected):
    with pytest.raises(ConfigError) as caught:
        resolve(given, **options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in Path().iterdir()] == ["lamp.yaml"]


def test_an_environment_needs_a_type_of_its_own():
    class NoType(Lamp):
        Config = EnvironmentConfig

    class Taken(Lamp):
        Config = type("TakenConfig", (LampConfig,), {})

    with pytest.raises(ConfigError, match="NoType needs a `Config`"):
        resolve(NoType)

    with pytest.raises(
        ConfigError, match=r"'test_lamp' is already taken.*give Taken\.Config another `type`"
    ):
        resolve(Taken)


def test_a_notebook_cell_may_define_its_environment_again():
    again = type("Lamp", (TextEnvironment,), {**Lamp.__dict__})
    resolve(again)
    assert environments.get("test_lamp") is again


def test_mappings_are_read_as_rows_of_a_file_are():
    rows = [{"id": "0", "question": "x0", "solution": "2", "level": 3}, {"prompt": "y"}]
    first, second = checked_tasks(rows, think) or []
    assert first == Task(id="0", query="x0", answer="2", metadata={"level": 3})
    assert second == task_of(rows[1], TaskFields()) and second.query == "y"


@pytest.mark.slow
def test_an_agent_is_registered_by_an_import_or_given_as_its_class(tmp_path):
    name = f"agent_{tmp_path.name}"
    Path("by_file.py").write_text(
        f"import agentevo\n@agentevo.agent({name!r})\nasync def run(task, policy): return 1.0\n"
    )
    Path("tasks.jsonl").write_text('{"query": "x"}\n')

    tasks = {"train": "tasks.jsonl"}
    with pytest.raises(UnknownNameError, match=r"agents: .*single_turn.*import=\[") as caught:
        resolve(name, tasks=tasks)
    assert "\n" not in str(caught.value)

    config, _ = resolve(name, tasks=tasks, overrides=["import=[./by_file.py]"])
    assert config.agent.type == name

    class Player:
        async def run(self, task, policy):
            return 1.0

    with pytest.raises(ConfigError, match="Player is not registered: put @agentevo"):
        resolve(Player, tasks=tasks)

    agentevo.agent(f"player_{tmp_path.name}")(Player)
    assert resolve(Player, tasks=tasks)[0].agent.type == f"player_{tmp_path.name}"


def test_a_run_with_reward_functions_is_opened_again_by_passing_them(tmp_path):
    def right_again(completion, answer) -> float:
        return float(completion == answer)

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(
        "agent: {type: function}\nrewards: [{name: right_again, weight: 2}]\n"
    )

    given = {"agent": think, "tasks": [Task(id="a", query="?")]}
    with pytest.raises(ConfigError, match=r"right_again.*import=\[.*pass it first"):
        agentevo.load_run(folder, **given)

    run = agentevo.load_run(folder, **given, rewards=[right_again])
    assert run.config.rewards[0].weight == 2


def test_tasks_of_an_agent_function():
    task = Task(id="a", query="1+1?", answer="2")
    assert checked_tasks([task, {"id": "b", "query": "2+2?"}], think) == [
        task,
        Task(id="b", query="2+2?"),
    ]
    assert checked_tasks(None, None) is None


@pytest.mark.parametrize(
    ("tasks", "agent", "expected"),
    [
        (None, think, "an agent function needs them"),
        ([], think, "an agent function needs them"),
        ([], None, "no tasks"),
        ([{"id": "no query"}], think, r"tasks\[0\]: no query: "),
        (
            [{"id": "a", "query": "?"}, {"id": "a", "query": "!"}],
            think,
            "the id 'a' is there 2 times",
        ),
    ],
)
def test_wrong_tasks(tasks, agent, expected):
    with pytest.raises(ConfigError, match=expected):
        checked_tasks(tasks, agent)


def test_unknown_names_are_told_apart():
    with pytest.raises(UnknownNameError):
        resolve("nothing-like-this")


def test_the_package_offers_its_names_lazily():
    assert {"train", "load_run", "Task", "__version__"} <= set(dir(agentevo))
    assert agentevo.Task is Task
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        agentevo.trian  # noqa: B018

    code = (
        "import sys, agentevo; print([name for name in sys.modules if "
        "name.startswith('agentevo.')])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300
    )
    assert loaded.stdout.strip() == "[]"


@pytest.mark.slow
def test_sft_from_python(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instruction": "say", "output": "ok"}\n' * 3)
    tiny = {"name": "tiny", "tiny": {"tokenizer": "byte", "num_layers": 1, "hidden_size": 32}}
    options = {
        "run": {"dir": str(tmp_path / "run"), "threads": 1},
        "tracking": {"tensorboard": False, "report": False},
    }
    run = agentevo.sft(
        {"data": {"train": str(rows)}}, model=tiny, sft={"batch_conversations": 1}, **options
    )
    assert run.summary["steps"] == 2 and run.checkpoint.name == "step-000002"

    with pytest.raises(ConfigError, match="data: there is no training data"):
        agentevo.sft({}, model=tiny)


def test_another_preset_than_the_recipes_is_warned_of():
    with pytest.warns(UserWarning, match=r"algorithm\.clip_high=0\.28 +gspo's own is 0\.0004"):
        resolve("frozen_lake", algorithm="gspo")

    config, _ = resolve("frozen_lake")
    with pytest.warns(UserWarning, match=r"overrides=\['algorithm\.entropy_coef=0\.0', "):
        resolve(config, algorithm="gspo")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve("frozen_lake", algorithm="grpo")
        resolve("coins", algorithm="gspo", overrides=["algorithm.name=grpo"])
