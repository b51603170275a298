"""`agentevo annotate`: what is asked first, and that every answer is kept, through a pipe too."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from agentevo.cli.main import main
from agentevo.runs.folder.annotations import (
    annotate,
    annotation_of,
    attempts_to_label,
    pairs_to_compare,
    read_annotations,
)
from agentevo.store import open_store
from agentevo.types import Message, Trajectory, Turn

HOSTILE = "gold\x1b[2J\x1b]0;owned\x07 {braces} \u202e"


def attempt(name: str, group: str, number: int, success: bool, said: str = "gold") -> Trajectory:
    ids: dict[str, Any] = {"prompt_ids": [1], "completion_ids": [2], "logprobs": [0.0]}
    messages = [Message("user", f"Which of {group}?"), Message("assistant", said)]
    only = Turn(**ids, versions=[0], index=0, finish_reason="stop", messages=messages)
    return Trajectory(
        id=name,
        task_id=group,
        group_id=group,
        attempt=number,
        turns=[only],
        reward=float(success),
        success=success,
    )


ATTEMPTS = [
    *(attempt(f"easy{n}", "easy", n, True) for n in range(4)),
    *(attempt(f"hard{n}", "hard", n, n == 2, HOSTILE if n == 2 else "iron") for n in range(4)),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("# agentevo 1 train\nrun: {name: run}\n")

    async def work() -> None:
        async with await open_store(f"sqlite:///{folder / 'store.sqlite'}") as store:
            await store.write_trajectories(ATTEMPTS, split="train", step=1)

    asyncio.run(work())
    return folder


@pytest.fixture
def say(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Answers through a pipe; what was printed."""

    def answer(lines: str, *options: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert main(["annotate", str(run), "--who", "ann", *options]) == 0
        return capsys.readouterr().out

    return answer


def test_the_most_surprising_attempt_is_asked_about_first_and_none_twice(
    run: Path, say: Any
) -> None:
    out = say("r looks fine\nh\nw\n")  # the pipe ends within the third
    first = out.index("hard2")
    second = out.index("== 2 of 8: hard")
    assert first < second and "2 answers kept" in out
    assert "\x1b" not in out and "\x07" not in out and "\u202e" not in out and "{braces}" in out

    said = read_annotations(run)
    assert said.attempts["hard2"].verdict == "right"
    assert said.attempts["hard2"].note == "looks fine" and said.attempts["hard2"].who == "ann"
    assert [one.verdict for one in said.attempts.values()] == ["right", "wrong"]

    again = say("q\n")
    assert "1 of 6" in again and "hard2" not in again and "0 answers kept" in again


@pytest.mark.slow
def test_an_edited_reply_a_note_and_an_undo(run: Path, say: Any) -> None:
    say("e\nsilver {x}\nand more\n.\nn the coin\nw\nr\nu\nw\nq\n")
    said = read_annotations(run)
    edited, taken_back = list(said.attempts.values())[:2]
    assert edited.attempt == "hard2" and edited.verdict == "wrong"
    assert (edited.reply, edited.note) == ("silver {x}\nand more", "the coin")
    assert taken_back.verdict == "wrong"  # said right, taken back, said again
    assert len(said.attempts) == 2


@pytest.mark.slow
def test_of_two_attempts_the_better_one_is_kept_and_not_asked_about_again(
    run: Path, say: Any
) -> None:
    out = say("1\ns\n", "--pairs")
    assert out.index("number 1") < out.index("number 2")
    (pair,) = read_annotations(run).pairs.values()
    assert {pair.better, pair.worse} == {"hard0", "hard2"} and pair.better == "hard0"
    assert "1 of 1" in say("q\n", "--pairs")
    assert "Answers" not in say("", "--pairs")


def test_the_order_is_by_surprise_and_what_was_said_is_left_out(run: Path) -> None:
    async def work() -> Any:
        async with await open_store(f"sqlite:///{run / 'store.sqlite'}") as store:
            return await store.summaries()

    summaries = asyncio.run(work())
    nothing = read_annotations(run)
    order = attempts_to_label(summaries, nothing)
    assert order[0] == "hard2" and {*order[-4:]} == {f"easy{n}" for n in range(4)}
    assert pairs_to_compare(summaries, nothing)[0] == ("hard0", "hard2")

    annotate(run, annotation_of(ATTEMPTS[6], verdict="right"))
    assert "hard2" not in attempts_to_label(summaries, read_annotations(run))


def test_words_that_mean_nothing_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["annotate", str(run), "--task", "none"]) == 2
    assert "no attempt at it" in capsys.readouterr().err
    assert main(["annotate", str(run / "nowhere")]) == 2
