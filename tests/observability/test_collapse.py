from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.errors import CheckpointError
from agentevo.observability.collapse import CollapseSigns
from agentevo.observability.finding_monitor import COOLDOWN, FindingMonitor, RunWarning
from agentevo.observability.metrics import MetricsRow
from agentevo.observability.remedies import Remedies
from examples import examples

Step = Mapping[str, float | None]


def healthy(step: int, rng: random.Random) -> dict[str, float | None]:
    """A run that learns steadily to about 70%."""
    skill = min(step / 60, 1.0)
    return {
        "critic/score/mean": 0.1 + 0.6 * skill + rng.gauss(0, 0.04),
        "train/success": min(max(0.1 + 0.6 * skill + rng.gauss(0, 0.04), 0.01), 1.0),
        "group/reward_std/mean": 0.3 + 0.1 * skill + rng.gauss(0, 0.02),
        "group/zero_std_ratio": 0.25 + rng.gauss(0, 0.05),
        "actor/grad_norm": abs(rng.gauss(0.5, 0.12)),
        "actor/entropy": 1.2 - 0.8 * skill + rng.gauss(0, 0.03),
        "response_length/mean": 40 - 10 * skill,
        "response_length/clip_ratio": 0.02,
        "rollout/in": 32.0,
        "rollout/dropped/zero_variance": 8.0,
    }


def run(changes: Mapping[range, Step], steps: int = 60, seed: int = 0) -> list[RunWarning]:
    """The warnings of a healthy run whose metrics are replaced in the given ranges of steps."""
    return list(warnings_of(FindingMonitor(), timeline(changes, steps, seed)))


def timeline(changes: Mapping[range, Step], steps: int, seed: int) -> list[tuple[int, Step]]:
    rng = random.Random(seed)
    made: list[tuple[int, Step]] = []
    for step in range(1, steps + 1):
        metrics = healthy(step, rng)
        for when, change in changes.items():
            if step in when:
                metrics |= change
        made.append((step, metrics))

    return made


def warnings_of(monitor: FindingMonitor, steps: Iterable[tuple[int, Step]]) -> Iterable[RunWarning]:
    for step, metrics in steps:
        yield from monitor.observe(step, metrics)


FLAT = {"critic/score/mean": 0.3, "train/success": 0.3}
SCENARIOS: dict[str, dict[range, Step]] = {
    "not_finite": {range(30, 31): {"actor/grad_norm": math.nan}},
    "rollouts_lost": {
        range(30, 31): {"rollout/dropped/failed": 9.0, "rollout/dropped/deadline": 3.0}
    },
    "gradient_spike": {range(30, 31): {"actor/grad_norm": 6.0}},
    "spread_vanished": {
        range(20, 61): {**FLAT, "group/reward_std/mean": 0.01, "group/zero_std_ratio": 0.97}
    },
    "entropy_collapsed": {range(20, 61): {**FLAT, "actor/entropy": 0.01}},
    "entropy_exploded": {range(30, 61): {"actor/entropy": 4.0}},
    "reward_fell": {range(40, 61): {"critic/score/mean": 0.05, "train/success": 0.05}},
}


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_is_left_in_peace(seed: int) -> None:
    assert run({}, steps=120, seed=seed) == []


def test_the_sample_run_is_left_in_peace_but_for_its_broken_gradient(
    rows: list[MetricsRow],
) -> None:
    monitor = FindingMonitor()
    found = list(
        warnings_of(
            monitor, ((int(row["step"] or 0), row) for row in rows if "actor/entropy" in row)
        )
    )
    assert [warning.code for warning in found] == ["not_finite"]


@pytest.mark.parametrize(
    "reason",
    ["small-spread", "below-usual-spread", "surplus", "zero-variance", "truncated", "not-trained"],
)
def test_what_a_filter_of_the_recipe_leaves_out_is_nobodys_fault(reason: str) -> None:
    """StarPO-S, which keeps a quarter of the groups, and its like."""
    left_out = {f"rollout/dropped/{reason}": 24.0, "rollout/dropped/failed": 1.0}
    assert not [one for one in run({range(30, 31): left_out}) if one.code == "rollouts_lost"]


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (["scorer_KeyError"], "a reward function is at fault"),
        (["scorer_KeyError", "scorer_timeout"], "a reward function is at fault"),
        (["KeyError"], "the environment, the agent or the engine is at fault"),
        (["KeyError", "scorer_KeyError"], "the agent, a reward function or the engine is at fault"),
        ([], "the environment, the agent or the engine is at fault"),
    ],
)
def test_lost_attempts_are_laid_at_the_door_of_who_lost_them(kinds, words) -> None:
    lost = {"rollout/dropped/failed": 12.0} | {f"rollout/failed/{kind}": 6.0 for kind in kinds}
    (warning,) = (one for one in run({range(30, 31): lost}) if one.code == "rollouts_lost")
    assert words in warning.message


