"""Chooses the trainer of a run's policy and the source of its batches, by the recipe's
algorithm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from agentevo.algorithms.losses import POLICY_LOSSES
from agentevo.config import RunConfig
from agentevo.config.named_agents import policy_of, trained_policies
from agentevo.config.parallel import world_size
from agentevo.inference.engines import rounding_options
from agentevo.models.compute.adapters import num_parameters
from agentevo.models.compute.rows import describe_rows
from agentevo.models.token_rows import causal_model
from agentevo.runs.folder.creation import RunCommand
from agentevo.runs.orchestration.batch_sources import BatchSource, GivenPairs, RolloutBatches
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.conversations import ConversationBatches, SFTData
from agentevo.runs.orchestration.learners import LocalTrainers
from agentevo.runs.orchestration.preference_data import given_pairs, solver_answers
from agentevo.runs.orchestration.rank_trainers import PolicyTrainers, RankTrainers
from agentevo.runs.orchestration.ranks import RunRanks
from agentevo.runs.orchestration.rollout_sources import (
    ColocatedRollouts,
    DisaggregatedRollouts,
    RolloutSource,
    SelfPlayRollouts,
    SynchronousRollouts,
)
from agentevo.runs.orchestration.submissions import Submissions, SubmittedBatches, SubmittedRollouts
from agentevo.runs.orchestration.supervisor import Children
from agentevo.runtime.devices import is_accelerator
from agentevo.training.agent_trainers import AgentTrainers
from agentevo.training.learner import Learner, RolloutTrainer


def make_rollouts(
    parts: Components,
    stop: Callable[[], bool],
    note: Callable[[str], None],
    *,
    sampled: bool,
    is_disaggregated: bool,
    processes: Children | None,
    submissions: Submissions | None = None,
) -> RolloutSource:
    """The source that the recipe asks for. `sampled`: attempts are trained on.
    `is_disaggregated`: engines and samplers are other processes, `processes` if they are this
    run's own. `submissions`: a program's own loop makes the attempts."""
    if submissions is not None:
        return SubmittedRollouts(parts, submissions)

    if is_disaggregated:
        check = (lambda: None) if processes is None else processes.check
        return DisaggregatedRollouts(parts, stop, check, note)

    if parts.config.rollout.staleness and sampled:
        return ColocatedRollouts(parts, stop, note)
    if parts.config.tasks.self_play is not None:
        return SelfPlayRollouts(parts)

    return SynchronousRollouts(parts)


def make_trainers(parts: Components, ranks: RunRanks | None = None) -> PolicyTrainers:
    """Makes the trainers of the run's policy. `ranks`: the processes that train together."""
    if ranks is None:
        return LocalTrainers(parts.config, parts.model, parts.tokenizer)

    serves = parts.run_engines is None
    return RankTrainers(
        ranks, parts.config, parts.model, parts.tokenizer, parts.checkpoint, serves=serves
    )


def make_trainer(
    parts: Components,
    rollouts: RolloutSource,
    trainers: PolicyTrainers,
    conversations: SFTData | None = None,
) -> tuple[Learner, BatchSource]:
    """The trainer of the policy and the source of its batches, by the recipe's algorithm."""
    config = parts.config
    if conversations is not None:
        batches = ConversationBatches(config, conversations)
        supervised = trainers.conversations(batches.num_steps)
        batches.measure = supervised.held_out
        batches.show = supervised.show
        return supervised, batches

    trainer: RolloutTrainer
    if config.algorithm.preference() is not None:
        trainer = trainers.preferences(solver_answers(parts))
        pairs = given_pairs(parts)
        if pairs is not None:
            return trainer, GivenPairs(config, *pairs)
    elif parts.policies:
        names = trained_policies(config)
        trainer = AgentTrainers(
            {
                name: LocalTrainers(config, policy.model, policy.tokenizer).policy()
                for name, policy in ((name, parts.policies[name]) for name in names)
            },
            partial(policy_of, config),
        )
    else:
        trainer = trainers.policy()

    if isinstance(rollouts, SubmittedRollouts):
        return trainer, SubmittedBatches(config, rollouts, trainer, parts.store)

    tasks = parts.tasks
    store = parts.store
    note = parts.note
    return trainer, RolloutBatches(config, rollouts, tasks, trainer, store, note)


