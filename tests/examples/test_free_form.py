"""Walks, their demonstrations and comparisons, and one arm of each script at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentevo.rewards.answer_texts import find_answer

FOLDER = Path(__file__).parents[2] / "examples" / "free_form"
sys.path.insert(0, str(FOLDER))

import rlhf  # noqa: E402
from walks import demonstrations, tasks, walks  # noqa: E402

sys.path.remove(str(FOLDER))


def test_no_walk_is_both_trained_on_and_held_out():
    trained, held_out = (
        {walk.query for walk in walks(held_out=part, seed=3)} for part in (False, True)
    )
    assert len(trained) == 576 and len(held_out) == 192 and not trained & held_out
    assert held_out == {walk.query for walk in walks(held_out=True, seed=4)}


def test_demonstrations_are_right_in_one_of_the_wordings():
    chosen = list(walks(held_out=False, seed=0))[:40]
    replies = [row["messages"][-1]["content"] for row in demonstrations(chosen, 0)]
    stated = [find_answer(reply, "answer") for reply in replies]
    for walk, answer, every, task in zip(
        chosen,
        stated,
        tasks(chosen, wordings=None, seed=0),
        tasks(chosen, wordings=1, seed=0),
        strict=True,
    ):
        assert answer in every["answer"] == walk.answers()
        assert task["answer"] in every["answer"]

    assert len({answer.split()[0] for answer in stated}) > 2, "wordings differ"


def test_comparisons_are_of_wordings_alone():
    chosen = list(walks(held_out=False, seed=0))[:40]
    for walk, row in zip(
        [walk for walk in chosen for _ in range(rlhf.COMPARED)],
        rlhf.comparisons(chosen, 0),
        strict=True,
    ):
        better, worse = (find_answer(row[key], "answer") for key in ("chosen", "rejected"))
        assert {better, worse} <= set(walk.answers()) and better != worse
        assert [better] == [one["answer"] for one in rlhf.preferred([walk])]
        assert row["chosen"].split("<answer>")[0] == row["rejected"].split("<answer>")[0]


@pytest.mark.examples
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "only", "lines"),
    [
        ("rlpr", ["--only", "rlpr"], ["SFT", "SFT, rlpr"]),
        (
            "rlhf",
            [],
            [
                "SFT",
                "SFT and PPO against the reward model",
                "the reward model, of held-out comparisons",
            ],
        ),
    ],
)
def test_a_comparison_runs_by_one_command(script, only, lines, tmp_path):
    sizes = "--demonstrations 8 --epochs 1 --steps 1 --groups 2 --held-out 4 --questions 8"
    words = [*sizes.split(), "--hidden-size", "32", "--num-layers", "1", "--seeds", "0", *only]
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{script}.py"), *words, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr

    rows = [row.split("|")[1].strip() for row in done.stdout.splitlines() if row[:1] == "|"]
    assert sorted(rows[2:]) == sorted(lines)

    (result,) = tmp_path.glob("*/result.json")
    assert json.loads(result.read_text())["seed"] == 0
