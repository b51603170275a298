"""Routing replay: who records by default, and what can't go together."""

from __future__ import annotations

import pytest

from agentevo.config import build_config, to_yaml
from agentevo.config.recipe import with_defaults
from agentevo.config.routing import needs_routers, without_routing
from agentevo.errors import ConfigError


def config(*overrides: str):
    return build_config(
        {"environment": {"type": "frozen_lake"}, "model": {"name": "tiny"}}, overrides
    )


def test_the_engine_records_what_is_replayed():
    assert not needs_routers(config()) and not config().engine.routed_experts

    replayed = config("trainer.routing_replay=rollout")
    assert replayed.engine.routed_experts and needs_routers(replayed)
    assert "routed_experts: true" in to_yaml(replayed)

    watched = config("engine.routed_experts=true")
    assert watched.trainer.routing_replay == "none" and needs_routers(watched)
    assert not needs_routers(without_routing(replayed))

    updated = config("trainer.routing_replay=update", "algorithm.old_logprobs=recomputed")
    assert not updated.engine.routed_experts and needs_routers(updated)
    assert config("trainer.routing_replay=update", "algorithm.name=decoupled_ppo")
    assert with_defaults({})["trainer"]["routing_replay"] == "none"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["trainer.routing_replay=rollout", "engine.routed_experts=false"],
            "routing_replay=rollout replays the routing that the engine records, but "
            "engine.routed_experts is",
        ),
        (
            ["trainer.routing_replay=rollout", "engine.type=vllm"],
            "engine.routed_experts: engine.type=vllm does not report the chosen experts",
        ),
        (
            ["engine.routed_experts=true", "engine.type=sglang"],
            "engine.routed_experts: engine.type=sglang does not report the chosen experts",
        ),
        (
            ["trainer.routing_replay=rollout", "algorithm.name=dpo"],
            "routing_replay=rollout: algorithm.name=dpo compares answers in separate passes",
        ),
        (
            ["trainer.routing_replay=update"],
            "routing_replay=update records in the pass that recomputes the old log-probs",
        ),
        (
            [
                "trainer.routing_replay=update",
                "algorithm.old_logprobs=recomputed",
                "trainer.parallel.context=2",
            ],
            "routing_replay=update: with trainer.parallel.context each process computes a part",
        ),
        (["trainer.routing_replay=R3"], "trainer.routing_replay"),
    ],
)
def test_what_cant_go_together(overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        config(*overrides)
