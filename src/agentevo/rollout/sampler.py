"""The sampler: leases tasks, lets an agent attempt each of them several times, writes the trajectories to the store.

Attempts of all groups run at once and share the engine's steps. Whatever goes wrong inside an attempt becomes a `failed` trajectory with
the reason: it costs its own group one member and never the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from agentevo.agents.agent import Agent, Outcome
from agentevo.agents.policy import Policy
from agentevo.config import RunConfig
from agentevo.inference.engine import Engine
from agentevo.models.chat import ChatFormat
from agentevo.seeds import derive_seed
from agentevo.store.store import Lease, Split, Store
from agentevo.types import SamplingParams, Task, Trajectory

BASELINE = "baseline"
"""Label of the greedy attempt beside a group."""
LEASE_MARGIN_S = 60.0
"""A lease outlives the longest episode by this much: time to write it down."""


def group_name(task_id: str, label: str, step: int) -> str:
    """Id of the group that a pass makes of a task."""
    return f"{task_id}/{label}@{step}"


class Sampler:
    """See the module. One sampler serves training and evaluation."""

    def __init__(self, config: RunConfig, engine: Engine, chat: ChatFormat, agent: Agent, store: Store, context_length: int) -> None:
        self._config, self._engine, self._chat, self._agent, self._store = config, engine, chat, agent, store
        self._context_length = context_length
        self._leases: dict[str, Lease] = {}  # by task; a resumed run finds tasks of later steps queued too, and keeps them for then

    def sampling(self, temperature: float) -> SamplingParams:
        """The recipe's sampling parameters; filters don't matter to a greedy draw."""
        section = self._config.sampling
        return SamplingParams(
            temperature=temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            min_p=section.min_p,
            max_new_tokens=section.max_new_tokens,
            stop_token_ids=self._chat.end_ids,
            stop_strings=section.stop,
        )

    async def sample(
        self, tasks: Sequence[Task], *, attempts: int, temperature: float, split: Split, step: int, label: str, baseline: bool = False
    ) -> list[Trajectory]:
        """`attempts` trajectories of each task, in the order of tasks and attempts, written to the store as `split` of `step`.

        `label` tells apart several passes over the same tasks ("train", "greedy", "sampled"); it is part of ids and seeds. With `baseline`
        each group is followed by a greedy attempt at its task, at the same time but in a group of its own (label BASELINE).
        """
        await self._store.add_tasks(tasks)
        while (lease := await self._store.lease_task("sampler", lease_s=self._config.agent.timeout_s + LEASE_MARGIN_S)) is not None:
            self._leases[lease.task.id] = lease
        sampling, greedy = self.sampling(temperature), self.sampling(0.0)

        async def group(task: Task) -> list[Trajectory]:
            started = [self._attempt(task, k, sampling, group_name(task.id, label, step)) for k in range(attempts)]
            started += [self._attempt(task, 0, greedy, group_name(task.id, BASELINE, step))] if baseline else []
            members = await asyncio.gather(*started)
            await self._store.write_trajectories(members, split=split, step=step, lease=self._leases.pop(task.id, None))
            return members

        groups = await asyncio.gather(*(group(task) for task in tasks))
        return [trajectory for members in groups for trajectory in members]

    async def _attempt(self, task: Task, attempt: int, sampling: SamplingParams, group_id: str) -> Trajectory:
        """One attempt; the only place where an agent's failure is caught."""
        name = f"{group_id}#{attempt}"
        section = self._config.agent
        policy = Policy(
            self._engine,
            self._chat,
            sampling,
            name=name,
            seed=derive_seed(self._config.run.seed, name),
            context_length=self._context_length,
            timeout_s=self._config.engine.timeout_s,
        )
        started, clock = time.time(), time.perf_counter()
        outcome, error = Outcome(reward=0.0, success=False), None
        try:
            async with asyncio.timeout(section.timeout_s) as limit:
                outcome = await self._agent.run(task, policy)
        except Exception as broken:  # noqa: BLE001 (an agent is anybody's code: whatever it raises is recorded)
            error = f"{type(broken).__name__}: {broken}"
            if isinstance(broken, TimeoutError) and limit.expired():
                error = f"the episode took longer than agent.timeout_s={section.timeout_s:g} s"
        finally:
            await policy.close()
        turns = [msgspec.structs.replace(t, reward=outcome.turn_rewards.get(t.index, 0.0)) for t in policy.turns]
        return Trajectory(
            id=name,
            task_id=task.id,
            group_id=group_id,
            attempt=attempt,
            turns=turns,
            reward=outcome.reward,
            reward_parts=outcome.reward_parts,
            success=outcome.success,
            status="failed" if error else "completed",
            error=error,
            truncated=outcome.truncated,
            metrics=outcome.metrics,
            started_at=started,
            duration_s=time.perf_counter() - clock,
        )
