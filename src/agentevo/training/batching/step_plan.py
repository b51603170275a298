"""The training data of a step, written into its record: The record is enough to repeat the step,
and to prove later what the step trained on.

    digest of a trajectory = sha256(the whole trajectory with its final reward, without times)
    digest of a step       = sha256(those of its trajectories, in order)

Two sequences of trajectories have the same digest only if a step computes the same from both and
reports the same about them: ids of task and group, attempt, tree, tokens, float32 log-probs,
versions, temperatures, seeds, messages, rewards and their parts, success, metrics. The chain of
records (runs/folder/chain.py) protects the plan itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from agentevo.errors import TrainingError
from agentevo.store.codec import content_digest
from agentevo.store.store import Store
from agentevo.training.batching.shaping import PART, with_final_reward
from agentevo.types import Trajectory

KEY = "plan"
"""The key of the plan in a step's record."""
SHOWN = 16
"""The number of hex digits of each trajectory's digest that a plan keeps."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    ids: list[str]
    """The ids of the step's own trajectories, in the order of training."""
    replayed: list[str] = []
    """The ids of successes of earlier steps, which are trained on after `ids`, in this order
    (algorithm.replay_successes)."""
    replayed_groups: dict[str, str] = {}
    """Id of each of these -> the group that it joins."""
    replay_max_age: int = 0
    """The bound on the age of their tokens, in place of `staleness`."""
    dropped: dict[str, list[str]] = {}
    """Reason -> the ids of the trajectories that the step did not train on."""
    rewards: dict[str, float] = {}
    """Id -> final reward of each trajectory whose reward was shaped, so that it may differ from the
    one in the store."""
    baselines: dict[str, float] = {}
    """Task id -> final reward of its greedy attempt, for advantages that need it."""
    staleness: int = 0
    """The bound on a token's age in this step. The age is the trainer's version (step - 1) minus
    the token's version."""
    policy: str = "wait"
    """The value of `rollout.policy` at that time."""
    credit: str = ""
    """The rule that decided each turn's reward (`AlgorithmSection.credit_rule`). Empty in old
    records, from before there were several rules."""
    masked_tokens: int = 0
    """The number of tokens of these trajectories that were too old to be trained on."""
    digests: list[str] = []
    """The first 16 digits of each trajectory's digest. If `digest` differs, they show which
    trajectory differs."""
    digest: str
    """`plan_digest` of the trajectories with their final rewards."""

    @classmethod
    def make(
        cls,
        trained: Sequence[Trajectory],
        *,
        earned: Mapping[str, float],
        baselines: Mapping[str, float],
        staleness: int,
        policy: str,
        masked_tokens: int = 0,
        credit: str = "",
        dropped: Mapping[str, str] | None = None,
        replayed: Collection[str] = (),
        replay_max_age: int = 0,
    ) -> Self:
        """Makes the plan of trajectories that are in training order and have their final rewards.
        `earned`: id -> reward in the store. `dropped`: id -> reason. `replayed`: ids of the last
        trajectories, which are successes of earlier steps, in the groups that they join."""
        digests = [content_digest(t) for t in trained]
        reasons: dict[str, list[str]] = {}
        for name, reason in (dropped or {}).items():
            reasons.setdefault(reason, []).append(name)

        return cls(
            ids=[t.id for t in trained if t.id not in replayed],
            replayed=[t.id for t in trained if t.id in replayed],
            replayed_groups={t.id: t.group_id for t in trained if t.id in replayed},
            replay_max_age=replay_max_age,
            dropped=reasons,
            rewards={
                t.id: t.reward
                for t in trained
                if t.reward != earned[t.id] or PART in t.reward_parts
            },
            baselines=dict(baselines),
            staleness=staleness,
            policy=policy,
            masked_tokens=masked_tokens,
            credit=credit,
            digests=[digest.hex()[:SHOWN] for digest in digests],
            digest=_whole(digests),
        )

    @classmethod
    def of(cls, step: int, record: Mapping[str, Any]) -> Self:
        """Reads the plan in a step's record. Raises TrainingError, which names the missing or wrong
        part."""
        if KEY not in record:
            raise TrainingError(
                f"the record of step {step} has no {KEY}: it was written before steps said what "
                "they trained on"
            )

        try:
            return msgspec.convert(record[KEY], cls)
        except msgspec.ValidationError as error:
            raise TrainingError(
                f"the {KEY} in the record of step {step} can't be read: {error}"
            ) from error

    def to_record(self) -> dict[str, Any]:
        """Plain JSON values, for `record["plan"]`."""
        record: dict[str, Any] = msgspec.to_builtins(self)
        return record

    @property
    def trained_ids(self) -> list[str]:
        """The ids of all trajectories of the step, in the order of training."""
        return [*self.ids, *self.replayed]

    async def read_trained(self, store: Store, step: int) -> list[Trajectory]:
        """The trajectories of the plan of this step as the store has them, in any order. Raises
        UnusableStoreError if a replayed one is gone."""
        rows = [row.trajectory async for row in store.trajectories(trained_step=step)]
        return rows + [await store.trajectory(name) for name in self.replayed]

    def restore_trained(self, stored: Iterable[Trajectory]) -> list[Trajectory]:
        """The trajectories in the order and with the final rewards of the training step. Raises
        TrainingError if one is missing or differs."""
        by_id = {t.id: t for t in stored}
        missing = [name for name in self.trained_ids if name not in by_id]
        if missing:
            raise TrainingError(
                f"the plan names {missing[0]!r} (and {len(missing) - 1} more), which the store "
                "does not have"
            )

        trajectories = [self.final(by_id[name]) for name in self.trained_ids]
        digests = [content_digest(t) for t in trajectories]
        if _whole(digests) != self.digest:
            pairs = zip(self.trained_ids, self.digests, digests, strict=False)
            altered = [name for name, was, now in pairs if now.hex()[:SHOWN] != was]
            which = f"{altered[0]!r} (and {len(altered) - 1} more)" if altered else "their order"
            raise TrainingError(
                "the trajectories in the store are not those that were trained on: changed was "
                f"{which}"
            )

        return trajectories

    def check_unchanged(self, stored: Trajectory) -> None:
        """Raises TrainingError if a trajectory of the plan is not what the step trained on."""
        digests = dict(zip(self.trained_ids, self.digests, strict=False))
        digest = content_digest(self.final(stored)).hex()[:SHOWN]
        if self.digests and digests.get(stored.id) != digest:
            raise TrainingError(
                f"trajectory {stored.id!r} in the store is not the one that was trained on: "
                "restore the store from a copy (`agentevo audit` lists what was changed)"
            )

    def final(self, stored: Trajectory) -> Trajectory:
        """A trajectory of the plan with its final reward, in the group that it joined."""
        if stored.id in self.replayed_groups:
            stored = replace(stored, group_id=self.replayed_groups[stored.id])
        if stored.id in self.rewards:
            stored = with_final_reward(stored, self.rewards[stored.id])
        return stored


def plan_digest(trajectories: Iterable[Trajectory]) -> str:
    """The digest of a step in hex; see the module."""
    return _whole(content_digest(t) for t in trajectories)


def _whole(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()