@pytest.mark.parametrize("code", SCENARIOS)
def test_each_sign_is_seen_alone_and_in_time(code: str) -> None:
    found = run(SCENARIOS[code])
    assert {warning.code for warning in found} == {code}
    begins = min(step for when in SCENARIOS[code] for step in when)
    assert begins <= found[0].step <= begins + 20


def test_one_step_signs_name_their_step() -> None:
    for code in ("not_finite", "rollouts_lost", "gradient_spike"):
        assert [(warning.code, warning.step) for warning in run(SCENARIOS[code])] == [(code, 30)]


def test_messages_say_what_was_seen() -> None:
    assert "jumped to 6, 1" in run(SCENARIOS["gradient_spike"])[0].message
    assert (
        "12 of 32 trajectories were dropped (3 deadline, 9 failed)"
        in run(SCENARIOS["rollouts_lost"])[0].message
    )
    assert "actor/grad_norm is not a finite number" in run(SCENARIOS["not_finite"])[0].message
    assert "success is 3" in run(SCENARIOS["spread_vanished"])[0].message


@pytest.mark.parametrize("code", SCENARIOS)
def test_every_remedy_names_settings_that_exist(code: str) -> None:
    from agentevo.config import RunConfig

    default = RunConfig.model_validate({"environment": {"type": "coins"}})
    for section, key in re.findall(r"\b([a-z_]+)\.([a-z_]+)\b", run(SCENARIOS[code])[0].message):
        assert hasattr(getattr(default, section), key), f"{section}.{key}"


def test_a_lasting_sign_is_said_once_when_it_begins_and_once_when_it_is_over() -> None:
    low = {range(20, 40): {**FLAT, "actor/entropy": 0.01}}
    found = [warning for warning in run(low, steps=80) if warning.code == "entropy_collapsed"]
    begin, over = found
    assert (begin.is_over, over.is_over) == (False, True)
    assert 20 < begin.step < over.step
    assert f"steps {begin.step} to {over.step - 3}" in over.message


@pytest.mark.parametrize(("later", "said"), [(3, [25]), (COOLDOWN, [25, 25 + COOLDOWN])])
def test_a_sign_of_one_step_is_not_said_again_soon(later: int, said: list[int]) -> None:
    spikes: dict[range, Step] = {
        range(25, 26): {"actor/grad_norm": 50.0},
        range(25 + later, 26 + later): {"actor/grad_norm": 20.0},
    }
    found = run(spikes)
    assert [(warning.code, warning.step) for warning in found] == [
        ("gradient_spike", step) for step in said
    ]


def test_a_spike_does_not_hide_the_next_one() -> None:
    signs = CollapseSigns(Remedies())
    spikes = {25: 50.0, 28: 20.0}
    seen = [
        step
        for step, metrics in timeline({}, 40, 0)
        if "gradient_spike"
        in signs.observe(step, {**metrics, "actor/grad_norm": spikes.get(step, 0.5)})
    ]
    assert seen == [25, 28]


def test_steps_without_any_gradient_do_not_make_the_next_one_a_spike() -> None:
    assert run({range(20, 40): {"actor/grad_norm": 0.0}}) == []


def test_a_solved_task_may_be_certain_and_uniform() -> None:
    solved: Step = {
        "critic/score/mean": 1.0,
        "train/success": 1.0,
        "group/reward_std/mean": 0.0,
        "group/zero_std_ratio": 1.0,
        "actor/entropy": 0.001,
    }
    assert run({range(30, 121): solved}, steps=120) == []


def test_equal_rewards_are_no_fault_while_the_reward_still_rises() -> None:
    found = run({range(1, 61): {"group/zero_std_ratio": 0.85}})
    assert found == []


def test_missing_metrics_only_switch_off_their_signs() -> None:
    monitor = FindingMonitor()
    for step in range(1, 40):
        assert monitor.observe(step, {}) == []

    lost = {"rollout/in": 8.0, "rollout/dropped/failed": 6.0}
    (warning,) = monitor.observe(40, lost)
    assert warning.code == "rollouts_lost"


@settings(max_examples=examples(25), deadline=None)
@given(code=st.sampled_from(sorted(SCENARIOS)), cut=st.integers(1, 59), seed=st.integers(0, 5))
def test_a_resumed_monitor_warns_as_an_uninterrupted_one(code: str, cut: int, seed: int) -> None:
    steps = timeline(SCENARIOS[code], 60, seed)
    straight = FindingMonitor()
    expected = list(warnings_of(straight, steps))
    first = FindingMonitor()
    second = FindingMonitor()
    found = list(warnings_of(first, steps[:cut]))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += warnings_of(second, steps[cut:])
    assert found == expected
    assert second.state_dict() == straight.state_dict()


def test_a_loaded_state_is_not_shared() -> None:
    first = FindingMonitor()
    second = FindingMonitor()
    first.observe(1, {"critic/score/mean": 1.0})
    state = first.state_dict()
    second.load_state_dict(state)
    second.observe(2, {"critic/score/mean": 5.0})
    assert first.state_dict() == state


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match="another version"):
        FindingMonitor().load_state_dict({"collapse": {"means": "gone"}})
