"""Recipes lie beside their README in `recipes/`, and whoever installs the package gets them too."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from slow import soak

import agentevo
from agentevo.cli.main import main
from agentevo.config.sources import packaged_recipes
from agentevo_evolve.pipeline import packaged_pipelines

ROOT = Path(__file__).parents[2]


def test_every_recipe_lies_beside_a_readme_that_names_its_command():
    recipes = packaged_recipes()
    assert {"coins", "frozen_lake", "frozen_lake_sft", "sokoban", "zoo"} <= set(recipes)
    for name, path in recipes.items():
        readme = (path.parent / "README.md").read_text(encoding="utf-8")
        assert path.is_relative_to(ROOT / "recipes")
        assert f"agentevo train {name}" in readme or f"agentevo sft {name}" in readme, name


def test_every_pipeline_lies_beside_a_readme_that_names_its_command():
    pipelines = packaged_pipelines()
    assert {"r1_zero", "r1", "ragen", "spin", "sppo", "rlhf"} <= set(pipelines)
    for name, path in pipelines.items():
        readme = (path.parent / "README.md").read_text(encoding="utf-8")
        assert f"agentevo pipeline {name}" in readme, name


def test_no_two_recipes_share_a_name():
    files = list((ROOT / "recipes").glob("*/*.yaml"))
    assert len(files) == len({*packaged_recipes(), *packaged_pipelines()})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["search_r1", *soak("deep_research")])
def test_a_recipe_of_search_plays_prepared_questions(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"question": f"Who is in {n}?", "answer": "yes", "context": [[f"Town {n}", ["A town."]]]}
        for n in range(8)
    ]
    Path("hotpot.json").write_text(json.dumps(rows), encoding="utf-8")
    words = ["data", "prepare", "hotpotqa", "hotpot", "--from", "hotpot.json"]
    assert main([*words, "--eval-share", "0.25"]) == 0

    agent = {"max_turns": 2}
    if name == "deep_research":
        corpus = {"corpus": "hotpot/corpus.jsonl"}
        agent |= {"tools": [{"name": "search", "options": corpus}], "context": {"max_tokens": 4000}}
    run = agentevo.train(
        name,
        model={
            "name": "tiny",
            "dtype": "float32",
            "tiny": {"tokenizer": "byte", "hidden_size": 32, "context_length": 8192},
        },
        tasks={"train": "hotpot/train.jsonl", "eval": "hotpot/eval.jsonl"},
        agent=agent,
        sampling={"max_new_tokens": 8},
        trainer={"steps": 1, "groups_per_step": 2, "group_size": 2},
        evaluation={"tasks": 1, "samples": 0},
        run={"dir": str(tmp_path / "run")},
    )
    assert {trajectory.status for trajectory in run.trajectories()} == {"completed"}


@pytest.mark.slow
@pytest.mark.cold_start
def test_the_wheel_carries_every_recipe_inside_the_package(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)

    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")

    finder = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from agentevo.config.sources import packaged_recipes\n"
        "print(*[path for path in packaged_recipes().values()], sep='\\n')"
    )
    listed = subprocess.run(
        [sys.executable, "-c", finder, str(tmp_path / "installed")],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout.split()
    assert [Path(line).stem for line in listed] == list(packaged_recipes())
    assert all(Path(line).is_relative_to(tmp_path / "installed") for line in listed)
