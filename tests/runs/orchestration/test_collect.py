"""Between tasks and training: refilling, RLPR's memory, greedy baselines, length shaping; and a
resumed run collects the same."""

from __future__ import annotations

import asyncio
import json
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.api.run import train
from agentevo.config import build_config
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.orchestration.collect import Collector, next_round
from agentevo.runs.orchestration.components import open_components
from agentevo.runs.orchestration.rollout_sources import RolloutRound, SynchronousRollouts
from agentevo.types import Task, Trajectory, Turn

pytestmark = pytest.mark.slow


class ScriptedAttempts:
    """`rewards(task, step)` gives a group's rewards; None is a failed attempt. `greedy(task)` that
    of the attempt beside it."""

    def __init__(self, rewards, greedy=lambda task: 0.0) -> None:
        self._rewards = rewards
        self._greedy = greedy
        self.size = 0
        self.baseline = False
        self.asked: list[list[str]] = []

    async def round(self, step, tasks):
        self.asked.append([task.id for task in tasks])
        found = []
        for place, task in enumerate(tasks):
            rewards = self._rewards(place, step)
            assert len(rewards) == self.size

            found += [
                _attempt(task, f"{task.id}/train@{step}", k, reward)
                for k, reward in enumerate(rewards)
            ]
            if self.baseline:
                found.append(_attempt(task, f"{task.id}/baseline@{step}", 0, self._greedy(place)))

        return RolloutRound(found)


def _attempt(task: Task, group: str, number: int, reward: float | None) -> Trajectory:
    size = 1 + number
    version = int(group.rpartition("@")[2]) - 1
    turn = Turn(
        index=0,
        prompt_ids=[1],
        completion_ids=[2] * size,
        logprobs=[0.0] * size,
        versions=[version] * size,
        finish_reason="stop",
    )

    return Trajectory(
        id=f"{group}#{number}",
        task_id=task.id,
        group_id=group,
        attempt=number,
        turns=[turn],
        reward=reward or 0.0,
        success=bool(reward),
        status="failed" if reward is None else "completed",
        reward_parts={} if reward is None else {"environment": reward},
    )


def collector(
    sampler,
    algorithm,
    *,
    groups: int = 4,
    size: int = 2,
    given: int | None = None,
    held_out: int = 1,
) -> Collector:
    tree = {
        "trainer": {"groups_per_step": groups, "group_size": size},
        "algorithm": algorithm,
        "evaluation": {"tasks": held_out},
        "sampling": {"max_new_tokens": 4},
        "agent": {"max_turns": 1},
    }
    tree |= {} if given is not None else {"environment": {"type": "coins"}}
    config = build_config(tree, needs_environment=given is None)
    sampler.size = size
    sampler.baseline = "baseline_rewards" in config.algorithm.needs

    return Collector(
        config,
        sampler,
        TaskSource(config, None if given is None else [Task(id=f"t{n}") for n in range(given)]),
    )


def run(collector: Collector, step: int = 1):
    return asyncio.run(collector.collect(step))


def reasons(found) -> dict[str, set[str]]:
    """Reason -> groups."""
    named: dict[str, set[str]] = {}
    for name, reason in found.dropped.items():
        named.setdefault(reason, set()).add(name.partition("/")[0])
    return named


ALIKE = [1.0, 1.0]
DIFFERENT = [1.0, 0.0]


def test_without_dynamic_sampling_there_is_one_round():
    sampler = ScriptedAttempts(lambda place, step: DIFFERENT if place == 1 else ALIKE)
    for rounds in (0, 1):
        found = run(collector(sampler, {"dynamic_sampling": rounds}))
        assert sampler.asked.pop() == ["train-0", "train-1", "train-2", "train-3"]
        assert sampler.asked == []
        assert {t.task_id for t in found.trainable} == {"train-1"}
        assert reasons(found) == {"zero-variance": {"train-0", "train-2", "train-3"}}
        assert "rollout/rounds" not in found.metrics


def test_a_step_samples_until_its_batch_is_full():
    """Half of the groups of a round are informative (4 of 8 tasks, then as many more as are to be
    expected)."""
    sampler = ScriptedAttempts(lambda place, step: DIFFERENT if place % 2 else ALIKE)
    found = run(collector(sampler, {"dynamic_sampling": 9}))
    assert sampler.asked == [
        [f"train-{n}" for n in range(4)],
        ["train-1+0", "train-1+1", "train-1+2", "train-1+3"],
    ]
    assert [t.task_id for t in found.trainable] == [
        name for name in ("train-1", "train-3", "train-1+1", "train-1+3") for _ in range(2)
    ]
    assert reasons(found) == {"zero-variance": {"train-0", "train-2", "train-1+0", "train-1+2"}}
    assert (found.metrics["rollout/rounds"], found.metrics["rollout/informative_share"]) == (2, 0.5)
    assert found.metrics["rollout/in"] == 16
    assert {t.id for t in found.trajectories} == {t.id for t in found.trainable} | set(
        found.dropped
    )


