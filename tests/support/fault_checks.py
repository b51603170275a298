"""What must be true of a run however often its processes were killed. Read from the store and the
files, not from what the run says of itself: its metrics, and the audit (which is asked too), could
be wrong in the same way."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
from safetensors.torch import load_file

from agentevo.config import RunConfig
from agentevo.runs.audit.audit import Audit, audit
from agentevo.store.opening import open_store
from agentevo.store.records import StepRecord, StoredTask, StoredTrajectory
from agentevo.training.checkpoint import Checkpoints


@dataclass
class Account:
    """A run as its store records it."""

    steps: list[StepRecord]
    tasks: dict[str, StoredTask]
    trajectories: dict[str, StoredTrajectory]
    """Of the split `train`, by id."""
    evaluated: set[str]
    """Tasks of the split `eval`."""
    audit: Audit
    ages: Counter[int] = field(default_factory=Counter)
    """Versions behind the trainer -> tokens of trained trajectories."""

    @property
    def trained(self) -> Counter[str]:
        """Id -> how often a step's plan names it."""
        return Counter(name for step in self.steps for name in step.record["plan"]["ids"])


def account(config: RunConfig) -> Account:
    async def read() -> Account:
        async with await open_store(config.store_url, create=False) as store:
            return Account(
                steps=await store.steps(),
                tasks={task.task.id: task async for task in store.tasks()},
                trajectories={
                    trajectory.trajectory.id: trajectory
                    async for trajectory in store.trajectories(split="train")
                },
                evaluated={one.task_id for one in await store.summaries(split="eval")},
                audit=await audit(store, config.run_dir),
            )

    return asyncio.run(read())


def check(config: RunConfig, *, complete: bool = True) -> Account:
    """Checks every invariant that holds under every policy; `complete` says that the run came to
    its last step. Raises AssertionError."""
    found = account(config)
    last = config.trainer.steps if complete else len(found.steps)
    assert [step.step for step in found.steps] == list(range(1, last + 1)), "steps are missing"

    _check_once(found)
    _check_ages(found, config)
    _check_groups(found, config, complete=complete)

    assert not found.audit.violations, "\n".join(map(str, found.audit.violations))
    assert not found.audit.poison, found.audit.poison

    weights = final_weights(config, complete=complete)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())

    left = [path for path in config.run_dir.rglob("*") if path.name.endswith(".partial")]
    assert not left, f"left half-written: {left}"
    return found


def _check_once(found: Account) -> None:
    """Checks that plans and ledger agree, and that nothing is in two steps or twice in one."""
    twice = {name: count for name, count in found.trained.items() if count > 1}
    assert not twice, f"trained on more than once: {twice}"
    committed = {
        name: trajectory.trained_step
        for name, trajectory in found.trajectories.items()
        if trajectory.state == "committed"
    }
    planned = {name: step.step for step in found.steps for name in step.record["plan"]["ids"]}
    assert committed == planned


def _check_ages(found: Account, config: RunConfig) -> None:
    """Checks that no token of a step s is older than s - 1 - staleness, except those that the
    policies mask and correct left out, and that none is of a later version."""
    bound = config.rollout.staleness
    for step in found.steps:
        masked = 0
        for name in step.record["plan"]["ids"]:
            for turn in found.trajectories[name].trajectory.turns:
                assert len(turn.versions) == len(turn.completion_ids) == len(turn.logprobs) > 0
                assert all(math.isfinite(logprob) for logprob in turn.logprobs)
                for version in turn.versions:
                    age = step.step - 1 - version
                    assert age >= 0, f"step {step.step}: {name} has a token of version {version}"
                    assert age <= bound or config.rollout.policy in ("mask", "correct"), (
                        f"step {step.step}: {name}: age {age}"
                    )
                    masked += age > bound
                    found.ages[age] += 1

        assert masked == step.record["plan"]["masked_tokens"], f"step {step.step}"


def _check_groups(found: Account, config: RunConfig, *, complete: bool) -> None:
    """Checks that no attempt is lost: each group has all its members once, and each was trained on,
    left out for a stated reason, failed for one, or can still be trained on. The next step of an
    incomplete run may be reserved, because a trainer was killed during it."""
    begun = None if complete else len(found.steps) + 1
    groups: defaultdict[str, list[StoredTrajectory]] = defaultdict(list)
    for one in found.trajectories.values():
        groups[one.trajectory.group_id].append(one)

    size = config.trainer.group_size + config.rollout.extra_attempts
    for name, members in groups.items():
        assert sorted(member.trajectory.attempt for member in members) == list(range(size)), (
            f"{name} is not whole"
        )
        assert (
            len({member.trained_step for member in members if member.state == "committed"}) <= 1
        ), f"{name} is in several steps"
        for one in members:
            assert one.state != "reserved" or one.trained_step == begun, (
                f"{one.trajectory.id} is still reserved"
            )
            assert one.state != "dropped" or one.drop_reason, one.trajectory.id
            assert one.state != "failed" or one.trajectory.error, one.trajectory.id

    sampled = {members[0].trajectory.task_id for members in groups.values()}
    done = {name for name, task in found.tasks.items() if task.state == "completed"}
    assert done - found.evaluated == sampled - found.evaluated, (
        "tasks are completed without their attempts, or have attempts without being completed"
    )


def final_weights(config: RunConfig, *, complete: bool = True) -> dict[str, torch.Tensor]:
    path = Checkpoints(config.run_dir / "checkpoints", config.checkpoint.keep_last).find("last")
    assert not complete or path.name == f"step-{config.trainer.steps:06d}"
    return load_file(path / "model.safetensors")


def expected_ids(config: RunConfig) -> Counter[str]:
    """The attempts that `rollout.policy: wait` trains on, which the seed alone decides: the tasks
    of every step, each attempted group_size times."""
    section = config.trainer
    return Counter(
        f"train-{index}/train@{index // section.groups_per_step + 1}#{attempt}"
        for index in range(section.steps * section.groups_per_step)
        for attempt in range(section.group_size)
    )
