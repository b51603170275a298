from __future__ import annotations

import io
import math
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agentevo.observability.trajectory_view import (
    LEVELS,
    outcome,
    probability_level,
    render_trajectory,
)
from agentevo.types import (
    ImagePart,
    Message,
    RemoteTurn,
    Task,
    TextPart,
    ToolCall,
    Trajectory,
    Turn,
)

Decode = Callable[[int], str]


def trajectory(**changes: object) -> Trajectory:
    first = Turn(
        index=0,
        prompt_ids=[1] * 50,
        completion_ids=[0, 2, 10, 9],
        logprobs=[-0.0123, -1.2, -3.5, -0.7],
        versions=[3, 3, 4, 4],
        finish_reason="stop",
        messages=[
            Message("system", "Play [bold]well[/bold]."),
            Message("user", "P__\n__G\x1b[2J"),
            Message("assistant", "said by the policy"),
        ],
    )
    second = Turn(
        index=1,
        parent=0,
        prompt_ids=[1, 2],
        completion_ids=[7],
        logprobs=[-0.5],
        versions=[4],
        finish_reason="length",
        reward=0.9,
    )
    fields: dict[str, object] = {
        "id": "t1",
        "task_id": "lake/12",
        "group_id": "g1",
        "turns": [first, second],
        "reward": 0.9,
        "success": True,
        "duration_s": 1.5,
        "metrics": {"num_actions": 2.0},
    }
    return Trajectory(**(fields | changes))  # type: ignore[arg-type]


def shown(view: Trajectory, decode: Decode, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render_trajectory(view, decode))
    return out.getvalue()


def test_every_turn_shows_what_was_asked_said_and_paid(decode: Decode) -> None:
    text = shown(trajectory(), decode)
    for part in (
        "trajectory t1",
        "success, reward 0.9, 2 turns, 5 sampled tokens (log-prob -5.91), 1.50 s",
        "num_actions 2",
        "turn 0: 50 new prompt tokens",
        "system: Play [bold]well[/bold].",
        "reward 0, 4 tokens, finished by stop, versions 3 to 4",
        "turn 1: 2 new prompt tokens",
        "prompt: the goal",  # no messages: the ids, decoded
        "reward 0.9, 1 tokens, finished by length, version 4",
    ):
        assert part in text, part

    assert "said by the policy" not in text  # the completion is shown from its ids


def test_what_remote_models_said_is_shown_too(decode: Decode) -> None:
    asked = Message("user", "Is it \x1b[2J right?")
    first = RemoteTurn(
        index=0,
        model="judge",
        messages=[asked, Message("assistant", "Yes.", reasoning="Hm.")],
        prompt_tokens=24,
        cached_tokens=12,
        completion_tokens=10,
        cost=0.002,
    )
    second = RemoteTurn(index=1, parent=0, model="judge", agent="solver", messages=[asked])
    text = shown(msgspec.structs.replace(trajectory(), remote_turns=[first, second]), decode)
    for part in (
        "remote turn 0: judge",
        "user: Is it \\x1b[2J right?",
        "assistant: [thought] Hm.",
        "34 tokens (24 of the prompt, 12 of them cached, and 10 of the answer), cost 0.002, "
        "finished by stop",
        "remote turn 1 (continues 0): judge, asked by solver",
    ):
        assert part in " ".join(text.split()), part


def test_text_from_the_run_cannot_drive_the_terminal(decode: Decode) -> None:
    text = shown(trajectory(status="failed", error="boom\n\x1b[31mred", success=False), decode)
    assert "\x1b" not in text
    assert "failed: boom↵\\x1b[31mred" in text


def test_log_probs_stand_under_their_tokens(decode: Decode) -> None:
    lines = shown(trajectory(), decode).splitlines()
    top = next(index for index, line in enumerate(lines) if line.startswith("<think>"))
    assert lines[top].split() == ["<think>", "goal", "↵", "<|im_end|>"]
    assert lines[top + 1].split() == ["-0.01", "-1.20", "-3.50", "-0.70"]
    assert lines[top].index("<|im_end|>") == lines[top + 1].index("-0.70")


