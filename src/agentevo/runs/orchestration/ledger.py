"""A step's entry in the ledger: the attempts that it trained on, the reasons for leaving out the
others, its plan, and digests of the rows that no plan holds.

    record["rows"] = {"tasks": {id: digest}, "untrained": {id: digest}, "evaluated": {id: digest}}

These are the tasks that were played, the attempts on which the step has not trained, and the
attempts that evaluated the policy. Each row also has its own digest, but a program that changes the
row can compute that again. It can't do so with the digests in the chain of records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentevo.config import RunConfig
from agentevo.errors import StoreError, StoreUnavailableError
from agentevo.rollout.sampler import BASELINE
from agentevo.runs.folder.chain import KEY as CHAIN
from agentevo.runs.folder.chain import End, RecordedRows, link
from agentevo.runs.orchestration.collect import NOT_TRAINED, ONLY_SAMPLED, Collected
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.store.codec import content_digest
from agentevo.store.store import Store
from agentevo.training.batching.step_plan import KEY, SHOWN, StepPlan
from agentevo.training.learner import PreparedBatch
from agentevo.types import Trajectory


async def reserve(store: Store, step: int, collected: Collected, batch: PreparedBatch) -> list[str]:
    """Reserves the step's own attempts that it trains on. The others are dropped when the step is
    committed; replayed ones belong to earlier steps. Returns the ids of the reserved attempts, in
    order."""
    left_out = {*collected.dropped, *batch.dropped, *(t.id for t in collected.replayed)}
    trained_ids = [t.id for t in collected.trainable if t.id not in left_out]
    await with_retries(
        lambda: store.reserve(trained_ids, step),
        within_s=STORE_RETRY_S,
        what=f"reserving step {step}",
    )
    return trained_ids


def drop_reasons(collected: Collected, batch: PreparedBatch) -> dict[str, str]:
    """Id -> reason of each attempt that is not trained on, without those that are never trained on:
    greedy attempts, attempts of agents that do not learn, and all attempts where the run only
    samples."""
    reasons = collected.dropped | batch.dropped
    never = (BASELINE, NOT_TRAINED, ONLY_SAMPLED)
    return {name: reason for name, reason in reasons.items() if reason not in never}


def plan_of(
    config: RunConfig,
    ids: Sequence[str],
    collected: Collected,
    batch: PreparedBatch,
    metrics: Mapping[str, float],
) -> StepPlan:
    """The record of the step's training data, for checks and replay. `ids`: of the step's own
    attempts."""
    of_earlier_steps = {t.id for t in collected.replayed}
    replayed = [t.id for t in collected.replayed if t.id not in batch.dropped]
    dropped = collected.dropped | batch.dropped
    by_id = {t.id: t for t in collected.trainable}
    return StepPlan.make(
        [by_id[name] for name in (*ids, *replayed)],
        earned={t.id: t.reward for t in (*collected.trajectories, *collected.replayed)},
        baselines=collected.baselines,
        staleness=config.rollout.staleness,
        policy=config.rollout.policy,
        masked_tokens=int(metrics.get("staleness/masked_tokens", 0)),
        credit=config.credit_rule,
        dropped={name: why for name, why in dropped.items() if name not in of_earlier_steps},
        replayed=replayed,
        replay_max_age=config.algorithm.replay_max_age_versions if replayed else 0,
    )


async def commit(store: Store, end: End, plan: StepPlan, record: Mapping[str, Any]) -> End:
    """Commits the step after `end` with its plan, the rest of its record and its place in the
    chain, and drops the attempts that the plan drops, in one transaction. Returns the new end."""
    step = end.step + 1
    content = {**record, KEY: plan.to_record()}
    chain = link(step, content, end.chain)
    await with_retries(
        lambda: store.commit_step(
            step, {**content, CHAIN: chain}, ids=plan.ids, dropped=plan.dropped
        ),
        within_s=STORE_RETRY_S,
        what=f"committing step {step}",
    )
    return End(step, chain)


class RowDigests:
    """The row digests of one step after another, of a run's trainer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._recorded_tasks: set[str] = set()
        """Tasks that earlier records hold."""

    async def of_step(
        self, step: int, sampled: Iterable[Trajectory], trained: Iterable[str]
    ) -> RecordedRows:
        """The rows that the record of a step holds: of the attempts `sampled` those that are not
        `trained` (ids), and the evaluations since the previous record."""
        attempts = {trajectory.id: trajectory for trajectory in sampled}
        evaluated = await self._read_evaluations(step)
        if step == 1:
            evaluated += await self._read_evaluations(0)

        tasks = {trajectory.task_id for trajectory in (*attempts.values(), *evaluated)}
        return RecordedRows(
            tasks=await self._digest_tasks(tasks - self._recorded_tasks),
            untrained={name: _digest(attempts[name]) for name in attempts.keys() - set(trained)},
            evaluated={trajectory.id: _digest(trajectory) for trajectory in evaluated},
        )

    async def _read_evaluations(self, step: int) -> list[Trajectory]:
        """The attempts that evaluated the policy after a step."""

        async def read() -> list[Trajectory]:
            rows = self._store.trajectories(step=step, split="eval")
            return [row.trajectory async for row in rows if not row.tokens_deleted]

        return await with_retries(
            read, within_s=STORE_RETRY_S, what="reading the attempts of evaluations"
        )

    async def _digest_tasks(self, names: Iterable[str]) -> dict[str, str]:
        async def read() -> dict[str, str]:
            digests = {}
            for name in sorted(names):
                try:
                    digests[name] = (await self._store.stored_task(name)).digest.hex()[:SHOWN]
                except StoreUnavailableError:
                    raise
                except StoreError:  # samplers in other processes may have added none
                    continue
            return digests

        digests = await with_retries(read, within_s=STORE_RETRY_S, what="reading the tasks")
        self._recorded_tasks.update(digests)
        return digests


def _digest(trajectory: Trajectory) -> str:
    return content_digest(trajectory).hex()[:SHOWN]
