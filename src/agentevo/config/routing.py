"""Routing replay: the keys that depend on one another, and where the routing is recorded
(docs/training.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from agentevo.algorithms.losses import POLICY_LOSSES
from agentevo.config.algorithm import OWN

if TYPE_CHECKING:
    from agentevo.config.algorithm import AlgorithmSection
    from agentevo.config.recipe import RunConfig

KEY = "trainer.routing_replay"
UNBALANCED = ("tensor", "context", "expert", "pipeline")
"""The sizes of trainer.parallel under which no process computes all routers of a sequence."""


def with_recording(tree: Any) -> Any:
    """A recipe's tree with engine.routed_experts=true if trainer.routing_replay is rollout and the
    recipe does not set engine.routed_experts. Invalid parts are not changed."""
    if not isinstance(tree, Mapping):
        return tree

    trainer = tree.get("trainer")
    engine = tree.get("engine", {})
    replay = trainer.get("routing_replay") if isinstance(trainer, Mapping) else None
    if replay != "rollout" or not isinstance(engine, Mapping) or "routed_experts" in engine:
        return tree
    return {**tree, "engine": {**engine, "routed_experts": True}}


def needs_routers(config: RunConfig) -> bool:
    """Whether passes of the policy record or replay the choices of its routers."""
    return config.trainer.routing_replay != "none" or config.engine.routed_experts


def without_routing(config: RunConfig) -> RunConfig:
    """The recipe for a program that only plays: nothing is recorded, and any model is accepted."""
    trainer = config.trainer.model_copy(
        update={"routing_replay": "none", "router_aux_loss_coef": 0.0}
    )
    sft = config.sft.model_copy(update={"router_aux_loss_coef": 0.0})
    engine = config.engine.model_copy(update={"routed_experts": False})
    return config.model_copy(update={"trainer": trainer, "sft": sft, "engine": engine})


def balance_keys(config: RunConfig) -> list[str]:
    """The keys by which the recipe asks for a load-balancing loss of the routers."""
    coefs = {"trainer": config.trainer.router_aux_loss_coef, "sft": config.sft.router_aux_loss_coef}
    return [f"{section}.router_aux_loss_coef" for section, coef in coefs.items() if coef > 0]


def _balance_contradictions(config: RunConfig) -> Iterator[str]:
    sizes = config.trainer.parallel.above_one
    for key in balance_keys(config):
        for size in UNBALANCED:
            if size in sizes:
                yield (
                    f"{key} together with trainer.parallel.{size}={sizes[size]}: the loss needs "
                    "the routers of whole sequences in one process: set it to 0, or "
                    f"{size} to 1 (replicas and trainer.parallel.shard are possible)"
                )

    if config.trainer.router_aux_loss_coef > 0 and config.algorithm.preference() is not None:
        yield (
            f"trainer.router_aux_loss_coef: algorithm.name={config.algorithm.name} compares "
            "answers in separate passes, to which no load-balancing loss is added: set it to 0"
        )


def routing_contradictions(config: RunConfig) -> Iterator[str]:
    """Values that contradict one another, as 'what: remedy'."""
    yield from _balance_contradictions(config)
    mode = config.trainer.routing_replay
    algorithm = config.algorithm

    if config.engine.routed_experts and config.engine.type != OWN:
        yield (
            f"engine.routed_experts: engine.type={config.engine.type} does not report the chosen "
            f"experts, only the embedded engine does: set engine.type={OWN}, or {KEY}=update, "
            "which records them in the trainer's own pass, and engine.routed_experts=false"
        )

    if mode == "none":
        return

    if mode == "rollout" and not config.engine.routed_experts:
        yield (
            f"{KEY}=rollout replays the routing that the engine records, but "
            "engine.routed_experts is false: remove engine.routed_experts"
        )

    if algorithm.preference() is not None:
        yield (
            f"{KEY}={mode}: algorithm.name={algorithm.name} compares answers in separate passes, "
            f"which replay nothing: set {KEY}=none"
        )
    elif mode == "update" and not recomputes(algorithm):
        yield (
            f"{KEY}=update records in the pass that recomputes the old log-probs, but "
            "algorithm.old_logprobs is rollout: set algorithm.old_logprobs=recomputed, or "
            f"{KEY}=rollout"
        )

    if mode == "update" and config.trainer.parallel.context > 1:
        yield (
            f"{KEY}=update: with trainer.parallel.context each process computes a part of a "
            f"sequence, and none sees all routing choices: set it to 1, or {KEY}=rollout"
        )


def recomputes(algorithm: AlgorithmSection) -> bool:
    """Whether the trainer recomputes the old log-probs."""
    loss = POLICY_LOSSES[algorithm.resolve().policy_loss]
    return algorithm.old_logprobs == "recomputed" or "proximal_logp" in loss.needs
