"""Each part of a run is killed again and again, at moments that reach all it does: what was trained
on in the end is what an unbroken run trains on, each attempt once. CI kills once in each phase;
`make soak` kills hundreds of times at random."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from fault_attacks import Tally, attack
from fault_checks import Account, account, check, expected_ids, final_weights
from fault_environment import under
from fault_processes import AIMED_AT, Component
from servers import unused_name

from agentevo.config import RunConfig

pytestmark = pytest.mark.slow

Small = Callable[..., RunConfig]
Members = Callable[..., list[Component]]

LIMIT_S = 300.0
"""Longest time of a run on a busy machine, beside 3 s for each kill."""


def killed(
    make: Members,
    config: RunConfig,
    kinds: tuple[str, ...],
    victim: str,
    kills: int | None,
    *,
    seed: int,
) -> tuple[Tally, Account]:
    """A run whose part `victim` is killed, and what it has come to."""
    members = make(config, *kinds)
    one = next(member for member in members if member.kind == victim)
    tally = attack(
        members, one, kills=kills, rng=random.Random(seed), within_s=LIMIT_S + 3.0 * (kills or 0)
    )
    print(f"{victim}: {tally}")
    return tally, check(config)


def steps(kills: int, per_kill: float) -> str:
    return f"trainer.steps={int(12 + per_kill * kills)}"


APART = ("serve", "sample", "learn")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("victim", "kinds"),
    [("sample", APART), ("serve", APART), ("learn", APART), ("train", ("train",))],
)
def test_a_part_that_is_killed(
    victim: str, kinds: tuple[str, ...], kills: int | None, small: Small, members: Members
) -> None:
    config = small(steps(len(AIMED_AT[victim]) if kills is None else kills, 2))
    tally, found = killed(members, config, kinds, victim, kills, seed=1)
    assert set(AIMED_AT[victim]) <= set(tally.phases), "some phases were never hit"
    assert found.trained == expected_ids(config)
    assert max(found.ages) <= 2
    assert {task.state for task in found.tasks.values()} == {"completed"}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("policy", "kinds", "victim"),
    [
        ("mask", ("train",), "train"),
        pytest.param("correct", APART, "learn", marks=pytest.mark.soak),
        pytest.param("cancel", ("train",), "train", marks=pytest.mark.soak),
        pytest.param("mask", APART, "sample", marks=pytest.mark.soak),
        pytest.param("cancel", APART, "serve", marks=pytest.mark.soak),
    ],
)
def test_policies_that_take_what_is_ready(
    policy: str,
    kinds: tuple[str, ...],
    victim: str,
    kills: int | None,
    small: Small,
    members: Members,
) -> None:
    """What they train on depends on the moment; the bound and the ledger do not."""
    few = 3 if kills is None else kills // 10
    config = small(steps(few, 4), *under(policy))
    killed(members, config, kinds, victim, few, seed=2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", ["serve", "learn"])
def test_weights_over_a_process_group(
    victim: str, kills: int | None, small: Small, members: Members
) -> None:
    few = 3 if kills is None else kills // 10
    config = small(steps(few, 2), "rollout.transport=broadcast")
    _, found = killed(members, config, APART, victim, few, seed=5)
    assert found.trained == expected_ids(config)
    assert max(found.ages) <= 2


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", ["sample", "learn"])
@pytest.mark.parametrize("server", ["postgresql", "mongodb"])
def test_on_a_database_server(
    server: str,
    victim: str,
    kills: int | None,
    small: Small,
    members: Members,
    request: pytest.FixtureRequest,
) -> None:
    few = 3 if kills is None else kills // 15
    config = small(steps(few, 4), f"store.url={request.getfixturevalue(server).url(unused_name())}")
    _, found = killed(members, config, APART, victim, few, seed=4)
    assert found.trained == expected_ids(config)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_in_turn_the_tokens_are_the_same_too(
    kills: int | None, small: Small, members: Members
) -> None:
    """Staleness 0 in one process: same tokens as an unbroken run, log-probs and weights up to
    rounding (a step that was begun twice is computed in other batches)."""
    few = 3 if kills is None else kills // 4
    killed_config = small(steps(few, 3), "rollout.staleness=0")
    whole_config = small(steps(few, 3), "rollout.staleness=0", name="whole")
    _, broken = killed(members, killed_config, ("train",), "train", few, seed=3)
    (alone,) = members(whole_config, "train")
    alone.start()
    assert alone.reap() == 0, alone.tail()

    whole = account(whole_config)
    assert [step.record["plan"]["ids"] for step in broken.steps] == [
        step.record["plan"]["ids"] for step in whole.steps
    ]
    assert broken.trajectories.keys() == whole.trajectories.keys()

    for name, trajectory in whole.trajectories.items():
        other = broken.trajectories[name].trajectory
        assert other.reward == trajectory.trajectory.reward
        for was, now in zip(trajectory.trajectory.turns, other.turns, strict=True):
            assert (now.prompt_ids, now.completion_ids, now.versions) == (
                was.prompt_ids,
                was.completion_ids,
                was.versions,
            )
            assert now.logprobs == pytest.approx(was.logprobs, abs=1e-4)

    weights = final_weights(killed_config)
    for name, tensor in final_weights(whole_config).items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-4, rtol=0.0)
