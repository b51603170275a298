"""Turns rewards that an agent posted to the gateway, or that a program printed, into an outcome."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import msgspec

from agentevo.rewards.returned_values import named_parts, plain_number
from agentevo.types import Outcome


class PostedReward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a post, or of a program's last line: a reward of the whole attempt, rewards by
    name, or a reward of one turn."""

    reward: float | None = None
    rewards: dict[str, float] = {}
    turn: int | None = None
    agent: str | None = None
    """The agent that gets the reward, in a rollout of several. None: all of them."""


_NUMBER = re.compile(
    r"[+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?|nan|inf(?:inity)?)", re.A | re.I
)
"""A number as programs print it; its value is checked later, like that of other rewards."""


def printed_reward(stdout: str, *, has_posted: bool = False) -> PostedReward | None:
    """The reward in the last line; None if the line is not a reward. A bare number is a reward
    unless the program has posted its rewards. Raises ValueError for a malformed reward."""
    last = stdout.rstrip().rpartition("\n")[2].strip()
    if _NUMBER.fullmatch(last):
        return None if has_posted else PostedReward(reward=float(last))

    try:
        content = msgspec.json.decode(last) if last.startswith("{") else None
    except (msgspec.DecodeError, RecursionError):
        return None

    if not isinstance(content, dict) or content.keys().isdisjoint({"reward", "rewards"}):
        return None

    try:
        return msgspec.convert(content, PostedReward)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"the last line of its stdout is not a reward: {error}: {_FORMS}"
        ) from error


_FORMS = 'write {"reward": 1.0}, {"rewards": {"name": 1.0}} or {"turn": 0, "reward": 1.0}'


def check_posted(reward: PostedReward) -> None:
    """Raises TypeError or ValueError for a malformed reward."""
    has_one_form = (reward.reward is None) != (not reward.rewards)
    if not has_one_form or (reward.turn is not None and reward.reward is None):
        raise ValueError(_FORMS)
    if reward.reward is not None:
        plain_number(reward.reward, "the reward")
    _check_rewards(reward.rewards)


class RewardSums:
    """The sums of the rewards posted so far for each agent: by name, and by turn. Rewards of the
    same name or turn add up."""

    def __init__(self) -> None:
        self._parts: dict[str | None, dict[str, float]] = {}
        self._turns: dict[str | None, dict[int, float]] = {}

    def add(self, rewards: Sequence[PostedReward]) -> None:
        """Adds either all of the rewards or none. Raises TypeError or ValueError for rewards that
        don't fit into one outcome with the earlier ones."""
        parts = dict(self._parts)
        turns = dict(self._turns)
        for reward in rewards:
            check_posted(reward)
            if reward.rewards:
                agent_parts = parts[reward.agent] = _check_rewards(
                    parts.get(reward.agent, {}) | reward.rewards
                )
                plain_number(math.fsum(agent_parts.values()), "the sum of the rewards by name")
            elif reward.turn is not None:
                sums = turns[reward.agent] = dict(turns.get(reward.agent, {}))
                sums[reward.turn] = sums.get(reward.turn, 0.0) + (reward.reward or 0.0)
                plain_number(sums[reward.turn], f"the sum of the rewards of turn {reward.turn}")
                plain_number(math.fsum(sums.values()), "the sum of the rewards of the turns")
            elif reward.reward is not None and parts.get(reward.agent):
                total = math.fsum(parts[reward.agent].values())
                if not math.isclose(total, reward.reward, rel_tol=1e-6, abs_tol=1e-6):
                    raise ValueError(
                        f"the reward is {reward.reward:g}, but the rewards by name posted before "
                        f"it sum to {total:g}: post all rewards by name first, or leave out one of "
                        "the two kinds"
                    )

        self._parts = parts
        self._turns = turns


def outcome_of_rewards(
    rewards: Sequence[PostedReward], received: Mapping[str, Sequence[int]] | None = None
) -> Outcome:
    """The outcome of posted rewards, in their order. Rewards of one turn add up. For a name and for
    the attempt, the last reward counts. Without a reward of the attempt, its value is the sum of
    its parts or, without parts, of its turns. Without any reward, a scorer decides. Named agents
    have their own outcomes. `received`: for each agent, the indices of the turns that its client
    received, in the order in which the client counts them. Without it, turns are given by index.
    Raises TypeError or ValueError."""

    def outcome(agent: str | None) -> Outcome:
        turns = None if received is None else received.get(agent or "", ())
        return _outcome([reward for reward in rewards if reward.agent == agent], turns)

    names = dict.fromkeys(reward.agent for reward in rewards if reward.agent is not None)
    all_agents = outcome(None)
    agents = {name: outcome(name) for name in names}
    return msgspec.structs.replace(all_agents, agents=agents)


def _outcome(rewards: Sequence[PostedReward], received: Sequence[int] | None) -> Outcome:
    parts: dict[str, float] = {}
    turns: dict[int, float] = {}
    total: float | None = None
    for posted in rewards:
        parts |= _check_rewards(posted.rewards)
        if posted.reward is None:
            continue

        reward = plain_number(posted.reward, "the reward")
        if posted.turn is None:
            total = reward
        else:
            turn = _turn(posted.turn, received)
            turns[turn] = turns.get(turn, 0.0) + reward

    if total is None:
        if not (parts or turns):
            return Outcome(reward=None)
        total = math.fsum((parts or turns).values())

    return Outcome(reward=total, success=total >= 1.0, reward_parts=parts, turn_rewards=turns)


def _turn(number: int, received: Sequence[int] | None) -> int:
    """The turn index of a client's turn number."""
    if received is None:
        return number
    if not 0 <= number < len(received):
        raise ValueError(
            f"a reward names turn {number}, but {len(received)} turns were received: the first is 0"
        )
    return received[number]


def _check_rewards(rewards: Mapping[str, float]) -> dict[str, float]:
    return named_parts(rewards, "the rewards")