def opening_notes(config: RunConfig, command: RunCommand) -> list[str]:
    """Lines about the processes that train together, before the model is loaded."""
    world = world_size()
    if world == 1:
        return []

    notes = [f"{world} processes train together: {config.trainer.parallel.shared_by(world)}"]
    if command == "train" and not config.rollout.samplers and not config.data.given:
        notes.append(
            f"the first of them samples, and {world - 1} wait for it: `agentevo launch "
            "... --set engines=N --set samplers=1` gives engines devices of their own"
        )

    return notes


def training_notes(parts: Components, command: RunCommand) -> list[str]:
    """Lines about the training before its first step: what determines the value of each turn, why
    the model computes rows, the user's loss, how much of the model is trained, a router's loss that
    is not added, a number format that is slow on an accelerator, and missing tasks."""
    notes = [f"credit: {parts.config.credit_rule}"]
    if description := describe_rows(parts.model):
        notes.append(f"the model computes {description}")
    if parts.config.algorithm.loss_function is not None:
        notes.append(f"loss: your function {parts.config.algorithm.loss_function}")
    if parts.config.model.lora.enabled:
        trained, total = num_parameters(parts.model)
        share = f"{trained:,} of {total:,} parameters ({trained / total:.1%})"
        notes.append(f"training adapters: {share}")

    text_config = causal_model(parts.model).config.get_text_config()
    key = "sft" if command == "sft" else "trainer"
    asks = getattr(text_config, "output_router_logits", False)
    if asks and getattr(parts.config, key).router_aux_loss_coef == 0:
        is_possible = key == "sft" or parts.config.algorithm.preference() is None
        advice = f": see {key}.router_aux_loss_coef" if is_possible else ""
        notes.append(
            "the model's config.json asks for a load-balancing loss of its router "
            f"(output_router_logits=true), and training adds none{advice}"
        )

    device = parts.model.device
    model = parts.config.model
    if is_accelerator(device) and model.dtype == "float32" and model.name != "tiny":
        notes.append(
            f"model.dtype=float32 on {device.type}: bfloat16 computes faster there and halves the "
            "memory of weights and activations: set model.dtype=bfloat16"
        )

    config = parts.config
    if command != "sft" and config.algorithm.preference() is None:
        notes += rounding_notes(config)

    if command != "sft" and not config.data.given and config.trainer.steps:
        shortfall = parts.tasks.shortfall()
        notes += [shortfall] if shortfall else []

    return notes


def rounding_notes(config: RunConfig) -> list[str]:
    """What corrects for an engine that computes with rounded weights or over rounded keys and
    values, and what measures the difference. Empty for an engine that does not round."""
    rounding = rounding_options(config.engine)
    if not rounding:
        return []

    algorithm = config.algorithm
    bounds = f"importance_cap={algorithm.importance_cap:g}"
    correction = "nothing corrects for it: leave algorithm.importance and old_logprobs out"
    loss = POLICY_LOSSES.get(algorithm.resolve().policy_loss)
    if loss is not None and loss.has_importance_weights:
        correction = f"the weights of its loss {algorithm.resolve().policy_loss} correct for it"
    elif algorithm.importance != "none":
        correction = f"algorithm.importance={algorithm.importance} corrects for it ({bounds})"

    measure = "with old_logprobs=recomputed, rollout/logprob_gap_max would measure it"
    if algorithm.old_logprobs == "recomputed":
        measure = "rollout/logprob_gap_mean and logprob_gap_max measure it"

    return [
        f"{config.engine.type} rounds ({', '.join(rounding)}), so its log-probs differ from the "
        f"trainer's; {correction}; {measure}"
    ]
