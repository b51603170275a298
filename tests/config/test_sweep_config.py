"""The `sweep` of a recipe: what its members are configured by, and that nothing wrong in any of
them gets past reading."""

from pathlib import Path

import pytest

from agentevo.algorithms.presets import PRESETS
from agentevo.config import load_config
from agentevo.config.sources import find_recipe
from agentevo.config.sweep import load_sweep, recipe_keys
from agentevo.errors import ConfigError

BASE = """
environment: {type: test_doors, num_doors: 4}
model: {name: tiny}
trainer: {steps: 7, groups_per_step: 2}
"""
SWEEP = """
sweep:
  seeds: [3, 5]
  variants:
    plain: {}
    long: {trainer.steps: 9, algorithm.name: rloo}
    other: {environment: {type: test_ice, size: 6}, trainer: {minibatches: 2}}
"""


def sweep_of(text: str, *overrides: str):
    Path("r.yaml").write_text(text)
    return load_sweep("r.yaml", overrides)


def refusal(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        sweep_of(text, *overrides)
    return str(caught.value).splitlines()


def test_every_variant_runs_with_every_seed_in_a_folder_of_its_own():
    sweep = sweep_of(BASE + SWEEP)
    assert [member.name for member in sweep.members] == [
        "plain-3",
        "long-3",
        "other-3",
        "plain-5",
        "long-5",
        "other-5",
    ]
    assert [member.config.run.seed for member in sweep.members] == [3, 3, 3, 5, 5, 5]
    assert [member.config.run_dir for member in sweep.members] == [
        Path("runs/r").absolute() / member.name for member in sweep.members
    ]
    assert {member.config.run.name for member in sweep.members} == {"plain", "long", "other"}
    assert {member.config.run.threads for member in sweep.members} == {1}


@pytest.mark.slow
def test_a_variant_changes_the_recipe_and_the_command_line_changes_both():
    plain, long, other = (
        member.config for member in sweep_of(BASE + SWEEP, "sweep.seeds=[0]").members
    )
    assert (plain.trainer.steps, long.trainer.steps, other.trainer.steps) == (7, 9, 7)
    assert (plain.algorithm.name, long.algorithm.name) == ("grpo", "rloo")
    assert (
        plain.trainer.minibatches,
        other.trainer.minibatches,
        other.trainer.groups_per_step,
    ) == (1, 2, 2)
    assert {
        member.config.trainer.steps for member in sweep_of(BASE + SWEEP, "trainer.steps=1").members
    } == {1}


@pytest.mark.slow
def test_an_environment_of_another_type_leaves_the_options_of_the_first_behind():
    plain, _, other = (
        member.config for member in sweep_of(BASE + SWEEP, "sweep.seeds=[0]").members
    )
    assert plain.environment.num_doors == 4
    assert (other.environment.type, other.environment.size) == ("test_ice", 6)

    same = sweep_of(
        BASE
        + "sweep: {seeds: [0], variants: {a: {environment: {slick: false, type: test_ice}}, b: "
        "{environment.num_doors: 5}}}"
    )
    assert (
        same.members[0].config.environment.size,
        same.members[1].config.environment.num_doors,
    ) == (4, 5)


@pytest.mark.slow
def test_any_recipe_becomes_a_sweep_on_the_command_line_and_a_sweep_one_run():
    sweep = sweep_of(BASE, "sweep.seeds=[1,2]", "run.name=many", "run.threads=2")
    assert [member.name for member in sweep.members] == ["many-1", "many-2"]
    assert sweep.dir == Path("runs/many")
    assert {member.config.run.threads for member in sweep.members} == {2}
    assert sweep_of(BASE) is None
    assert sweep_of(BASE + SWEEP, "sweep=null") is None
    assert load_config("r.yaml", ["sweep=null"]).trainer.steps == 7


@pytest.mark.slow
def test_only_some_variants():
    assert {
        member.variant for member in sweep_of(BASE + SWEEP, "sweep.only=[long,other]").members
    } == {"long", "other"}
    assert {member.variant for member in sweep_of(BASE + SWEEP, "sweep.only=long").members} == {
        "long"
    }


@pytest.mark.slow
def test_runs_at_once_are_bounded_by_what_there_is():
    assert sweep_of(BASE + SWEEP, "sweep.parallel=2").parallel == 2
    assert sweep_of(BASE + SWEEP, "sweep.parallel=50").parallel == 6
    assert sweep_of(BASE + SWEEP, "run.threads=1024").parallel == 1


def test_the_dir_of_a_sweep_holds_its_runs():
    sweep = sweep_of(BASE + SWEEP, "run.dir=elsewhere", "run.overwrite=true")
    assert (sweep.dir, sweep.overwrite) == (Path("elsewhere"), True)
    assert sweep.members[0].config.run_dir == Path("elsewhere/plain-3").absolute()
    assert not sweep.members[0].config.run.overwrite


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (
            BASE + SWEEP,
            ["sweep.only=[lng]"],
            "override: sweep.only: no variant is called 'lng': did you mean long? there are "
            "plain, long, other",
        ),
        (BASE + SWEEP, ["sweep.only=[]"], "override: sweep.only: names no variant"),
        (
            BASE + SWEEP,
            ["run.seed=1"],
            "override: run.seed: a sweep runs with every seed of sweep.seeds: write "
            "sweep.seeds=[1]",
        ),
        (BASE + "run: {seed: 4}" + SWEEP, [], "r.yaml: run.seed: a sweep runs with every seed"),
        (
            BASE + SWEEP,
            ["store.url=sqlite:///one.sqlite"],
            "override: store.url: the runs of a sweep can't share a store",
        ),
        (
            BASE + SWEEP,
            ["store=sqlite:///one.sqlite"],
            "override: store.url: the runs of a sweep can't share a store",
        ),
        (
            BASE + SWEEP,
            ["sweep.seeds=[]"],
            "override: sweep.seeds: got []; needs a list of whole numbers",
        ),
        (
            BASE + SWEEP,
            ["sweep.seeds=[1,1]"],
            "override: sweep.seeds: got [1, 1]; a seed is listed twice",
        ),
        (BASE + SWEEP, ["sweep.seeds=[3,-1]"], "override: sweep.seeds[1]: got -1; needs"),
        (
            BASE + SWEEP,
            ["sweep.parallel=0"],
            "override: sweep.parallel: got 0; needs a whole number, at least 1",
        ),
        (
            BASE + SWEEP,
            ["sweep.sedes=[1]"],
            "override: sweep.sedes: unknown key; did you mean sweep.seeds?",
        ),
        (
            BASE + SWEEP,
            ["run.name=a/b"],
            "override: run.name: got 'a/b'; the name becomes a folder",
        ),
        (
            BASE,
            ["sweep.only=x"],
            "override: sweep.only: no variant is called 'x': there are no variants",
        ),
        (
            BASE + "sweep: {variants: {a/b: {}}}",
            [],
            "r.yaml: sweep.variants: got the name 'a/b'; it becomes a folder",
        ),
        (
            BASE + "sweep: {variants: {a: {run.seed: 1}}}",
            [],
            "r.yaml: sweep.variants: a sets run.seed, which the sweep sets",
        ),
        (
            BASE + "sweep: {variants: {a: {run: {dir: x}}}}",
            [],
            "r.yaml: sweep.variants: a sets run.dir, which the sweep sets",
        ),
        (BASE + "sweep: 3", [], "r.yaml: sweep: got 3; it is a section"),
        (
            BASE + SWEEP,
            ["trainer.stps=1"],
            "override: trainer.stps: unknown key; did you mean trainer.steps?",
        ),
        (
            "trainer: {stps: 1}\n" + BASE.replace("trainer", "sampling: {}\n#") + SWEEP,
            [],
            "r.yaml: trainer.stps: unknown key",
        ),
    ],
)
def test_one_line_for_what_is_wrong(text, overrides, expected):
    (line,) = refusal(text, *overrides)
    assert line.startswith(expected)


