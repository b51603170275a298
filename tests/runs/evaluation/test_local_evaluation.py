"""A recipe's model, a run's checkpoints and a model's folder side by side, at an environment's
tasks and at those of a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from served_model import served

from agentevo.cli.main import main
from agentevo.runs.evaluation.results import ResultsFolder
from agentevo.runs.folder.run_folder import run_config

RECIPE = (
    "environment: {type: coins}\n"
    "model: {name: tiny, tiny: {hidden_size: 32, num_layers: 1, num_heads: 2}}\n"
    "sampling: {max_new_tokens: 4}\n"
    "trainer: {steps: 2, group_size: 2, groups_per_step: 2}\n"
    "evaluation: {tasks: 3, samples: 0}\ncold_start: {episodes: 0}\ncheckpoint: {every: 1}\n"
    "tracking: {report: false, tensorboard: false}\n"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "small.yaml").write_text(RECIPE)
    assert main(["train", str(folder / "small.yaml"), f"run.dir={folder / 'run'}"]) == 0
    return folder / "run"


@pytest.mark.slow
def test_checkpoints_side_by_side_at_an_environment(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    last = str(run / "checkpoints/step-000002")
    words = ["eval", "run@1", "--against", "run@2", "--against", last, "--against", "small.yaml"]
    assert main([*words, "-k", "3", "--out", str(tmp_path / "out")]) == 0

    printed = capsys.readouterr().out
    assert "random player" in printed and "optimal player" in printed
    assert "run@2 minus run@1, on the same tasks" in printed

    lines = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert len(lines) == 4 * 3 * 3

    by_model = {
        name: [
            {key: line[key] for key in ("task", "attempt", "reward", "answer", "tokens")}
            for line in sorted(lines, key=lambda line: (line["task"], line["attempt"]))
            if line["model"] == name
        ]
        for name in ("run@1", "run@2", last)
    }
    assert by_model["run@2"] == by_model[last], "the same weights play the same, to the token"
    assert main([*words, "-k", "3", "--out", str(tmp_path / "out"), "--resume"]) == 0
    assert "0 of 3" not in capsys.readouterr().err, "nothing was left to play"

    other = [*words, "-k", "3", "--out", str(tmp_path / "out"), "--resume"]
    assert main([*other, "environment.num_coins=4"]) == 2
    assert "started with environment = " in capsys.readouterr().err
    assert main(["eval", "run@7", "-k", "2"]) == 2
    assert "its steps are 1, 2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_alone_plays_a_file_and_a_group_is_scored_together(run, tmp_path, capsys):
    rows = [{"id": f"t{n}", "query": f"coin {n}", "answer": "left"} for n in range(2)]
    tasks = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for path, row in zip(tasks, rows, strict=True):
        path.write_text(json.dumps(row) + "\n")

    words = ["eval", str(run / "checkpoints/step-000002"), "--max-new-tokens", "3", "--json"]
    words += ["--tasks", str(tasks[0]), "--tasks", str(tasks[1]), "rewards=[exact_match]"]
    assert main(words) == 0

    summary = json.loads(capsys.readouterr().out)
    (model,) = summary["models"]
    assert (summary["temperature"], summary["attempts"], summary["num_tasks"]) == (0.0, 1, 2)
    assert set(model["by_source"]) == {"first", "second"}
    assert 0 < model["tokens"] <= 3


@pytest.mark.slow
def test_a_served_checkpoint_plays_as_it_does_here(run, tmp_path):
    """The same weights in the policy's place, once with their tokens and once behind an API."""
    out = tmp_path / "out"

    def evaluated(base: str, key: str) -> subprocess.CompletedProcess[str]:
        model = f"{{base_url: '{base}', model: mine, api_key: '${{env:SERVED_KEY}}'}}"
        words = ["eval", str(run), f"remote_models.served={model}", "--against", "served"]
        return subprocess.run(
            [sys.executable, "-m", "agentevo", *words, "--limit", "2", "--out", str(out)],
            env=os.environ | {"SERVED_KEY": key},
            capture_output=True,
            text=True,
            timeout=300,
        )

    done = served(run_config(run), evaluated, name="mine")
    assert done.returncode == 0, done.stderr

    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    plays = {
        name: [
            [line[key] for key in ("task", "reward", "parts", "answer", "tokens", "turns")]
            for line in sorted(lines, key=lambda line: line["task"])
            if line["model"] == name
        ]
        for name in (str(run), "served")
    }
    assert len(plays["served"]) == 2
    assert plays["served"] == plays[str(run)]

    (difference,) = json.loads((out / "summary.json").read_text())["differences"]
    assert difference["reward"]["value"] == 0.0


@pytest.mark.slow
def test_what_a_policy_has_solved_in_an_evaluation_becomes_rows_in_its_own_words(
    run, tmp_path, monkeypatch
):
    """Each turn as it was drawn; what the token limit cut off is read and not learnt, and every
    attempt that is no row is in the account."""
    monkeypatch.chdir(run.parent)
    out = tmp_path / "out"
    rows = tmp_path / "rows.jsonl"
    assert main(["eval", "run@2", "-k", "8", "--out", str(out)]) == 0

    played = ResultsFolder(out).trajectories()
    best = max(one.reward for one in played.values())
    chosen = [one for one in played.values() if one.reward >= best]
    export = ["trajectories", "export", str(out), str(rows), "--sft", "--min-reward", str(best)]
    assert main([*export, "--per-task", "9"]) == 0

    found = [json.loads(line) for line in rows.open()]
    left_out = Path(f"{rows}.bad_rows.jsonl").read_text().splitlines()
    assert found and len(found) + len(left_out) == len(played)

    drawn = {(one.task_id, *(turn.messages[-1].text for turn in one.turns)): one for one in chosen}
    for row in found:
        answers = [one for one in row["messages"] if one["role"] == "assistant"]
        attempt = drawn[(row["task_id"], *(answer["content"] for answer in answers))]
        learnt = [answer.get("weight", 1) == 1 for answer in answers]
        ended = [turn.finish_reason == "stop" for turn in attempt.turns]
        assert any(learnt)
        assert not [place for place, one in enumerate(learnt) if one and not ended[place]]
