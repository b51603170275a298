"""A step's entry in the ledger: the attempts that it trained on, the reasons for leaving out the
others, and its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentevo.config import RunConfig
from agentevo.rollout.sampler import BASELINE
from agentevo.runs.folder.chain import KEY as CHAIN
from agentevo.runs.folder.chain import End, link
from agentevo.runs.orchestration.collect import NOT_TRAINED, ONLY_SAMPLED, Collected
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.store.store import Store
from agentevo.training.batching.step_plan import KEY, StepPlan
from agentevo.training.learner import PreparedBatch


async def reserve(store: Store, step: int, collected: Collected, batch: PreparedBatch) -> list[str]:
    """Reserves the attempts that the step trains on. The others are dropped when the step is
    committed. Returns the ids of the reserved attempts, in order."""
    dropped = collected.dropped | batch.dropped
    trained_ids = [t.id for t in collected.trainable if t.id not in dropped]
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
    """The record of the step's training data, for checks and replay."""
    by_id = {t.id: t for t in collected.trainable}
    return StepPlan.make(
        [by_id[name] for name in ids],
        earned={t.id: t.reward for t in collected.trajectories},
        baselines=collected.baselines,
        staleness=config.rollout.staleness,
        policy=config.rollout.policy,
        masked_tokens=int(metrics.get("staleness/masked_tokens", 0)),
        credit=config.algorithm.credit_rule,
        dropped=collected.dropped | batch.dropped,
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
