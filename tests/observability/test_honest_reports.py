"""Reports show what numbers can bear: no noise as a curve, no greedy token as a certain one, no
comparison of what can't be compared."""

from __future__ import annotations

import io

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from agentevo.observability.finding_monitor import FindingMonitor
from agentevo.observability.live import LiveView
from agentevo.observability.metrics import not_comparable, read_evaluations
from agentevo.observability.pages.words import sparkline
from agentevo.observability.plots import leave_room
from agentevo.observability.report_page import report_html, rollouts
from agentevo.observability.static_attempt import still_attempt
from agentevo.observability.trajectory_view import outcome, render_trajectory
from agentevo.types import Trajectory, Turn


def rewards(values: list[float]) -> list[dict[str, float | None]]:
    return [
        {"step": step, "critic/score/mean": value, "group/reward_std/mean": 3e-4}
        for step, value in enumerate(values, start=1)
    ]


def warnings_of(values: list[float]) -> list[str]:
    monitor = FindingMonitor()
    return [
        warning.code
        for row in rewards(values)
        for warning in monitor.observe(int(row["step"]), row)
    ]


def test_a_reward_that_stays_what_it_is_has_not_fallen():
    assert "reward_fell" not in warnings_of([-0.1] * 10 + [-0.0998] * 3 + [-0.1] * 30)
    assert "reward_fell" in warnings_of([-0.1] * 10 + [0.4] * 10 + [-0.1] * 30)


def span_of(values: list[float]) -> float:
    axes = Figure().subplots()
    axes.plot(values)
    leave_room(axes)
    low, high = axes.get_ylim()
    assert low <= min(values) and max(values) <= high
    return float(high - low)


def test_noise_does_not_fill_the_height_of_a_plot():
    assert span_of([-0.1, -0.0999, -0.1]) >= 0.01, "noise of a thousandth fills a hundredth of it"
    assert span_of([0.0, 1.0]) < 1.2, "a curve keeps its height"


def test_the_sparkline_of_a_reward_that_stands_still_is_flat():
    assert len(set(sparkline((-0.1, -0.0999, -0.1)))) == 1
    assert len(set(sparkline((0.1, 0.2, 0.3)))) == 3


def attempt(temperature: float) -> Trajectory:
    turn = Turn(
        index=0,
        prompt_ids=[1],
        completion_ids=[2, 3],
        logprobs=[0.0, 0.0],
        versions=[0, 0],
        finish_reason="stop",
        temperature=temperature,
    )
    return Trajectory(id="a", task_id="t", group_id="g", turns=[turn])


def texts_of(temperature: float) -> list[str]:
    out = io.StringIO()
    shown = attempt(temperature)
    Console(file=out, width=200).print(render_trajectory(shown, lambda token: f"<{token}>"))
    html = report_html([], {}, "", [still_attempt(shown, caption="one")])
    return [outcome(shown), out.getvalue().partition("probability:")[0], html]


@pytest.mark.slow
def test_greedy_tokens_are_not_shown_as_certain_ones():
    for text in texts_of(0.0):
        assert "greedy" in text
        assert "log-prob 0.00" not in text and "0.00 0.00" not in text
    *_, html = texts_of(0.0)
    assert "drawn greedily" in html and "· log-prob " not in html
    one_line, terminal, html = texts_of(1.0)
    assert "log-prob 0.00" in one_line and "0.00" in terminal and "log-prob 0.0000 (100%)" in html


BEFORE = {"val-core/coins/success/greedy": 0.5, "val-aux/coins/failed/greedy": 0.0}
AFTER = {"val-core/coins/success/greedy": 0.9, "val-aux/coins/failed/greedy": 0.25}


def test_evaluations_with_many_failures_are_marked_wherever_they_are_compared():
    assert not_comparable(read_evaluations(BEFORE), read_evaluations(BEFORE)) == ""

    words = not_comparable(read_evaluations(BEFORE), read_evaluations(AFTER))
    assert "can't be compared: 0% of the held-out attempts failed before and 25% after" in words

    rows = [{"step": 0, **BEFORE}, {"step": 3, **AFTER}]
    page = report_html(rows, {}, "", [])
    assert "can&#39;t be compared" in page
    assert '<th scope="col" class="num">failed attempts</th>' in page
    assert "failed attempts" not in report_html([{"step": 0, **BEFORE}], {}, "", [])


@pytest.mark.parametrize("plain", [True, False])
def test_notes_stand_under_the_evaluation(plain):
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    out = Terminal()
    with LiveView("run", stream=out, plain=plain) as view:
        view.evaluation(0, BEFORE, ["3 of 12 failed: 3 took longer than agent.timeout_s=300 s"])

    text = out.getvalue()
    assert text.index("50.0%") < text.index("3 of 12 failed")


def test_lost_attempts_are_named_by_what_they_failed_with():
    def message(kind: str) -> str:
        metrics = {"rollout/in": 8.0, "rollout/dropped/failed": 6.0, f"rollout/failed/{kind}": 6.0}
        (warning,) = FindingMonitor().observe(1, metrics)
        return warning.message

    assert "Those that failed: 6 ValueError" in message("ValueError")
    assert "timeout_s" not in message("ValueError")
    assert "raise agent.timeout_s" in message("timeout")


def test_trajectories_whose_every_token_was_too_old_are_not_counted_as_trained_on():
    rows = [
        {
            "rollout/in": 64.0,
            "rollout/dropped/zero_variance": 8.0,
            "staleness/masked_trajectories": 56.0,
        },
        {"rollout/in": 64.0, "staleness/masked_trajectories": 0.0},
    ]
    found = rollouts(rows)
    assert found is not None
    assert found[2] == [
        ["trained on", "64", "50.0%"],
        ["dropped: zero-variance", "8", "6.2%"],
        ["masked: every token too old", "56", "43.8%"],
    ]
