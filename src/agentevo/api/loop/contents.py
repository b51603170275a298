"""Checks of submitted attempts. Seals cover tokens and names; the program writes rewards, metrics
and reasons freely, so no value of those may end the run.

The proof that the run's engine sampled an attempt's tokens: a program may change the rewards of
a group, but not its turns.

    seal = HMAC-SHA256(secret of the run, digest of the trajectory without its outcome)

The digest (store/codec.py) covers ids of trajectory, task and group, the number of the attempt, and
of every turn its ids, float32 log-probs, versions, temperature, seed and messages.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from agentevo.api.loop.encoding import decode, encode
from agentevo.api.loop.records import SealError
from agentevo.errors import LONGEST, ConfigError, StoreError, shown
from agentevo.rewards.returned_values import MAX_METRIC, plain_number, plain_numbers
from agentevo.store.codec import content_digest
from agentevo.types import Task, Trajectory


class Sealer:
    """Seals attempts, and checks seals."""

    def __init__(self, secret: str) -> None:
        self._key = hashlib.sha256(f"attempts {secret}".encode()).digest()

    def seal(self, trajectory: Trajectory) -> str:
        """The trajectory's proof, which does not depend on its outcome."""
        bare = Trajectory(
            id=trajectory.id,
            task_id=trajectory.task_id,
            group_id=trajectory.group_id,
            attempt=trajectory.attempt,
            turns=[msgspec.structs.replace(turn, reward=0.0) for turn in trajectory.turns],
        )
        return hmac.new(self._key, content_digest(bare), hashlib.sha256).hexdigest()

    def check(self, trajectory: Trajectory, seal: str | None) -> None:
        """Raises SealError for tokens that differ from the sealed ones."""
        try:
            expected = self.seal(trajectory)
        except StoreError as error:
            raise SealError(f"{error}; submit attempts as they were gathered") from error

        is_text = isinstance(seal, str) and seal.isascii()
        if not is_text or not hmac.compare_digest(expected, str(seal)):
            raise SealError(
                f"the attempt {trajectory.id!r} is not what this run's engine sampled: its "
                f"turns, task, group or number were changed, or it belongs to another run; you "
                f"can change rewards, but not tokens"
            )


LONGEST_ID = 1000
"""Characters of a task's or group's id."""


def check_outcome(trajectory: Trajectory, *, is_baseline: bool = False) -> None:
    """Raises ConfigError for an attempt whose outcome can't be trained on or stored. Only a
    baseline may be greedy."""
    try:
        plain_number(trajectory.reward, "its reward")
        plain_numbers(trajectory.reward_parts, "its reward_parts")
        plain_numbers(trajectory.metrics, "its metrics", MAX_METRIC)

        for turn in trajectory.turns:
            plain_number(turn.reward, f"the reward of its turn {turn.index}")

        if trajectory.error is not None and len(trajectory.error) > 2 * LONGEST:
            raise ValueError(f"its error has {len(trajectory.error)} characters")

        outcome = msgspec.structs.replace(trajectory, turns=[], remote_turns=[])
        decode(encode(outcome), Trajectory)  # a program's own objects have no types so far
    except Exception as error:
        raise ConfigError(f"train: the attempt {shown(trajectory.id)}: {error}") from error

    if not is_baseline and any(
        turn.overrides is None and turn.temperature == 0 for turn in trajectory.turns
    ):
        raise ConfigError(
            f"train: the attempt {shown(trajectory.id)} is greedy, which is for evaluation only: "
            f"submit sampled attempts"
        )


def check_task(task: Task) -> None:
    """Raises ConfigError for an invalid task."""
    check_id(task.id, "a task")
    try:
        decode(encode(task), Task)
    except Exception as error:
        raise ConfigError(f"train: the task {shown(task.id)}: {error}") from error


def check_id(name: object, what: str) -> None:
    """Raises ConfigError for an id that is not a text, or is too long."""
    if not isinstance(name, str) or len(name) > LONGEST_ID:
        raise ConfigError(
            f"{shown(name)} is not a valid id of {what}: give a text of at most {LONGEST_ID} "
            f"characters"
        )
