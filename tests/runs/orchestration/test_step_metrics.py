"""A step's numbers, from trajectories written by hand."""

from __future__ import annotations

import msgspec
import pytest

from agentevo.runs.orchestration.step_metrics import (
    collection_metrics,
    performance_metrics,
    rollout_metrics,
)
from agentevo.types import Trajectory, Turn


def attempt(
    name: str,
    group: str,
    reward: float,
    lengths: list[int],
    *,
    cut: bool = False,
    status: str = "completed",
    **metrics,
) -> Trajectory:
    turns = [
        Turn(
            index=index,
            parent=index - 1 if index else None,
            prompt_ids=[1] * (10 if index == 0 else 3),
            completion_ids=[2] * length,
            logprobs=[0.0] * length,
            versions=[0] * length,
            finish_reason="length" if cut else "stop",
        )
        for index, length in enumerate(lengths)
    ]
    return Trajectory(
        id=name,
        task_id=group,
        group_id=group,
        turns=turns,
        reward=reward,
        success=reward == 1,
        status=status,
        metrics=metrics,
    )


ATTEMPTS = [
    attempt("a", "g", 1.0, [2, 4], num_actions=2.0),
    attempt("b", "g", 0.0, [6], cut=True, num_actions=1.0),
    attempt("c", "h", 0.5, [8]),
    attempt("d", "h", 0.5, [8]),
    attempt("e", "h", 99.0, [50], status="failed"),
]


def test_rollout_metrics_by_hand():
    found = rollout_metrics(ATTEMPTS, {"e": "failed", "c": "zero-variance", "d": "zero-variance"})
    expected = {
        "rollout/in": 5,
        "rollout/dropped": 3,
        "rollout/dropped/failed": 1,
        "rollout/dropped/zero-variance": 2,
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "response_length/mean": (2 + 4 + 6 + 8 + 8) / 5,
        "response_length/max": 8,
        "response_length/min": 2,
        "response_length/clip_ratio": 0.2,
        "prompt_length/mean": 10,
        "num_turns/mean": 1.25,
        "train/success": 0.25,
        "agent/num_actions": 0.75,
        "group/num": 2,
        "group/reward_std/mean": 0.25,
        "group/zero_std_ratio": 0.5,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_times_are_means_and_maxima_over_the_attempts_that_have_them():
    times = [(0.5, 2.0), (1.5, 1.75)]
    attempts = [
        msgspec.structs.replace(
            t, timings={"environment_step_s/mean": mean, "environment_step_s/max": longest}
        )
        for t, (mean, longest) in zip(ATTEMPTS[:2], times, strict=True)
    ]
    found = rollout_metrics([*attempts, *ATTEMPTS[2:4]], {})
    assert found["perf/environment_step_s/mean"] == 1.0
    assert found["perf/environment_step_s/max"] == 2.0


def test_a_step_in_which_everything_failed_still_counts_what_came():
    found = rollout_metrics([attempt("e", "h", 0.0, [], status="failed")], {"e": "failed"})
    assert found == {
        "rollout/in": 1.0,
        "rollout/dropped": 1.0,
        "rollout/dropped/failed": 1.0,
        "rollout/failed/other": 1.0,
    }
    assert rollout_metrics([], {}) == {"rollout/in": 0.0, "rollout/dropped": 0.0}


def test_parts_of_the_reward():
    parts = [{"environment": 1.0, "format": -0.1}, {"environment": 0.0}, {"environment": 5.0}]
    attempts = [
        msgspec.structs.replace(t, reward_parts=part)
        for t, part in zip([*ATTEMPTS[:2], ATTEMPTS[4]], parts, strict=True)
    ]
    found = rollout_metrics(attempts, {})
    assert found["reward_parts/environment/mean"] == 0.5, (
        "failed attempts have earned nothing that counts"
    )
    assert found["reward_parts/format/mean"] == -0.05


def test_what_can_be_trained_on():
    assert collection_metrics(group_sizes=[1, 3, 1, 8], length_parts=[], baseline_rewards=[]) == {
        "group/of_one": 2
    }
    assert collection_metrics(
        group_sizes=[], length_parts=[-0.5, 0.0], baseline_rewards=[1.0, 2.0]
    ) == {
        "group/of_one": 0,
        "reward_parts/length/mean": -0.25,
        "rollout/baseline_reward": 1.5,
    }


def test_speeds():
    timings = {"gen": 2.0, "adv": 0.5, "update_actor": 4.0, "update_weights": 0.5, "step": 7.0}
    engine = {
        "engine/generated_tokens": 100.0,
        "engine/prefix_hit_tokens": 30.0,
        "engine/session_hit_tokens": 5.0,
    }
    found = performance_metrics(
        timings,
        engine,
        {
            "trainer/logical_tokens": 250.0,
            "trainer/distinct_tokens": 100.0,
            "trainer/distinct_flops": 8e9,
            "trainer/logical_flops": 2e10,
        },
        1e10,
    )
    assert found["timing_s/gen"] == 2.0
    assert found["engine/tokens_per_s"] == 50.0
    assert (found["perf/tokens_per_s_logical"], found["perf/tokens_per_s_distinct"]) == (62.5, 25.0)
    assert (found["perf/mfu"], found["perf/mfu_logical"]) == (0.2, 0.5)
    assert found["perf/throughput"] == pytest.approx(350 / 7)
    assert (found["engine/prefix_hit_tokens"], found["engine/session_hit_tokens"]) == (30.0, 5.0)
    assert found["perf/cpu_memory_used_gb"] > 0.01


def test_nothing_trained_is_no_division_by_zero():
    timings = {"gen": 0.0, "update_actor": 0.0, "step": 1.0}
    found = performance_metrics(timings, {"engine/generated_tokens": 3.0}, {}, 1e10)
    assert found["engine/tokens_per_s"] == 0.0
    elsewhere = performance_metrics(timings, {"engine/generated_tokens": 0.0}, {}, 1e10)
    assert not {"engine/generated_tokens", "engine/tokens_per_s"} & set(elsewhere)
    assert not {"perf/tokens_per_s_logical", "perf/mfu"} & set(found)