@given(width=st.integers(20, 120), ids=st.lists(st.integers(0, 11), max_size=60))
def test_no_token_is_lost_and_no_line_too_long_at_any_width(width: int, ids: list[int]) -> None:
    words = ["<think>", "the", " goal", "é", "漢字", "x" * 40, "a", "b", "c", "d", "e", "f"]
    turn = Turn(
        index=0,
        prompt_ids=[],
        completion_ids=ids,
        logprobs=[-1.5] * len(ids),
        versions=[0] * len(ids),
        finish_reason="stop",
    )
    out = io.StringIO()
    Console(file=out, width=width).print(
        render_trajectory(trajectory(turns=[turn]), lambda token: words[token])
    )
    assert out.getvalue().count("-1.50") == len(ids) + (abs(sum(turn.logprobs) + 1.5) < 1e-9)


def test_levels_are_ordered_and_cover_all_probabilities() -> None:
    assert [probability_level(math.log(p)) for p in (1.0, 0.9, 0.6, 0.5, 0.3, 0.1, 0.01)] == [
        0,
        0,
        1,
        1,
        2,
        3,
        4,
    ]
    assert probability_level(-1e9) == len(LEVELS) - 1
    assert probability_level(1e-6) == 0  # rounding above probability 1


def test_a_mismatch_of_tokens_and_log_probs_is_no_silent_cut(decode: Decode) -> None:
    turn = Turn(
        index=0,
        prompt_ids=[],
        completion_ids=[1, 2],
        logprobs=[-0.1],
        versions=[0, 0],
        finish_reason="stop",
    )
    with pytest.raises(ValueError, match="zip"):
        shown(trajectory(turns=[turn]), decode)


def test_outcome_names_limits_and_failures() -> None:
    assert outcome(trajectory(success=False, truncated=True)).startswith(
        "no success, ended by a limit"
    )
    assert outcome(trajectory(status="failed")).startswith("failed: no reason recorded")


def test_calls_thoughts_results_and_images_are_shown(decode: Decode) -> None:
    messages = [
        Message("user", (TextPart("What is this? "), ImagePart("ab" * 32, "image/jpeg"))),
        Message("assistant", "Let me see.", (ToolCall("zoom", '{"x": 1}', "c1"),), reasoning="hm"),
        Message("tool", "a cat", tool_call_id="c1", name="zoom"),
        Message("assistant", "said by the policy"),
    ]
    view = trajectory()
    turn = msgspec.structs.replace(view.turns[0], messages=messages)
    text = shown(msgspec.structs.replace(view, turns=[turn]), decode)
    for part in (
        "user: What is this? [image image/jpeg, SHA-256 abababababab...]",
        "assistant: [thought] hm",
        "Let me see.",
        '[calls zoom as c1] {"x": 1}',
        "tool: [result of zoom of call c1]",
        "a cat",
    ):
        assert part in text, part


def test_files_that_were_kept_are_named(decode: Decode) -> None:
    text = shown(trajectory(files={"out/a.csv": b"1,2", "b\x1b[2J": b""}), decode)
    assert "out/a.csv, 3 bytes" in text and "b\\x1b[2J, 0 bytes" in text
    many = shown(trajectory(files={f"f{number}": b"" for number in range(60)}), decode)
    assert "and 10 more" in many


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ("42", "expected answer: 42"),
        ({"total": 3}, 'expected answer: {"total": 3}'),
        ("a\nb\x1b[2J", "expected answer: a↵b\\x1b[2J"),
        (None, ""),
    ],
)
def test_the_expected_answer_is_shown(answer: object, line: str) -> None:
    out = io.StringIO()
    task = Task(id="lake/12", query="?", answer=answer)
    rendered = render_trajectory(trajectory(), str, task=task)
    Console(file=out, width=100).print(rendered)
    assert [found for found in out.getvalue().splitlines() if "expected" in found] == (
        [line] if line else []
    )