def test_the_problems_of_all_variants_are_told_at_once_each_with_its_variant():
    lines = refusal(
        BASE + "sweep: {variants: {a: {trainer.stps: 1}, b: {}, c: {trainer.minibatches: 9, "
        "algorithm.name: gpro}}}"
    )
    assert (
        lines[0]
        == "r.yaml: sweep.variants.a: trainer.stps: unknown key; did you mean trainer.steps?"
    )
    assert lines[1].startswith(
        "r.yaml: sweep.variants.c: algorithm.name: got 'gpro'; did you mean grpo?"
    )
    assert len(lines) == 2


@pytest.mark.slow
def test_the_only_variant_is_named_if_it_is_what_is_wrong():
    assert refusal(BASE + "sweep: {variants: {a: {trainer.stps: 1}}}")[0].startswith(
        "r.yaml: sweep.variants.a: trainer.stps"
    )
    assert refusal(BASE + "zzz: 1\nsweep: {variants: {a: {}}}")[0].startswith(
        "r.yaml: zzz: unknown key"
    )


def test_a_sweep_can_not_be_read_as_one_run():
    Path("r.yaml").write_text(BASE + SWEEP)
    with pytest.raises(
        ConfigError, match=r"r\.yaml: sweep: this recipe is several runs.*sweep=null"
    ):
        load_config("r.yaml")


def test_overwrite_does_not_delete_where_one_stands(tmp_path):
    assert (
        "run.overwrite would delete"
        in refusal(BASE + SWEEP, f"run.dir={tmp_path}", "run.overwrite=true")[0]
    )


@pytest.mark.parametrize(
    "key", [key for key in recipe_keys().names() if key.split(".")[0] == "sweep"]
)
def test_every_key_of_a_sweep_is_explained(key):
    (found,) = recipe_keys().explain(key)
    assert len(found.meaning.split()) > 2


@pytest.mark.slow
def test_the_zoo_has_every_preset():
    sweep = load_sweep("zoo")
    assert {member.variant for member in sweep.members} == {*PRESETS}
    assert all(member.config.algorithm.name == member.variant for member in sweep.members)
    assert sweep.section.seeds == (0, 1, 2)
    assert find_recipe("zoo").read_text().startswith("# ")