def test_what_is_too_much_is_surplus():
    sampler = ScriptedAttempts(
        lambda place, step: DIFFERENT if len(sampler.asked) > 1 or place == 0 else ALIKE
    )
    found = run(collector(sampler, {"dynamic_sampling": 9}))
    assert [len(asked) for asked in sampler.asked] == [4, 4], (
        "3 missing of which a quarter is expected: no more than a whole round"
    )
    assert reasons(found) == {
        "zero-variance": {"train-1", "train-2", "train-3"},
        "surplus": {"train-1+3"},
    }
    assert found.metrics["rollout/informative_share"] == 5 / 8
    assert found.metrics["rollout/dropped/surplus"] == 2


@pytest.mark.parametrize("rounds", [2, 3])
def test_rounds_are_bounded_and_the_step_trains_on_what_there_is(rounds):
    sampler = ScriptedAttempts(
        lambda place, step: DIFFERENT if len(sampler.asked) == 1 and place == 0 else ALIKE
    )
    found = run(collector(sampler, {"dynamic_sampling": rounds}))
    assert len(sampler.asked) == found.metrics["rollout/rounds"] == rounds
    assert [t.task_id for t in found.trainable] == ["train-0", "train-0"]

    nothing = run(
        collector(ScriptedAttempts(lambda place, step: ALIKE), {"dynamic_sampling": rounds})
    )
    assert nothing.trainable == []
    assert nothing.metrics["rollout/informative_share"] == 0


def test_a_group_of_one_is_not_informative_and_is_counted():
    sampler = ScriptedAttempts(
        lambda place, step: [1.0, None] if place == 0 and len(sampler.asked) == 1 else DIFFERENT
    )
    found = run(collector(sampler, {"dynamic_sampling": 3}))
    assert reasons(found)["group-of-one"] == {"train-0"}
    assert reasons(found)["failed"] == {"train-0"}
    assert len({t.task_id for t in found.trainable}) == 4
    assert found.metrics["group/of_one"] == 1

    plain = run(collector(sampler, {"name": "arpo"}, size=2))
    assert plain.metrics["group/of_one"] == 0


@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 200))
def test_how_many_groups_come_next(wanted, informative, uninformative):
    sampled = informative + uninformative
    count = next_round(wanted, informative, sampled)
    missing = max(wanted - informative, 0)
    assert missing <= count <= wanted

    if informative and missing:
        expected = count * informative / sampled
        assert expected >= missing - 1e-9 or count == wanted
        assert (count - 1) * informative / sampled < missing + 1e-9


def test_given_tasks_refill_until_they_are_used_up():
    sampler = ScriptedAttempts(lambda place, step: ALIKE)
    found = run(
        collector(sampler, {"dynamic_sampling": 50}, groups=3, given=12, held_out=2), step=2
    )
    asked = [name for names in sampler.asked for name in names]
    assert sorted(asked) == sorted(f"t{n}" for n in range(10)), "each once, none that is held out"
    assert [len(names) for names in sampler.asked] == [3, 3, 3, 1]
    assert found.metrics["rollout/rounds"] == 4

    again = ScriptedAttempts(lambda place, step: ALIKE)
    run(collector(again, {"dynamic_sampling": 50}, groups=3, given=12, held_out=2), step=2)
    assert again.asked == sampler.asked

    run(collector(again, {"dynamic_sampling": 50}, groups=3, given=12, held_out=2), step=3)
    assert again.asked[4:] != sampler.asked


def test_groups_below_the_usual_spread():
    """Steps 1 and 2 record spreads with means 0.75 and 0.25 (times sqrt(1/2)); from step 3 on at
    least half of 0.5 is needed."""
    rewards = {1: [1.0, 0.5], 2: [0.5, 0.0], 3: [0.2, 0.3], 4: [0.2, 0.25]}
    sampler = ScriptedAttempts(lambda place, step: [rewards[step][place], 0.0])
    keys = {"rlpr_beta": 0.5, "rlpr_decay": 0.0, "rlpr_record_from": 1, "rlpr_start": 3}
    one = collector(sampler, keys, groups=2)
    assert "below-usual-spread" not in reasons(run(one, 1))
    assert "below-usual-spread" not in reasons(run(one, 2))

    state = json.loads(json.dumps(one.state_dict()))
    found = run(one, 3)
    assert reasons(found) == {"below-usual-spread": {"train-4"}}, (
        "0.2 against half of the mean of 1, 0.5, 0.5 and 0"
    )
    assert reasons(run(one, 4)) == {}, (
        "decay 0: the usual spread is that of step 3 alone, 0.25, and 0.2 is more than half of it"
    )

    resumed = collector(sampler, keys, groups=2)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert run(resumed, 3) == found

    forgetful = collector(sampler, keys, groups=2)
    forgetful.load_state_dict({})
    assert reasons(run(forgetful, 3)) == {}


