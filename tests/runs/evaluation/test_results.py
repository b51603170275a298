"""The folder of results: what a killed process leaves is gone on from, what is damaged is told."""

from __future__ import annotations

import json

import msgspec
import pytest

from agentevo.errors import ConfigError
from agentevo.runs.evaluation.results import AttemptLine, ResultsFolder, storable, task_digest
from agentevo.types import Message, Task, Trajectory, Turn

TASKS = [Task(id="a", query="1?"), Task(id="b", query="2?")]


def settings(**changed):
    return {"tasks_digest": task_digest(TASKS), "attempts": 2, **changed}


def made(tmp_path) -> ResultsFolder:
    folder = ResultsFolder(tmp_path / "out")
    folder.path.mkdir()
    folder.begin(settings(), TASKS)
    return folder


def attempts_of(task: str, reward: float = 1.0):
    numbers = range(2)
    lines = [
        AttemptLine(model="m", task=task, attempt=n, status="completed", reward=reward)
        for n in numbers
    ]
    return lines, [
        Trajectory(id=f"{task}#{n}", task_id=task, group_id=task, attempt=n) for n in numbers
    ]


def test_lines_come_back_and_the_later_one_counts(tmp_path):
    folder = made(tmp_path)
    folder.add(*attempts_of("a", 0.0))
    folder.add(*attempts_of("a", 1.0))
    assert [attempt.reward for attempt in folder.attempts().values()] == [1.0, 1.0]
    assert list(folder.trajectories()) == [("m", "a", 0), ("m", "a", 1)]
    assert folder.tasks() == TASKS


def test_half_a_line_is_none_and_spoils_no_other(tmp_path):
    folder = made(tmp_path)
    folder.add(*attempts_of("a"))
    log = folder.path / "results.jsonl"
    log.write_bytes(log.read_bytes()[:-10])
    assert list(folder.attempts()) == [], "the task is played again"
    folder.add(*attempts_of("b"))
    assert list(folder.attempts()) == [("m", "b", 0), ("m", "b", 1)]


@pytest.mark.parametrize("log", ["results.jsonl", "trajectories.jsonl"])
def test_a_task_that_was_played_again_until_a_kill_counts_as_before(tmp_path, log):
    """--retry-failed: neither half of the new play is mixed with the old one, nor are its
    trajectories judged by `score`."""
    folder = made(tmp_path)
    folder.add(*attempts_of("a", 0.0))
    sizes = {name: (folder.path / name).stat().st_size for name in (log, "results.jsonl")}
    before = folder.attempts(), folder.trajectories()
    lines, trajectories = attempts_of("a", 1.0)
    again = [msgspec.structs.replace(trajectory, reward=1.0) for trajectory in trajectories]
    folder.add(lines, again)
    whole = {name: (folder.path / name).read_bytes() for name in sizes}

    assert [attempt.reward for attempt in folder.attempts().values()] == [1.0, 1.0]
    assert [trajectory.reward for trajectory in folder.trajectories().values()] == [1.0, 1.0]
    for left in (1, 40, len(whole[log]) - sizes[log] - 2):  # bytes of the write that are there
        for name, content in whole.items():  # results come after trajectories
            told = content[: sizes[name] + (left if name == log else 0)]
            (folder.path / name).write_bytes(told)
        assert (folder.attempts(), folder.trajectories()) == before

    folder.add(lines, again)
    assert [trajectory.reward for trajectory in folder.trajectories().values()] == [1.0, 1.0]
    assert [attempt.reward for attempt in folder.attempts().values()] == [1.0, 1.0]


def test_another_evaluation_is_not_gone_on_with(tmp_path):
    folder = made(tmp_path)
    folder.check_and_resume(settings(), TASKS)
    with pytest.raises(
        ConfigError, match=r"started with attempts = 2, .* command has attempts = 4"
    ):
        folder.check_and_resume(settings(attempts=4), TASKS)
    with pytest.raises(ConfigError, match="has an evaluation already"):
        folder.check_new()

    (folder.path / "tasks.jsonl").write_text(json.dumps({"id": "c"}) + "\n")
    with pytest.raises(ConfigError, match="was changed"):
        folder.tasks()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        ResultsFolder(tmp_path).check_new()
    with pytest.raises(ConfigError, match="not the folder of an evaluation"):
        ResultsFolder(tmp_path).settings()
    with pytest.raises(ConfigError, match="there is no such folder: give"):
        ResultsFolder(tmp_path / "nothing").settings()


@pytest.mark.parametrize(
    "content", [b"{", b"[" * 100_000, b'{"x": ' + b"[" * 100_000, b'{"id": "\xff"}', b"[]"]
)
def test_damaged_settings_are_refused_and_damaged_attempts_are_played_again(tmp_path, content):
    folder = ResultsFolder(tmp_path)
    folder.begin(settings(), TASKS)
    (tmp_path / "trajectories.jsonl").write_bytes(content + b"\n")
    assert folder.trajectories() == {}
    (tmp_path / "eval.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"eval\.json (can't be read|is damaged)"):
        folder.settings()


def test_a_process_that_is_killed_as_it_begins_leaves_what_can_be_gone_on_with(
    tmp_path, monkeypatch
):
    class Killed(BaseException):
        pass

    def killed(*args):
        raise Killed

    folder = ResultsFolder(tmp_path)
    (tmp_path / ".eval.json.tmp").write_text("{")
    folder.check_new()
    monkeypatch.setattr(ResultsFolder, "_write_tasks", killed)

    with pytest.raises(Killed):
        folder.begin(settings(), TASKS)

    monkeypatch.undo()
    folder.check_and_resume(settings(), TASKS)
    assert folder.tasks() == TASKS


def test_a_file_is_no_folder_of_results(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is not a readable folder"):
        ResultsFolder(tmp_path / "file").check_new()


def test_models_stay_in_their_order(tmp_path):
    folder = ResultsFolder(tmp_path)
    folder.begin(settings(played_models={"z": "1", "a": "2"}), TASKS)
    assert list(folder.settings()["played_models"]) == ["z", "a"], "the first is compared with"


def test_two_processes_do_not_share_a_folder(tmp_path):
    folder = made(tmp_path)
    with (
        folder.lock(),
        pytest.raises(ConfigError, match="another process"),
        ResultsFolder(folder.path).lock(),
    ):
        pass


def test_what_json_can_not_hold_fails_its_attempt_alone():
    said = Message("assistant", "\ud800")
    turn = Turn(
        index=0,
        prompt_ids=[1],
        completion_ids=[2],
        logprobs=[0.0],
        versions=[0],
        finish_reason="stop",
        messages=[said],
    )
    broken = storable(Trajectory(id="x", task_id="x", group_id="x", turns=[turn], reward=1.0))
    assert (broken.status, broken.reward, broken.turns) == ("failed", 0.0, [])
    assert "can't be stored" in broken.error
