"""How processes share a training, its memory and the replay of routing: refused where they can't
hold."""

from __future__ import annotations

import sys

import pytest

from agentevo.config import ParallelSection, build_config, load_config, to_yaml
from agentevo.config.recipe import with_defaults
from agentevo.config.routing import needs_routers, without_routing
from agentevo.errors import ConfigError, MissingExtraError
from agentevo.runs.orchestration.components import check_memory
from agentevo.training import optimization


@pytest.mark.parametrize(
    ("sizes", "world", "replicas"),
    [
        ({}, 1, 1),
        ({}, 4, 4),
        ({"shard": 2}, 4, 2),
        ({"shard": 2, "tensor": 2, "expert": 2}, 8, 2),
        ({"pipeline": 2}, 6, 3),
    ],
)
def test_what_is_left_over_are_replicas(sizes, world, replicas):
    assert ParallelSection(**sizes).replicas(world) == replicas


def test_sizes_that_do_not_divide_the_processes_are_refused():
    with pytest.raises(
        ValueError, match="shard=3 x tensor=1 x context=1 x pipeline=1 is 3, which does not"
    ):
        ParallelSection(shard=3).replicas(4)
    with pytest.raises(ValueError, match="expert=4 does not divide the 2 processes"):
        ParallelSection(shard=2, tensor=2, expert=4).replicas(4)


STAGES = "trainer.parallel.pipeline=2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.parallel.shard=2", "memory.optimizer=adamw_8bit"], "moments of 8 bits"),
        ([STAGES, "memory.optimizer=adamw_8bit"], "moments of 8 bits"),
        (
            [STAGES, "trainer.parallel.shard=2", "trainer.parallel.expert=2"],
            "pipeline=2 together with shard=2 and expert=2: .* to 1",
        ),
        ([STAGES, "algorithm.name=ppo"], "a critic .*: set pipeline to 1"),
        ([STAGES, "algorithm.name=prime"], "a process reward .*: set pipeline to 1"),
        ([STAGES, "reward_model.name=x"], "a token reward model .*: set pipeline to 1"),
        ([STAGES, "trainer.routing_replay=rollout"], "routing .*: set pipeline to 1"),
        ([STAGES, "memory.offload_activations=true"], "is untested: set it to false"),
        ([STAGES, "model.lora.rank=4"], r"adapters \(model\.lora\) .*: set pipeline to 1"),
        (["trainer.parallel.tensor=2", "model.lora.rank=4"], "expert can't split adapters"),
    ],
)
def test_what_parts_do_not_compute_is_refused_with_the_recipe(words, message):
    with pytest.raises(ConfigError, match=message):
        load_config("coins", ["model.name=x", "cold_start.episodes=0", *words])


def test_how_processes_share_the_work_in_words():
    assert ParallelSection().shared_by(1) == ""
    assert ParallelSection().shared_by(4) == "replicas=4"
    assert ParallelSection(shard=2, tensor=2).shared_by(8) == "shard=2 x tensor=2 x replicas=2"


def config(*overrides: str):
    return build_config(
        {"environment": {"type": "frozen_lake"}, "model": {"name": "tiny"}}, overrides
    )


@pytest.mark.parametrize("key", ["offload_activations", "offload_optimizer"])
def test_offloading_needs_a_gpu(key, monkeypatch):
    with pytest.raises(ConfigError, match=rf"memory\.{key} .* set memory\.{key}=false"):
        config("model.device=cpu", f"memory.{key}=true")

    allowed = config(f"memory.{key}=true")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"memory\.{key} .* set memory\.{key}=false"):
        check_memory(allowed)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_memory(allowed)


def test_offloading_and_selective_contradict():
    with pytest.raises(ConfigError, match=r"memory\.checkpointing=selective"):
        config("memory.offload_activations=true", "memory.checkpointing=selective")


def test_eight_bits_without_torchao_say_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingExtraError, match=r"agentevo\[8bit\]"):
        optimization.check_8bit()
    with pytest.raises(MissingExtraError):
        check_memory(config("memory.optimizer=adamw_8bit"))


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
