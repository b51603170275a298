"""What an agent of several returns, whose reward it is, and whom a policy of several asks."""

from __future__ import annotations

import pytest

from agentevo.agents.agent import outcome_of
from agentevo.agents.policy import Policy
from agentevo.agents.posted_rewards import PostedReward, outcome_of_rewards
from agentevo.errors import BadRequestError
from agentevo.types import Outcome, Trajectory, group_of_agent

AGENTS = ("solver", "critic")
OWN = Outcome(reward=0.5, success=True)


@pytest.mark.parametrize(
    ("returned", "solver", "critic"),
    [
        (1.0, 1.0, 1.0),
        ({"solver": 1.0, "critic": 0.25}, 1.0, 0.25),
        ({"solver": 1.0}, 1.0, None),
        ({"solver": {"right": 1.0, "late": -0.5}, "critic": [0.0, 2.0]}, 0.5, 2.0),
        ({"right": 1.0, "late": -0.5}, 0.5, 0.5),
        (Outcome(reward=0.0, agents={"critic": OWN}), 0.0, 0.5),
        (None, None, None),
    ],
)
def test_rewards_by_agent(returned, solver, critic):
    outcome = outcome_of(returned, AGENTS)
    rewards = [outcome.agents.get(name, outcome).reward for name in AGENTS]
    assert rewards == [solver, critic]
    assert outcome_of(outcome, AGENTS) == outcome


@pytest.mark.parametrize(
    ("returned", "agents", "said"),
    [
        ({"solver": 1.0, "judge": 1.0}, AGENTS, "'judge', which is not an agent: use solver"),
        ({"sovler": 1.0}, AGENTS, "'sovler' is not an agent; did you mean 'solver'"),
        ([1.0, 2.0], AGENTS, "rewards of turns need the name of their agent"),
        ({0: 1.0}, AGENTS, "rewards of turns need the name of their agent"),
        (Outcome(reward=1.0, agents={"solver": OWN}), (), "has no named agents"),
        (
            {"solver": Outcome(reward=1.0, agents={"critic": OWN})},
            AGENTS,
            "has no named agents",
        ),
        ({"solver": "much"}, AGENTS, "returned a str"),
    ],
)
def test_what_names_the_wrong_one_is_refused(returned, agents, said):
    with pytest.raises((TypeError, ValueError), match=said):
        outcome_of(returned, agents)


def test_posted_rewards_by_agent():
    posted = [
        PostedReward(reward=1.0),
        PostedReward(reward=0.5, agent="critic", turn=1),
        PostedReward(reward=0.25, agent="critic", turn=1),
    ]
    outcome = outcome_of(outcome_of_rewards(posted), AGENTS)
    assert outcome.reward == 1.0 and outcome.agents["critic"].turn_rewards == {1: 0.75}


def test_a_trajectory_knows_its_agent():
    for task in ("a", "odd@1:name/x", "a/train@2"):
        group = f"{task}/train@3"
        assert Trajectory(id="x", task_id=task, group_id=group).agent == ""
        own = Trajectory(id="x", task_id=task, group_id=group_of_agent(group, "solver"))
        assert own.agent == "solver"


class Talk:
    """In the place of a conversation."""

    turns = ()


def test_a_policy_of_several_is_asked_by_name():
    both = {"solver": Talk(), "critic": Talk()}
    policy = Policy(both["solver"], agents=both)
    assert policy.agents == AGENTS and not policy.was_asked
    assert policy["critic"].conversation is both["critic"]

    with pytest.raises(BadRequestError, match=r"ask one of them, policy\[\"solver\"\]"):
        _ = policy.turns
    with pytest.raises(BadRequestError, match=r"no agent 'judge' \(known: solver, critic\)"):
        policy["judge"]
    with pytest.raises(BadRequestError, match="name them in the recipe's section agents"):
        Policy(Talk())["solver"]
