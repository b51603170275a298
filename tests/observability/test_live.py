from __future__ import annotations

import io
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.observability.live import LiveView, format_drops
from agentevo.observability.metrics import MetricsRow
from agentevo.observability.pages.words import sparkline
from agentevo.runtime.console import format_duration

METRICS: MetricsRow = {
    "critic/score/mean": 0.41,
    "train/success": 0.38,
    "rollout/in": 32.0,
    "perf/throughput": 1203.6,
    "timing_s/step": 3.94,
    "actor/grad_norm": 0.823,
    "actor/entropy": 1.207,
}


def test_a_plain_step_is_one_line_that_stands_on_its_own(clock) -> None:
    out = io.StringIO()
    with LiveView("run", stream=out, clock=clock) as view:
        view.step(9, 60, METRICS, {"zero_variance": 4})

    assert out.getvalue() == (
        "step  9/60 | reward 0.410 | success 38% | 32 in, 4 dropped: 4 zero-variance | 1,204 "
        "tok/s | 3.9 s/step | eta 3m21s"
        " | grad 0.82 | entropy 1.21\n"
    )


SELF_PLAY = {
    "selfplay/proposed": 8.0,
    "selfplay/valid": 0.75,
    "selfplay/questions": 5.0,
    "selfplay/success_rate": 0.41,
    "selfplay/at_edge": 0.6,
}


def test_a_step_of_self_play_says_what_became_of_the_proposals(clock, terminal) -> None:
    out = io.StringIO()
    for more in (SELF_PLAY, {"selfplay/proposed": 8.0, "selfplay/questions": 0.0}):
        with LiveView("run", stream=out, clock=clock) as view:
            view.step(1, 2, METRICS | more, {})

    first, second = out.getvalue().splitlines()
    assert " | 8 proposed, 75% valid, 5 questions, 41% solved, 60% at the edge | " in first
    assert " | 8 proposed, 0 questions | " in second

    with LiveView("run", stream=terminal) as view:
        view.step(1, 2, METRICS | SELF_PLAY, {})

    assert "8 proposed, 75% valid, 5 questions, 41% solved" in terminal.getvalue()


def test_a_stream_that_is_no_terminal_gets_plain_text_only(clock, rows: list[MetricsRow]) -> None:
    out = io.StringIO()
    with LiveView("run", stream=out, clock=clock) as view:
        assert view.plain
        for row in rows:
            if "training/global_step" in row:
                view.phase("sampling", "64 attempts")
                view.phase("updating")
                view.step(int(row["step"] or 0), 60, row, {"zero_variance": 8})

    text = out.getvalue()
    assert text.isascii()
    assert "\x1b" not in text
    assert len([line for line in text.splitlines() if line.startswith("step")]) == 60
    assert [line for line in text.splitlines() if line.startswith("--")] == [
        "-- sampling: 64 attempts",
        "-- updating",
    ]


def test_missing_and_broken_metrics_do_not_stop_the_view() -> None:
    out = io.StringIO()
    with LiveView("run", stream=out) as view:
        view.step(1, 2, {}, {})
        view.step(2, 2, {"critic/score/mean": None, "actor/grad_norm": float("nan")}, {})

    first, second = out.getvalue().splitlines()
    assert first == "step 1/2 | none dropped"
    assert "reward nan" in second
    assert "grad nan" in second


def test_a_long_phase_shows_that_it_is_alive(clock) -> None:
    out = io.StringIO()
    view = LiveView("run", stream=out, clock=clock)
    for epoch in range(1, 5):
        view.phase("cold start", f"epoch {epoch}/4")
        clock.now += 8
    assert out.getvalue().splitlines() == ["-- cold start: epoch 1/4", "-- cold start: epoch 3/4"]


def test_time_left_follows_the_real_pace_with_evaluations_in_it(clock) -> None:
    out = io.StringIO()
    view = LiveView("run", stream=out, clock=clock)
    for step in range(1, 4):
        clock.now += 10
        view.step(step, 13, METRICS, {})

    assert "eta 39.4s" not in out.getvalue().splitlines()[0]
    assert "eta 47.3s" in out.getvalue().splitlines()[0]  # only the step's own 3.94 s are known yet
    assert "eta 1m40s" in out.getvalue().splitlines()[2]


def test_a_plain_evaluation_is_a_table_with_both_reference_players() -> None:
    out = io.StringIO()
    LiveView("run", stream=out).evaluation(
        40,
        {
            "val-core/frozen_lake/success/greedy": 0.625,
            "val-core/frozen_lake/success/sampled": 0.55,
            "val-core/frozen_lake/reward/greedy": 0.6,
            "val-core/frozen_lake/random": 0.056,
            "val-core/frozen_lake/optimal": 0.78,
            "val-core/frozen_lake/n": 64,
        },
    )
    assert out.getvalue().splitlines() == [
        "held-out evaluation at step 40: frozen_lake, 64 tasks",
        "                  success   reward",
        "  agent, greedy     62.5%    0.600",
        "  agent, sampled    55.0%",
        "  random player      5.6%",
        "  optimal player    78.0%",
    ]


