"""Tasks for the tools that ship, and their demonstrations."""

from __future__ import annotations

import json

import pytest

from agentevo.agents.tool_servers.lessons import LESSONS
from agentevo.agents.tool_servers.lessons.lesson import (
    GIVES_UP,
    LessonCall,
    demonstrations,
    lesson_tasks,
    task_of_row,
)
from agentevo.agents.tool_servers.lessons.writing import write_lesson
from agentevo.cli.main import main
from agentevo.config.tasks import TaskFields
from agentevo.config.tools import PACKAGED
from agentevo.errors import AgentEvoError
from agentevo.rollout.given_tasks import task_of


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_tool_has_a_lesson():
    assert sorted(LESSONS) == sorted({*PACKAGED} - {"fetch", "web_search"}), "but the web"


@pytest.mark.slow
@pytest.mark.parametrize("tool", sorted(LESSONS))
def test_a_lesson_is_solved_and_what_is_held_out_is_nowhere_else(tool, tmp_path):
    write_lesson(tool, tmp_path, count=150, held_out=30, shown=60, seed=3)
    train = read(tmp_path / "train.jsonl")
    held_out = read(tmp_path / "eval.jsonl")
    shown = read(tmp_path / "demonstrations.jsonl")
    assert (len(train), len(held_out), len(shown)) == (150, 30, 60)

    queries = {row["query"] for row in held_out}
    asked = {row["messages"][1]["content"] for row in shown} | {row["query"] for row in train}
    assert not queries & asked
    assert len({json.dumps(row) for row in train}) == 150

    calls = [one for row in shown for one in row["messages"] if one["role"] == "assistant"]
    assert all(call.get("tool_calls") or call["content"] for call in calls)
    assert all(row["messages"][-1]["content"] != GIVES_UP for row in shown)
    assert any(len(row["messages"]) > 5 for row in shown) or tool == "calculator"
    assert read(tmp_path / "train.jsonl") == train == lesson_tasks(LESSONS[tool], 150, 3)


@pytest.mark.parametrize("tool", sorted(LESSONS))
def test_a_file_of_tasks_keeps_what_the_tool_needs(tool):
    """A key that says the answer of a task in files is no metadata there."""
    for row in lesson_tasks(LESSONS[tool], 5, 0):
        read_task = task_of(row, TaskFields(), "agentevo")
        made = task_of_row(row)
        assert read_task.metadata == made.metadata
        assert (read_task.query, read_task.answer) == (made.query, made.answer)


def test_answers_are_right():
    for task in lesson_tasks(LESSONS["calculator"], 20, 0):
        assert task["answer"] == str(eval(task["expression"]))


@pytest.mark.slow
def test_a_teacher_may_give_up():
    lesson = LESSONS["calculator"]
    rows = list(demonstrations(lesson, lesson_tasks(lesson, 100, 0), seed=0, quits=0.5))
    given_up = sum(row["messages"][-1]["content"] == GIVES_UP for row in rows)
    assert 30 < given_up < 70


def test_a_solver_that_does_not_solve_is_told(monkeypatch):
    lesson = LESSONS["database"]
    wrong = LessonCall("execute", {"sql": "DELETE FROM goods"})
    steps = lambda task, results: wrong if not results else "Done."  # noqa: E731
    monkeypatch.setattr(lesson, "step", steps, raising=False)
    with pytest.raises(AgentEvoError, match="does not solve database-train-0-0"):
        list(demonstrations(lesson, lesson_tasks(lesson, 1, 0), seed=0))


def test_there_are_only_so_many(monkeypatch):
    row = {"query": "What?", "answer": "that"}
    monkeypatch.setattr(LESSONS["calculator"], "draw", lambda draw: row, raising=False)
    with pytest.raises(AgentEvoError, match="use fewer"):
        lesson_tasks(LESSONS["calculator"], 2, 0)


@pytest.mark.slow
def test_the_command_writes_it(tmp_path, capsys):
    words = ["data", "prepare", "lesson/search", str(tmp_path / "facts"), "--count", "20"]
    assert main([*words, "--demonstrations", "4"]) == 0

    names = ["corpus.jsonl", "demonstrations.jsonl", "eval.jsonl", "train.jsonl"]
    assert sorted(one.name for one in (tmp_path / "facts").iterdir()) == names
    assert main(["data", "prepare", "lesson/nothing", str(tmp_path / "x")]) == 2
    assert "there are booking, calculator" in capsys.readouterr().err

    (tmp_path / "file").touch()
    assert main(["data", "prepare", "lesson/search", str(tmp_path / "file" / "x")]) == 2
    assert "is a file: give another FOLDER" in capsys.readouterr().err
    assert main(["data", "prepare", "lesson/calculator", str(tmp_path), "--count", "9999"]) == 1
    assert main([*words, "--agent", "x"]) == 2
