"""The words of a sweep: what is listed, explained and refused without a single run."""

from pathlib import Path

import pytest

SWEEP = (
    "sweep: {seeds: [0, 1], variants: {one: {trainer.steps: 3}, two: {algorithm.name: rloo, "
    "trainer.minibatches: 2}}}\n"
)


@pytest.fixture(autouse=True)
def recipe() -> None:
    Path("many.yaml").write_text(Path("small.yaml").read_text() + SWEEP)


def test_a_dry_run_lists_the_members_and_creates_nothing(agentevo):
    code, out, err = agentevo("train", "many.yaml", "--dry-run", "sweep.parallel=2")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "runs/many: 4 runs, 2 at once",
        "one-0  trainer.steps=3",
        "two-0  algorithm.name=rloo, trainer.minibatches=2",
        "one-1  trainer.steps=3",
        "two-1  algorithm.name=rloo, trainer.minibatches=2",
    ]
    assert sorted(path.name for path in Path().iterdir()) == ["many.yaml", "small.yaml"]


@pytest.mark.slow
def test_sweeps_are_explained_and_listed(agentevo):
    assert "\n  sweep.seeds\n      Each variant runs once" in agentevo("config", "sweep").out
    assert "\nsweep " in agentevo("config").out
    zoo = next(
        line for line in agentevo("list", "recipes").out.splitlines() if line.startswith("zoo ")
    )
    assert zoo.endswith("runs)")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "many.yaml", "trainer.steps=x"], "override: trainer.steps: got 'x'"),
        (["train", "many.yaml", "sweep.only=tow"], "did you mean two?"),
        (
            ["train", "many.yaml", "--resume", "run.overwrite=true"],
            "--resume continues the sweep",
        ),
        (["train", "many.yaml", "--resume"], "there is no sweep to resume"),
        (["eval", "many.yaml"], "add sweep=null to run the recipe without its variants"),
        (["doctor", "many.yaml"], "add sweep=null"),
        (["config", "many.yaml"], "add sweep=null"),
        (["config", "sweep.seed"], "did you mean sweep.seeds?"),
        (["report", "runs/nix", "--table"], "runs/nix: is not the folder of a run"),
        (
            ["report", "runs/nix", "--page", "nowhere/README.md"],
            "nowhere/README.md: its folder does not exist",
        ),
    ],
)
def test_refusals(agentevo, words, expected):
    code, out, err = agentevo(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err
    assert sorted(path.name for path in Path().iterdir()) == ["many.yaml", "small.yaml"]
