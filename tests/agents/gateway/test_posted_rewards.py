"""Rewards that an agent posts to the gateway: taken, or refused at once."""

from __future__ import annotations

import asyncio

import pytest

from agentevo.agents.agent import outcome_of
from agentevo.agents.posted_rewards import outcome_of_rewards

ASK = {"messages": [{"role": "user", "content": "left or right ?"}]}


@pytest.mark.slow
def test_rewards_are_posted_to_the_session(gateway_of):
    async def talk():
        async with gateway_of(["left"]) as opened:
            policy = opened.policy()
            await opened.post(policy, ASK)
            url = policy.session.reward_url
            bodies = [
                {"reward": 1.0},
                {"rewards": {"right": 0.5}},
                {"turn": 0, "reward": 2.0},
                {"turn": 1, "reward": 2.0},
                {},
                {"reward": "much"},
                {"prize": 1},
            ]
            codes = [(await opened.http.post(url, json=body)).status_code for body in bodies]
            return codes, policy.session.posted

    codes, posted = asyncio.run(talk())
    assert codes == [200, 200, 200, 400, 400, 400, 400]
    assert [one.reward for one in posted] == [1.0, None, 2.0]


@pytest.mark.parametrize(
    ("bodies", "said"),
    [
        ([{"turn": 0, "reward": 9e11}] * 2, "the sum of the rewards of turn 0 is 1.8e+12"),
        ([{"rewards": {"a": 9e11}}, {"rewards": {"b": 9e11}}], "the sum of the rewards by name"),
        (
            [{"rewards": {"a": 0.5, "b": 0.25}}, {"reward": 1.0}],
            "by name posted before it",
        ),
        ([{"rewards": {f"{own}{n}": 1.0 for n in range(120)}} for own in "ab"], "has 240 names"),
    ],
)
def test_a_reward_that_does_not_go_with_those_before_it_is_refused_at_once(
    gateway_of, bodies, said
):
    """What would fail the attempt at its end is not taken."""

    async def talk():
        async with gateway_of(["left"]) as opened:
            policy = opened.policy()
            await opened.post(policy, ASK)
            url = policy.session.reward_url
            answers = [await opened.http.post(url, json=body) for body in bodies]
            return answers, outcome_of_rewards(policy.session.posted, policy.received)

    answers, outcome = asyncio.run(talk())
    assert [answer.status_code for answer in answers] == [200, 400]
    assert said in answers[1].json()["error"]["message"]
    assert outcome_of(outcome).reward is not None, "what was taken is an outcome"