def test_groups_that_a_killed_step_had_chosen_are_not_chosen_among_again():
    """Its weights may have served already: with fewer groups their number would mean others."""
    spreads = [0.9, 0.5, 0.1, 0.05]

    class Reserved(ScriptedAttempts):
        """Gives what a step had reserved: its two groups of the largest spread."""

        async def round(self, step, tasks):
            return RolloutRound((await super().round(step, tasks[:2])).trajectories, last=True)

    half = {"keep_groups": 0.5}
    whole = run(collector(ScriptedAttempts(lambda place, _: [spreads[place], 0.0]), half))
    again = run(collector(Reserved(lambda place, _: [spreads[place], 0.0]), half))
    assert [t.id for t in again.trainable] == [t.id for t in whole.trainable] != []
    assert again.dropped == {}


def test_a_full_batch_has_none_below_the_usual_spread():
    """Each further round is filtered too, and once only: the mean of step 2 is over its five
    groups."""
    sampler = ScriptedAttempts(
        lambda place, step: (
            [0.8, 0.0] if step == 1 or len(sampler.asked) > 2 else [0.2 + place, 0.0]
        )
    )
    one = collector(
        sampler,
        {
            "rlpr_beta": 0.5,
            "rlpr_decay": 0.0,
            "rlpr_record_from": 1,
            "rlpr_start": 2,
            "dynamic_sampling": 5,
        },
        groups=2,
    )
    run(one, 1)
    found = run(one, 2)
    assert reasons(found) == {"below-usual-spread": {"train-2"}, "surplus": {"train-2+1"}}
    assert {t.task_id for t in found.trainable} == {"train-3", "train-2+0"}

    spread = fmean([0.2, 1.2, 0.8, 0.8]) * 0.5**0.5
    assert one.state_dict()["rlpr"]["mean"] == pytest.approx(spread)


def test_without_rlpr_there_is_nothing_to_remember():
    one = collector(ScriptedAttempts(lambda place, step: DIFFERENT), {})
    assert one.state_dict() == {}
    one.load_state_dict({"rlpr": {"step": 3}})  # switched off since


def test_each_group_of_remax_has_its_greedy_attempt():
    sampler = ScriptedAttempts(
        lambda place, step: [1.0, 0.5], lambda place: [0.25, None, 0.75][place]
    )
    found = run(collector(sampler, {"name": "remax"}, groups=3))
    assert found.baselines == {"train-0": 0.25, "train-2": 0.75}
    assert {t.task_id for t in found.trainable} == {"train-0", "train-2"}
    assert reasons(found) == {
        "baseline": {"train-0", "train-1", "train-2"},
        "no-baseline": {"train-1"},
    }
    assert len(found.trajectories) == 9
    assert found.metrics["rollout/baseline_reward"] == 0.5
    assert found.metrics["critic/score/mean"] == 0.75, "of the members, the greedy attempts aside"
    assert (found.metrics["rollout/in"], found.metrics["group/num"]) == (6, 3)
    assert not any("baseline" in t.group_id for t in found.trainable)
    assert found.metrics["rollout/dropped"] == found.metrics["rollout/dropped/no-baseline"] == 2


def test_others_have_no_greedy_attempt():
    found = run(collector(ScriptedAttempts(lambda place, step: DIFFERENT), {}))
    assert found.baselines == {}
    assert "rollout/baseline_reward" not in found.metrics


def test_the_length_changes_rewards_after_the_filters():
    """Members have 1 and 2 tokens of at most 4. Equal rewards stay equal to the filter, though
    shaping would tell them apart."""
    sampler = ScriptedAttempts(
        lambda place, step: ALIKE if place == 0 else DIFFERENT, lambda place: 0.5
    )
    found = run(collector(sampler, {"length_shaping": "linear", "length_weight": 0.1}, groups=2))
    assert reasons(found) == {"zero-variance": {"train-0"}}
    assert [t.reward for t in found.trainable] == pytest.approx([0.9, -0.2])
    assert [t.reward_parts for t in found.trainable] == [
        pytest.approx({"environment": 1, "length": -0.1}),
        pytest.approx({"environment": 0, "length": -0.2}),
    ]
    assert [t.reward for t in found.trajectories] == [1.0, 1.0, 1.0, 0.0], (
        "the store keeps what was earned"
    )
    assert found.metrics["critic/score/mean"] == 0.75
    assert found.metrics["reward_parts/environment/mean"] == 0.75
    assert found.metrics["reward_parts/length/mean"] == pytest.approx(-0.15)

    soft = run(
        collector(sampler, {"length_shaping": "soft_overlong", "length_buffer": 4}, groups=2)
    )
    assert [t.reward for t in soft.trainable] == pytest.approx([0.75, -0.5]), (
        "max_new_tokens times max_turns is 4"
    )

    remax = run(
        collector(
            sampler, {"name": "remax", "length_shaping": "linear", "length_weight": 0.1}, groups=2
        )
    )
    assert remax.baselines == pytest.approx({"train-0": 0.4, "train-1": 0.4}), (
        "the greedy attempt's length counts as well"
    )
    assert remax.metrics["rollout/baseline_reward"] == 0.5


