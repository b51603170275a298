"""What a recipe and its overrides turn into."""

from pathlib import Path

import pytest
import yaml

from agentevo.config import build_config, load_config, sources, to_tree, to_yaml
from agentevo.errors import ConfigError
from agentevo.runs.folder.run_folder import run_config

DOORS = {"environment": {"type": "test_doors"}}


def recipe(text: str = "environment: {type: test_doors}\n", name: str = "r.yaml") -> str:
    Path(name).write_text(text)
    return name


def test_a_section_may_be_written_as_the_name_that_it_chooses():
    """`model: NAME`, as several pages write it; keys of the section may still be set beside it."""
    path = recipe("model: some/model\nenvironment: test_doors\nalgorithm: dapo\nengine: vllm\n")
    config = load_config(path)
    names = (config.model.name, config.environment.type, config.algorithm.name, config.engine.type)
    assert names == ("some/model", "test_doors", "dapo", "vllm")
    assert config.algorithm.importance == "token_tis", "as with engine.type=vllm"

    config = load_config(path, ["model.lora.rank=4", "algorithm=grpo", "environment.num_doors=5"])
    assert (config.model.name, config.model.lora.rank) == ("some/model", 4)
    assert (config.algorithm.name, config.environment.num_doors) == ("grpo", 5)
    assert build_config({**DOORS, "model": {"name": "a/b", "lora": {"rank": 2}}}, ["model=c/d"])

    for text, problem in (("model: [a]", "model.name: got"), ("model: 5", "model: got 5")):
        with pytest.raises(ConfigError, match=problem):
            load_config(recipe(f"environment: test_doors\n{text}\n"))


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.steps=3", "trainer.steps", 3),
        ("trainer.steps=1e2", "trainer.steps", 100),
        ("trainer.learning_rate=1e-5", "trainer.learning_rate", 1e-5),
        ("trainer.betas=[0.8,0.9]", "trainer.betas", (0.8, 0.9)),
        ("trainer={steps: 5}", "trainer.steps", 5),
        ("tracking.report=no", "tracking.report", False),
        ("run.threads=null", "run.threads", None),
        ("run.dir=~/x", "run.dir", Path("~/x").expanduser()),
        ("run.dir=null", "run.dir", None),
        ("run.dir=a=b", "run.dir", Path("a=b")),
        ("run.name=007", "run.name", "007"),
        ("run.name=no", "run.name", "no"),
        ("agent.action_separator=||", "agent.action_separator", "||"),
        ("agent.action_separator=#", "agent.action_separator", "#"),
        (
            "agent.system_prompt=Be brief: say x=1, not 'x'.",
            "agent.system_prompt",
            "Be brief: say x=1, not 'x'.",
        ),
        ("agent.system_prompt='quoted: text'", "agent.system_prompt", "quoted: text"),
        ("agent.system_prompt=", "agent.system_prompt", ""),
        ("sampling.stop=['</answer>', '\\n']", "sampling.stop", ("</answer>", "\\n")),
        ("run.seed=${trainer.groups_per_step}", "run.seed", 7),
        ("environment.num_doors=5", "environment.num_doors", 5),
    ],
)
def test_overrides(override, key, value):
    config = build_config({**DOORS, "trainer": {"groups_per_step": 7}}, [override])
    found = config
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_later_overrides_win_and_leave_their_neighbours():
    config = build_config(
        {**DOORS, "trainer": {"steps": 1, "group_size": 3}}, ["trainer.steps=2", "trainer.steps=4"]
    )
    assert (config.trainer.steps, config.trainer.group_size) == (4, 3)


def test_a_recipe_is_named_after_its_file_unless_it_says_otherwise():
    assert load_config(recipe(name="walk.yaml")).run.name == "walk"
    assert (
        load_config(recipe("run: {name: 2024}\nenvironment: {type: test_doors}\n")).run.name
        == "2024"
    )


