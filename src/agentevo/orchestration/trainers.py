"""Chooses the trainer of a run's policy and the source of its batches, by the recipe's
algorithm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from agentevo.config.named_agents import policy_of, trained_policies
from agentevo.devices import is_accelerator
from agentevo.models.adapters import num_parameters
from agentevo.orchestration.batch_sources import BatchSource, GivenPairs, RolloutBatches
from agentevo.orchestration.components import Components
from agentevo.orchestration.conversations import ConversationBatches, SFTData
from agentevo.orchestration.learners import (
    policy_trainer,
    preference_trainer,
    supervised_trainer,
)
from agentevo.orchestration.preference_data import given_pairs, solver_answers
from agentevo.orchestration.ranks import Leader
from agentevo.orchestration.rollout_sources import (
    ColocatedRollouts,
    DisaggregatedRollouts,
    RolloutSource,
    SamplerSupervisor,
    SynchronousRollouts,
)
from agentevo.orchestration.self_play import SelfPlayRollouts
from agentevo.orchestration.submissions import Submissions, SubmittedBatches, SubmittedRollouts
from agentevo.training.agent_trainers import AgentTrainers
from agentevo.training.learner import Learner, RolloutTrainer


def make_rollouts(
    parts: Components,
    stop: Callable[[], bool],
    note: Callable[[str], None],
    *,
    sampled: bool,
    is_disaggregated: bool,
    supervisor: SamplerSupervisor | None,
    submissions: Submissions | None = None,
) -> RolloutSource:
    """The source that the recipe asks for. `sampled`: attempts are trained on.
    `is_disaggregated`: engines and samplers are other processes, which `supervisor`, if there is
    one, keeps alive. `submissions`: a program's own loop makes the attempts."""
    if submissions is not None:
        return SubmittedRollouts(parts, submissions)

    if is_disaggregated:
        check = (lambda: None) if supervisor is None else supervisor.check
        return DisaggregatedRollouts(parts, stop, check, note)

    if parts.config.rollout.staleness and sampled:
        return ColocatedRollouts(parts, stop, note)
    if parts.config.tasks.self_play is not None:
        return SelfPlayRollouts(parts)

    return SynchronousRollouts(parts)


def make_trainer(
    parts: Components,
    rollouts: RolloutSource,
    conversations: SFTData | None = None,
    leader: Leader | None = None,
) -> tuple[Learner, BatchSource]:
    """The trainer of the policy and the source of its batches, by the recipe's algorithm. `leader`:
    of the processes that train the policy together, where there are several."""
    config = parts.config
    model = parts.model
    if conversations is not None:
        batches = ConversationBatches(config, conversations)
        supervised = (
            supervised_trainer(config, model, batches.num_steps)
            if leader is None
            else leader.make("sft", batches.num_steps)
        )
        batches.measure = supervised.held_out
        return supervised, batches

    trainer: RolloutTrainer
    if config.algorithm.preference() is not None:
        make = partial(preference_trainer, config, demonstrations=solver_answers(parts))
        trainer = make(model) if leader is None else leader.make("preferences", local=make)
        pairs = given_pairs(parts)
        if pairs is not None:
            return trainer, GivenPairs(config, pairs)
    elif parts.policies:
        names = trained_policies(config)
        trainer = AgentTrainers(
            {
                name: policy_trainer(config, policy.model, policy.tokenizer)
                for name, policy in ((name, parts.policies[name]) for name in names)
            },
            partial(policy_of, config),
        )
    else:
        trainer = (
            policy_trainer(config, model, parts.tokenizer)
            if leader is None
            else leader.make("policy")
        )

    if isinstance(rollouts, SubmittedRollouts):
        return trainer, SubmittedBatches(config, rollouts, trainer, parts.store)

    tasks = parts.tasks
    store = parts.store
    note = parts.note
    return trainer, RolloutBatches(config, rollouts, tasks, trainer, store, note)


def training_notes(parts: Components) -> list[str]:
    """Lines about the training before its first step: what determines the value of each turn, how
    much of the model is trained, and a number format that is slow on an accelerator."""
    notes = [f"credit: {parts.config.algorithm.credit_rule}"]
    if parts.config.model.lora.enabled:
        trained, total = num_parameters(parts.model)
        share = f"{trained:,} of {total:,} parameters ({trained / total:.1%})"
        notes.append(f"training adapters: {share}")

    device = parts.model.device
    model = parts.config.model
    if is_accelerator(device) and model.dtype == "float32" and model.name != "tiny":
        notes.append(
            f"model.dtype=float32 on {device.type}: bfloat16 computes faster there and halves the "
            "memory of weights and activations: set model.dtype=bfloat16"
        )

    return notes
