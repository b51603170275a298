"""The commands in the order in which a newcomer uses them, on the smallest possible run."""

import json
from pathlib import Path

import pytest

from agentevo.cli.main import main

SMALL = [
    "trainer.steps=1",
    "trainer.group_size=2",
    "trainer.groups_per_step=2",
    "evaluation.tasks=2",
    "sampling.max_new_tokens=4",
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run of one step, made by the command."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = folder / "small.yaml"
    recipe.write_text(
        "environment: {type: coins}\nmodel: {name: tiny, tiny: {hidden_size: 32, num_layers: 1, "
        "num_heads: 2}}\n"
    )
    assert main(["train", str(recipe), *SMALL, f"run.dir={folder / 'run'}"]) == 0
    return folder / "run"


@pytest.mark.slow
def test_train_leaves_the_files_of_a_run(run_dir):
    assert {
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "report.html",
        "plots",
        "checkpoints",
        "store.sqlite",
    } <= {path.name for path in run_dir.iterdir()}

    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 1
    assert summary["eval"]["n"] == 2


def test_a_second_run_in_the_same_folder_is_refused(agentevo, run_dir):
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    code, _, err = agentevo("train", "small.yaml", f"run.dir={run_dir}")
    assert code == 2
    assert err.startswith(f"error: {run_dir}")
    assert err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_resume_without_a_run_is_refused(agentevo):
    code, _, err = agentevo("train", "small.yaml", "--resume")
    assert (code, err.count("\n")) == (2, 1)
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--checkpoint", "last"], ["evaluation.samples=0"]])
def test_eval_of_a_run(agentevo, run_dir, words):
    code, out, err = agentevo("eval", str(run_dir), *words)
    assert (code, err) == (0, "")
    assert "greedy" in out
    assert "random player" in out
    assert ("agent, sampled" in out) == (words != ["evaluation.samples=0"])


@pytest.mark.slow
def test_eval_of_a_recipe_with_and_without_a_checkpoint(agentevo, run_dir):
    assert agentevo("eval", "small.yaml", *SMALL).code == 0
    (checkpoint,) = run_dir.glob("checkpoints/step-*")
    assert agentevo("eval", "small.yaml", *SMALL, "--checkpoint", str(checkpoint)).code == 0
    assert [path.name for path in Path().iterdir()] == ["small.yaml"], (
        "an evaluation writes nothing"
    )


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (
            ["small.yaml", "--checkpoint", "best"],
            2,
            "--checkpoint best names a checkpoint of a run",
        ),
        (["small.yaml", "--checkpoint", "nowhere"], 2, "nowhere"),
    ],
)
def test_eval_refuses_a_checkpoint_that_is_none(agentevo, words, code, expected):
    result = agentevo("eval", *words)
    assert result.code == code
    assert expected in result.err


@pytest.mark.slow
def test_reading_a_run(agentevo, run_dir):
    assert agentevo("report", str(run_dir)).out == f"{run_dir}/report.html\n"
    shown = agentevo("trajectories", "show", str(run_dir), "--best")
    assert shown.code == 0
    assert "policy:" in shown.out
    assert agentevo("trajectories", "export", str(run_dir), "out.jsonl").code == 0
    assert len(Path("out.jsonl").read_text().splitlines()) >= 4


@pytest.mark.slow
def test_doctor_of_a_run_and_of_the_installation(agentevo, run_dir):
    code, out, _ = agentevo("doctor", str(run_dir))
    assert code in (0, 1)
    assert "good     token ids:" in out
    assert "good     log-probs:" in out
    assert "good     torch:" in agentevo("doctor").out


def test_the_python_door_reads_the_same_run(run_dir):
    import agentevo

    run = agentevo.load_run(run_dir)
    assert run.summary["steps"] == 1
    assert (run.checkpoint / "config.json").is_file()
    assert len(run.trajectories(split="train")) == 4
