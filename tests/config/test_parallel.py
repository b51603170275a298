"""How processes share a training is refused where their number doesn't allow it."""

from __future__ import annotations

import pytest

from agentevo.config import ParallelSection, load_config
from agentevo.errors import ConfigError


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