def test_a_stream_that_cannot_spell_a_character_does_not_stop_the_run() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    LiveView("run", stream=out).note("0% \u2192 80%")
    assert raw.getvalue() == b"0% \\u2192 80%\n"


def test_the_terminal_panel_shows_the_run(terminal) -> None:
    with LiveView("my [bold]run[/bold]", stream=terminal) as view:
        assert not view.plain

        view.phase("sampling", "32 attempts")
        view.step(12, 60, METRICS, {"zero_variance": 4})
        view.evaluation(
            10,
            {
                "val-core/coins/success/greedy": 0.5,
                "val-core/coins/random": 0.25,
                "val-core/coins/optimal": 1.0,
            },
        )
        for number in range(5):
            view.warn(f"warning {number} [red]as is[/red]")

        view.note("saved [checkpoint]")

    shown = terminal.getvalue()
    last_frame = shown[shown.rindex("my [bold]run") :]
    for text in (
        "done",
        "step 12/60",
        "32 in, 4 dropped: 4 zero-variance",
        "held-out coins",
        "warning 4 [red]as is[/red]",
        "warning 2",
    ):
        assert text in last_frame, text

    assert "warning 1" not in last_frame
    assert "saved [checkpoint]" in shown
    assert "random player" in shown


def test_the_panel_says_when_a_run_was_stopped(terminal) -> None:
    def interrupted_run() -> None:
        with LiveView("run", stream=terminal) as view:
            view.step(1, 60, METRICS, {})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_run()

    assert "stopped" in terminal.getvalue()
    assert terminal.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_a_terminal_without_cursor_control_or_unicode_gets_plain_lines(
    terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not LiveView("run", stream=terminal).plain
    terminal.encoding = "latin-1"
    assert LiveView("run", stream=terminal).plain
    terminal.encoding = "utf-8"
    monkeypatch.setenv("TERM", "dumb")
    assert LiveView("run", stream=terminal).plain


def test_drops_are_listed_by_number() -> None:
    assert (
        format_drops(32, {"failed": 1, "zero_variance": 8, "stale": 0})
        == "32 in, 9 dropped: 8 zero-variance, 1 failed"
    )
    assert format_drops(32, {}) == "32 in, none dropped"
    assert format_drops(None, {"failed": 2}) == "2 dropped: 2 failed"
    assert format_drops(64, {"failed": 2}, 56) == "64 in, 2 dropped: 2 failed, 56 masked: too old"
    assert format_drops(64, {}, 56.0) == "64 in, none dropped, 56 masked: too old"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00s"),
        (0.42, "0.42s"),
        (8.31, "8.3s"),
        (59.94, "59.9s"),
        (59.96, "1m00s"),
        (187, "3m07s"),
        (3599.6, "1h00m"),
        (7500, "2h05m"),
        (273600, "3d04h"),
        (-1, "0.00s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(min_value=0, max_value=1e7))
def test_durations_are_short(seconds: float) -> None:
    assert len(format_duration(seconds)) <= 7


def test_sparklines_span_their_range() -> None:
    assert sparkline((0.0, 0.5, 1.0)) == "▁▅█"
    assert sparkline((3.0, 3.0)) == "▁▁"
    assert sparkline(()) == ""


def test_what_an_algorithm_learns_beside_the_policy_is_shown():
    stream = io.StringIO()
    view = LiveView("run", stream=stream, plain=True)
    with view:
        view.step(
            1,
            2,
            {
                "critic/vf_explained_var": 0.25,
                "preference/rewards/accuracies": 0.5,
                "process_reward/accuracy": 1.0,
            },
            {},
        )

    assert (
        "| critic predicts 25% | process reward right 100% | pairs right 50%" in stream.getvalue()
    )


@pytest.mark.slow
@pytest.mark.cold_start
def test_a_reader_that_is_gone_ends_nothing() -> None:
    """As in `agentevo train coins | head -1`."""
    program = (
        "from agentevo.observability.live import LiveView\n"
        "with LiveView('run') as view:\n"
        "    for n in range(9):\n"
        "        view.note('line ' + str(n))\n"
        "        input()\n"
        "from agentevo.runtime.console import to_stderr\n"
        "to_stderr('and here')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "line 0\n"
        process.stdout.close()
        process.stdin.write("\n" * 9)
        process.stdin.close()
        said = process.stderr.read()
        assert process.wait(300) == 0, said

    assert "and here" in said
    assert "BrokenPipe" not in said