def test_the_resolved_tree_loads_to_the_same_config():
    config = load_config(
        recipe(),
        [
            "environment.type=test_ice",
            "environment.slick=false",
            "model.name=tiny",
            "model.tiny.num_layers=2",
        ],
    )
    Path("again.yaml").write_text(to_yaml(config))
    assert load_config("again.yaml") == config
    assert "slick: false" in to_yaml(config)


def test_an_untouched_default_tree_loads_again():
    config = load_config(recipe())
    assert build_config(config.model_dump(mode="json")) == config


def test_changing_the_type_of_environment_changes_its_defaults():
    assert load_config(recipe()).environment.max_actions == 10
    assert load_config(recipe(), ["environment.type=test_ice"]).environment.max_actions == 20


def test_a_config_never_changes():
    config = load_config(recipe())
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.steps = 3


def test_actions_are_limited_by_the_environment_and_by_the_agent():
    assert build_config(DOORS, ["agent.max_turns=2", "agent.actions_per_turn=3"]).max_actions == 6
    assert build_config(DOORS, ["agent.max_turns=9", "agent.actions_per_turn=3"]).max_actions == 10


def test_only_an_agent_function_runs_without_environment():
    assert build_config({}, needs_environment=False).environment is None
    with pytest.raises(ConfigError, match=r"environment\.type: missing"):
        build_config({})


def test_every_file_is_looked_for_beside_the_recipe_first():
    folder = Path("of_the_recipe")
    folder.mkdir()
    for place in (Path(), folder):
        (place / "both.jsonl").touch()

    Path("here.jsonl").touch()
    keys = "train: [both.jsonl, here.jsonl, hub/set:train]\n  eval: both.jsonl\n"
    path = recipe(
        f"algorithm: {{name: dpo}}\ntasks:\n  {keys}data:\n  {keys}  pairs: both.jsonl\n",
        str(folder / "r.yaml"),
    )
    config = load_config(path)
    both = str((folder / "both.jsonl").resolve())
    here = str(Path("here.jsonl").resolve())
    for section in (config.tasks, config.data):
        assert section.train == (both, here, "hub/set:train")
        assert section.eval == (both,)

    assert config.data.pairs == Path(both)
    assert load_config(path, ["data.train=both.jsonl"]).data.train == (both,)


def test_a_store_by_its_url_alone():
    one = load_config(recipe("environment: {type: test_doors}\nstore: sqlite:///a.sqlite\n"))
    assert (
        one
        == load_config(recipe(), ["store=sqlite:///a.sqlite"])
        == load_config(recipe(), ["store.url=sqlite:///a.sqlite"])
    )
    assert one.store_url == f"sqlite:///{Path().absolute()}/a.sqlite"


def test_a_run_folder_may_be_moved():
    config = load_config(recipe(), ["run.dir=runs/a"])
    Path("moved").mkdir()
    Path("moved/config.yaml").write_text(to_yaml(config))
    again = run_config(Path("moved"), ["trainer.steps=1"])
    assert (again.run_dir, again.trainer.steps) == (Path("moved").absolute(), 1)
    assert again.store_url == f"sqlite:///{Path().absolute()}/moved/store.sqlite"


def test_something_else_is_no_run_folder_and_the_near_ones_are_named():
    Path("runs/coins").mkdir(parents=True)
    Path("runs/coins/config.yaml").touch()
    with pytest.raises(ConfigError, match=r"runs here: runs/coins"):
        run_config(Path("nix"))


@pytest.mark.slow
def test_hyper_parameters_that_nobody_chose_are_not_written():
    config = build_config(
        {
            "environment": {"type": "coins"},
            "algorithm": {"name": "rlpr", "rlpr_beta": None, "clip_low": 0.1},
        }
    )
    written = yaml.safe_load(to_yaml(config))["algorithm"]
    assert "fraction" not in written
    assert (written["clip_low"], written["rlpr_beta"]) == (0.1, None), (
        "turned off, where the preset has it on"
    )
    assert build_config(yaml.safe_load(to_yaml(config))) == config