def test_a_small_share_of_the_groups():
    sampler = ScriptedAttempts(lambda place, step: [place / 4, 0.0])
    found = run(collector(sampler, {"name": "starpo_s"}))
    assert {t.task_id for t in found.trainable} == {"train-3"}
    assert reasons(found) == {"small-spread": {"train-0", "train-1", "train-2"}}


REFILLING = (
    "algorithm.dynamic_sampling=3",
    "algorithm.rlpr_beta=0.9",
    "algorithm.rlpr_record_from=1",
    "algorithm.rlpr_start=2",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_config, quiet_view, outcome_of):
    folder = tmp_path_factory.mktemp("refilling") / "run"
    train(small_config(folder, *REFILLING), view=quiet_view())
    return outcome_of(folder)


def test_the_refilling_run_has_something_to_lose(whole):
    rows = [row for row in whole["metrics"] if "rollout/rounds" in row]
    assert len(rows) == 4
    assert max(row["rollout/rounds"] for row in rows) > 1

    found = {entry[9] for entry in whole["trajectories"].values()}
    assert {"zero-variance", "below-usual-spread"} <= found
    assert whole["state"]["source"]["rlpr"]["mean"] > 0

    refilled = [name for name in whole["trajectories"] if "+" in name]
    assert refilled
    assert all(name.startswith(f"train-{whole['trajectories'][name][6]}+") for name in refilled), (
        "ids of the step's own"
    )
    assert any(row["reward_parts/environment/mean"] for row in rows)


def test_refilling_resumes_bit_for_bit(
    whole, tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    config = small_config(tmp_path / "run", *REFILLING)
    for step in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            train(config, resume=step > 1, view=quiet_view(step=step))
    train(config, resume=True, view=quiet_view())
    assert_same(outcome_of(config.run_dir), whole)


def test_a_broken_step_is_collected_again(
    whole, tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    """The store has tasks and trajectories of all rounds of step 4 already, the newest checkpoint
    is that of step 2."""

    class Breaking(type(quiet_view())):
        def phase(self, name, detail=""):
            if (name, detail) == ("training", "step 4"):
                raise RuntimeError("power cut")
            super().phase(name, detail)

    config = small_config(tmp_path / "run", *REFILLING)
    with pytest.raises(RuntimeError, match="power cut"):
        train(config, view=Breaking())

    train(config, resume=True, view=quiet_view())
    assert_same(outcome_of(config.run_dir), whole)


def test_greedy_attempts_of_a_real_policy(tmp_path, small_config):
    """Stored beside the group and never trained on; drawn at temperature 0: the same attempt again
    is the same."""
    config = small_config(tmp_path / "run", "algorithm.name=remax", "algorithm.dynamic_sampling=2")

    async def work(name: str):
        async with open_components(config, store_url=f"sqlite:///{tmp_path / name}") as parts:
            found = await Collector(config, SynchronousRollouts(parts), parts.tasks).collect(1)
            return (
                found,
                [trajectory async for trajectory in parts.store.trajectories()],
                await parts.store.counts(),
            )

    found, stored, counts = asyncio.run(work("one.sqlite"))
    greedy = [t for t in found.trajectories if found.dropped.get(t.id) == "baseline"]
    assert {t.task_id: t.reward for t in greedy} == found.baselines
    assert {t.task_id for t in greedy} == {t.task_id for t in found.trajectories}
    assert {turn.temperature for t in greedy for turn in t.turns} == {0.0}
    assert {turn.temperature for t in found.trainable for turn in t.turns} <= {1.0}
    assert {one.trajectory.id for one in stored} == {t.id for t in found.trajectories}
    assert counts["tasks/completed"] == len(greedy)

    again, *_ = asyncio.run(work("two.sqlite"))
    assert again.baselines == found.baselines
    assert [t.turns for t in again.trajectories] == [t.turns for t in found.trajectories]
