"""Groups of attempts as plain data: a program can inspect them, change their rewards, drop
attempts, write them to a file, and train on them later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from agentevo.api.loop.encoding import decode, encode
from agentevo.errors import ConfigError
from agentevo.rewards.returned_values import plain_number
from agentevo.rollout.sampler import BASELINE
from agentevo.types import Task, Trajectory
from agentevo.types.images import ImageFile


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts at one task, which are compared with each other."""

    id: str
    task: Task
    trajectories: list[Trajectory]
    """In order of attempt number, including failed attempts. With several agents, the attempts
    of each agent follow one another."""
    baseline: Trajectory | None = None
    """The greedy attempt that the algorithm compares the others with, if it needs one (remax)."""
    seals: dict[str, str]
    """Trajectory id -> the proof that the engine sampled its tokens. Training requires a proof."""
    images: list[ImageFile] = []
    """The images that the task names, and those that remote models were shown. The run has those
    that the policy has seen."""

    @property
    def rewards(self) -> list[float]:
        """The reward of each trajectory. The reward of a failed trajectory has no meaning."""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def completed(self) -> list[Trajectory]:
        """The completed trajectories, which training uses."""
        return [trajectory for trajectory in self.trajectories if trajectory.status == "completed"]

    @property
    def members(self) -> list[Trajectory]:
        """The trajectories and, if there is one, the baseline."""
        return [*self.trajectories, *([] if self.baseline is None else [self.baseline])]

    @property
    def agents(self) -> list[str]:
        """The names of the agents that have trajectories. A single agent has an empty name."""
        return list(dict.fromkeys(trajectory.agent for trajectory in self.trajectories))

    def of(self, *agents: str) -> Group:
        """The group with only the trajectories of these agents. Raises ConfigError for a name
        without trajectories."""
        if unknown := set(agents) - set(self.agents):
            raise ConfigError(
                f"{min(unknown)!r} is not an agent of the group {self.id}: "
                f"{', '.join(filter(None, self.agents)) or 'it has a single agent, without a name'}"
            )

        return msgspec.structs.replace(
            self,
            trajectories=[
                trajectory for trajectory in self.trajectories if trajectory.agent in agents
            ],
        )

    def with_rewards(self, rewards: Sequence[float] | Mapping[str, float]) -> Group:
        """The same attempts with other rewards, for example from a judge that compares them. Pass
        one reward for each trajectory in order, then a reward for the baseline if there is one, or
        a mapping from trajectory id to reward. Reward parts and rewards of single turns are
        removed."""
        ids = [trajectory.id for trajectory in self.members]
        if not isinstance(rewards, Mapping):
            if len(rewards) != len(ids):
                raise ConfigError(
                    f"{len(rewards)} rewards for the {len(ids)} attempts of the group {self.id}: "
                    "give a reward for each, also for failed attempts, or a mapping from id to "
                    "reward"
                )
            rewards = dict(zip(ids, rewards, strict=True))

        if unknown := rewards.keys() - set(ids):
            raise ConfigError(f"{min(unknown)!r} is not an attempt of the group {self.id}")

        try:
            new_rewards = {
                name: plain_number(value, "the reward") for name, value in rewards.items()
            }
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the group {self.id}: {error}") from error

        return self._map_members(
            lambda trajectory: (
                _with_reward(trajectory, new_rewards[trajectory.id])
                if trajectory.id in new_rewards
                else trajectory
            )
        )

    def without(self, *ids: str) -> Group:
        """The group without these attempts."""
        return self._map_members(lambda trajectory: None if trajectory.id in ids else trajectory)

    def _map_members(self, change: Callable[[Trajectory], Trajectory | None]) -> Group:
        """The group with the result of a function for each attempt."""
        trajectories = [
            new_trajectory
            for trajectory in self.trajectories
            if (new_trajectory := change(trajectory)) is not None
        ]
        baseline = None if self.baseline is None else change(self.baseline)
        return msgspec.structs.replace(self, trajectories=trajectories, baseline=baseline)

    def encode(self) -> bytes:
        """The group as JSON, to write to a file."""
        return encode(self)

    @classmethod
    def decode(cls, content: bytes) -> Group:
        """The inverse of `encode`. Raises BadRequestError for an invalid group."""
        return decode(content, cls)


def baseline_name(group_id: str, task_id: str) -> str:
    """The id of the separate group of the greedy attempt that belongs to `group_id`."""
    return f"{task_id}/{BASELINE}@{group_id.removeprefix(f'{task_id}/train@')}"


def _with_reward(trajectory: Trajectory, reward: float) -> Trajectory:
    if trajectory.status != "completed":
        return trajectory
    return msgspec.structs.replace(
        trajectory,
        reward=reward,
        reward_parts={},
        success=reward >= 1.0,
        turns=[msgspec.structs.replace(turn, reward=0.0) for turn in trajectory.turns],
    )
