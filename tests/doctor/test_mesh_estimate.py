"""Which meshes fit, from shapes alone; and whether one works on this machine."""

import dataclasses
import json

import pytest
from transformers import LlamaConfig

from agentevo.config import ParallelSection, build_config
from agentevo.doctor import mesh_trial
from agentevo.doctor.checks import GIB
from agentevo.doctor.memory_estimate import layer_bytes, total
from agentevo.doctor.mesh_estimate import (
    check_meshes,
    fit,
    fits,
    judge_meshes,
    longest_pass,
    sizes_of,
    stage_parts,
)
from agentevo.doctor.mesh_trial import check_world
from agentevo.errors import ConfigError


@pytest.fixture(scope="module")
def shape_of_7b(tmp_path_factory):
    """A folder with config.json and nothing else: nothing of 7 billion numbers is made."""
    folder = tmp_path_factory.mktemp("shape")
    config = LlamaConfig(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def recipe(name, *overrides):
    own = [f"model.name={name}", "model.dtype=bfloat16", "cold_start.episodes=0"]
    own.append("memory.checkpointing=full")
    return build_config({"environment": {"type": "coins"}}, [*own, *overrides])


def test_a_model_that_one_device_cannot_hold_is_sharded(shape_of_7b):
    config = recipe(shape_of_7b)
    sizes = sizes_of(config)
    assert 7.5e9 < sizes.numbers < 7.8e9

    found = fits(config, sizes, 8)
    alone = fit(config, sizes, ParallelSection(), 8)
    assert alone.most > 16 * sizes.numbers, "masters, gradients, moments, and what computes"

    (sharded,) = (one for one in found if one.parallel == ParallelSection(shard=8))
    states = sum(sharded.parts[name] for name in ("weights", "gradients", "optimizer"))
    assert 16 * sizes.numbers / 8 < states < 16 * sizes.numbers / 8 + 10 * GIB
    assert sharded.first["whole model"] == 2 * sizes.numbers

    checks = judge_meshes(found, 8, 80 * GIB, "coins run.dir=x", 8192, config)
    assert checks[-1].status == "good" and "trainer.parallel.shard=" in checks[-1].advice
    assert "torchrun --standalone --nproc-per-node=8 -m agentevo train coins" in checks[-1].advice
    assert all(str(one) != "one" for one in found if one.most <= 0.9 * 80 * GIB)

    nowhere = judge_meshes(found, 8, 8 * GIB, "coins", 8192, config)[-1]
    assert nowhere.status == "wrong" and "more devices" in nowhere.advice
    assert "checkpointing" not in nowhere.advice and "rollout.samplers" in nowhere.advice

    apart = recipe(shape_of_7b, "memory.checkpointing=none", "rollout.samplers=1")
    advice = judge_meshes(found, 8, 8 * GIB, "coins", 8192, apart)[-1].advice
    assert "memory.checkpointing=full" in advice and "rollout.samplers" not in advice


def test_the_recipes_own_mesh_is_judged_first_and_the_command_replaces_it(shape_of_7b):
    def checks(world, **sizes):
        config = recipe(shape_of_7b, *(f"trainer.parallel.{k}={n}" for k, n in sizes.items()))
        return check_meshes(config, world, 80.0, "coins model.name=x")

    first, *_, last = checks(8, pipeline=2)
    assert first.name == "the recipe's mesh" and first.finding.startswith("pipeline=2 x replicas=4")
    assert first.status == "wrong", "half of the weights, moments and gradients are too much"
    assert last.advice.endswith("trainer.parallel.pipeline=1"), "what it asks for holds no more"

    missing, *_ = checks(8, pipeline=3)
    assert missing.status == "wrong" and "(pipeline=3) is none" in missing.finding
    assert checks(8)[0].name == "mesh"


def test_more_shards_take_less_and_so_does_half_a_sequence(shape_of_7b):
    config = recipe(shape_of_7b)
    sizes = sizes_of(config)
    most = [fit(config, sizes, ParallelSection(shard=n), 16).most for n in (2, 4, 8, 16)]
    assert most == sorted(most, reverse=True)

    whole, half = (fit(config, sizes, ParallelSection(context=n), 16).parts for n in (1, 2))
    assert half["activations"] < 0.7 * whole["activations"]
    cut = fit(config, sizes, ParallelSection(tensor=2), 16).parts
    assert cut["gradients"] == whole["gradients"] / 2


def test_stages_share_the_weights_and_keep_as_many_micro_batches_as_follow(shape_of_7b):
    config = recipe(shape_of_7b)
    sizes = sizes_of(config)
    alone = fit(config, sizes, ParallelSection(), 4).parts
    stages = [stage_parts(config, sizes, ParallelSection(pipeline=4), n) for n in range(4)]
    for name in ("weights", "gradients", "optimizer"):
        assert sum(parts[name] for parts in stages) == pytest.approx(alone[name])

    activations = [parts["activations"] for parts in stages[:3]]
    assert activations == sorted(activations, reverse=True)

    per_layer = layer_bytes(sizes.shape, sizes.trained, "full") * longest_pass(config, sizes)
    assert activations[0] - activations[1] == pytest.approx(8 * per_layer)  # 7 layers, and a send

    found = {one.parallel.pipeline: one for one in fits(config, sizes, 8) if one.parallel.pipeline}
    assert set(found) == {1, 2, 4}, "divisors of 28 layers and 8 devices"
    assert found[4].parallel.replicas(found[4].world) == 2
    assert total(found[4].parts) == max(map(total, stages))
    assert found[4].on_first == pytest.approx(total(stages[0]) + total(found[4].first))

    critic = recipe(shape_of_7b, "algorithm.name=ppo")
    assert {one.parallel.pipeline for one in fits(critic, sizes, 8)} == {1}


@pytest.mark.parametrize(
    ("mesh", "part"), [({"pipeline": 2}, 1), ({"tensor": 2}, 1 / 2), ({"shard": 2}, 0)], ids=str
)
def test_the_output_layers_gradient_of_a_pass_is_counted_once(mesh, part, shape_of_7b):
    """Before it is added to that of earlier passes; of shards it is among what is gathered."""
    config = recipe(shape_of_7b, "trainer.micro_batch_tokens=256")
    sizes = sizes_of(config)

    def activations(trains_output):
        trained = dataclasses.replace(sizes.trained, output=trains_output)
        kept = dataclasses.replace(sizes, trained=trained)
        return stage_parts(config, kept, ParallelSection(**mesh), mesh.get("pipeline", 1) - 1)[
            "activations"
        ]

    gradient = 4 * sizes.shape.vocabulary * sizes.shape.hidden
    assert activations(True) - activations(False) == pytest.approx(gradient * part)


def test_what_a_recipe_asks_for_is_counted(shape_of_7b):
    sizes = sizes_of(recipe(shape_of_7b))

    def parts(*overrides):
        return fit(recipe(shape_of_7b, *overrides), sizes, ParallelSection(shard=4), 4)

    assert parts("algorithm.kl_coef=0.1").parts["reference copy"] == sizes.numbers
    assert "key-value cache" in parts().first
    apart = parts("rollout.samplers=1", "rollout.staleness=1")
    assert "key-value cache" not in apart.first and "whole model" in apart.first


def test_many_devices_are_a_launch(shape_of_7b):
    found = check_meshes(recipe(shape_of_7b), 16, 80.0, "coins")
    assert "agentevo launch slurm coins" in found[-1].advice
    assert "--set trainer_nodes=2 --set gpus=8" in found[-1].advice


@pytest.mark.parametrize(("devices", "word"), [(0, "from 1"), (10**9, "from 1")])
def test_impossible_numbers_are_refused(devices, word, shape_of_7b):
    with pytest.raises(ConfigError, match=word):
        check_meshes(recipe(shape_of_7b), devices, 80.0, "coins")
    with pytest.raises(ConfigError, match="from 1 to 64 processes"):
        check_world(recipe("tiny"), devices)
    with pytest.raises(ConfigError, match="does not divide the 3 processes"):
        check_world(recipe("tiny", "trainer.parallel.shard=2"), 3)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["shard", "pipeline", "expert"])
def test_a_mesh_is_tried_on_this_machine(key):
    (check,) = check_world(recipe("tiny", f"trainer.parallel.{key}=2"), 2)
    assert check.status == "good" and "differ from one process's by" in check.finding


@pytest.mark.slow
def test_a_failed_trial_names_the_error_and_not_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh_trial, "RECIPE", ("coins", "trainer.stepz=1"))
    problem = mesh_trial._train(tmp_path / "all", 2, [])
    assert problem.startswith("exit code ") and "trainer.stepz" in problem
    assert "traceback" not in problem