def test_another_preset_brings_its_own_keys():
    config = build_config(
        {"environment": {"type": "coins"}, "algorithm": {"name": "dapo", "entropy_coef": 0.01}}
    )
    assert config.algorithm.dynamic_sampling == 10
    other = build_config(to_tree(config), ["algorithm.name=starpo_s"]).algorithm
    assert (other.dynamic_sampling, other.keep_groups, other.entropy_coef) == (0, 0.25, 0.01)


@pytest.mark.parametrize(
    ("profile", "overrides", "enabled", "steps"),
    [
        (None, ["profile=true"], True, 1),
        (None, ["profile=true", "profile.steps=3"], True, 3),
        (None, ["profile.steps=3", "profile=true"], True, 3),
        (True, [], True, 1),
        (True, ["profile=false"], False, 1),
        ({"enabled": True, "steps": 2}, ["profile=false"], False, 2),
        ({"steps": 2}, ["profile=true"], True, 2),
        ("${run.overwrite}", ["run.overwrite=false"], False, 1),
    ],
)
def test_profile_may_be_written_short(profile, overrides, enabled, steps):
    config = build_config(DOORS if profile is None else {**DOORS, "profile": profile}, overrides)
    assert (config.profile.enabled, config.profile.steps) == (enabled, steps)


def test_the_store_may_be_written_as_its_url():
    short = {**DOORS, "store": "sqlite:///a"}
    assert build_config(short).store.url == "sqlite:///a"
    assert build_config(short, ["store.url=sqlite:///b"]).store.url == "sqlite:///b"
    assert build_config(
        {**DOORS, "store": {"url": "sqlite:///a"}}, ["store=sqlite:///b"]
    ).store.url == ("sqlite:///b")
    with pytest.raises(ConfigError, match=r"store\.url: the password would be written"):
        build_config({**DOORS, "store": "postgresql://me:hush@host/d"})


def test_profile_is_yes_or_no_or_a_section():
    with pytest.raises(
        ConfigError,
        match=r"override: profile: got 3; it is a section, set its keys, such as profile\.enabled",
    ):
        build_config(DOORS, ["profile=3"])


@pytest.mark.parametrize(
    ("written", "override", "expected"),
    [
        ({"train": ["a"], "eval": ["b"]}, "tasks=c", {"train": "c", "eval": ["b"]}),
        ({"train": ["a"], "eval": ["b"]}, "tasks=[c, d]", {"train": ["c", "d"], "eval": ["b"]}),
        ({"curriculum": {"window": 9}}, "tasks.curriculum=true", {"curriculum": {"window": 9}}),
        ({"curriculum": {"window": 9}}, "tasks.curriculum=false", {"curriculum": None}),
        ({"train": ["a"], "eval": ["b"]}, "tasks=null", None),
    ],
)
def test_a_short_form_over_a_section_sets_its_one_key(written, override, expected):
    tree = {"tasks": written}
    merged = sources.merge(tree, [override], where="r", is_text=lambda key: False)
    assert merged == {"tasks": expected}

    value = yaml.safe_load(override.partition("=")[2])
    key = override.partition("=")[0]
    nested = {"tasks": value} if key == "tasks" else {"tasks": {"curriculum": value}}
    stages = sources.overlay(
        {"stages": {"a": {"config": tree}}}, {"stages": {"a": {"config": nested}}}
    )
    assert stages == {"stages": {"a": {"config": merged}}}


@pytest.mark.parametrize(
    ("written", "window"), [(True, 2), ({}, 2), ({"window": 9}, 9), (False, None), (None, None)]
)
def test_a_curriculum_may_be_written_short(written, window):
    tasks = {"train": "a.jsonl", "eval": "b.jsonl", "curriculum": written}
    read = build_config({"tasks": tasks}).tasks.curriculum
    assert getattr(read, "window", None) == window
