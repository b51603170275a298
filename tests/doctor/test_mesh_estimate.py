"""Which meshes fit, from shapes alone; and whether one works on this machine."""

import dataclasses
import json
import re
import shutil

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from agentevo.config import ParallelSection, build_config
from agentevo.doctor import mesh_trial
from agentevo.doctor.checks import GIB
from agentevo.doctor.group_checks import OWN_WEIGHTS
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
    return write_shape(tmp_path_factory.mktemp("shape"), layers=28)


@pytest.fixture(scope="module")
def few_layers(tmp_path_factory):
    """The same with 4 layers."""
    return write_shape(tmp_path_factory.mktemp("few"), layers=4)


def write_shape(folder, layers):
    config = LlamaConfig(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=layers,
        num_attention_heads=28, num_key_value_heads=4, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


@pytest.fixture(scope="module")
def shape_of_235b(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=94,
        num_attention_heads=64, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=1536, architectures=["Qwen3MoeForCausalLM"],
        tie_word_embeddings=False,
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

    checks = judge_meshes(found, 8, 80 * GIB, "coins run.dir=x", 8192, ParallelSection())
    assert checks[-1].status == "good" and "trainer.parallel.shard=" in checks[-1].advice
    assert "torchrun --standalone --nproc-per-node=8 -m agentevo train coins" in checks[-1].advice
    assert all(str(one) != "one" for one in found if one.most <= 0.9 * 80 * GIB)

    nowhere = judge_meshes(found, 8, 8 * GIB, "coins", 8192, ParallelSection())[-1]
    assert nowhere.status == "wrong" and nowhere.advice == "or a smaller model"


def test_the_recipes_own_mesh_is_judged_first_and_the_command_replaces_it(shape_of_7b):
    def checks(world, **sizes):
        config = recipe(shape_of_7b, *(f"trainer.parallel.{k}={n}" for k, n in sizes.items()))
        keys = " ".join(f"trainer.parallel.{key}={size}" for key, size in sizes.items())
        return check_meshes(config, world, 80.0, f"coins model.name=x {keys}")

    first, *_, last = checks(8, pipeline=2)
    assert first.name == "the recipe's mesh" and first.finding.startswith("pipeline=2 x replicas=4")
    assert first.status == "wrong", "half of the weights, moments and gradients are too much"
    assert last.advice.endswith("trainer.parallel.pipeline=1"), "what it asks for holds no more"
    assert re.fullmatch(
        r"the cheapest is \S.*; \d+ of \d+ meshes fit 8 devices of 80.0 GiB with "
        r"micro-batches of [\d,]+ tokens( \(the first 6 of them are above\))?",
        last.finding,
    )

    assert last.advice.count("trainer.parallel.pipeline=") == 1, "nothing is said twice"

    missing, *_ = checks(8, pipeline=3)
    assert missing.status == "wrong" and "(pipeline=3) does not suit" in missing.finding
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
    assert parts("engine.kv_cache_tokens=1000").first["key-value cache"] == 1000 * 28 * 2 * 512 * 2
    away = parts("algorithm.name=ppo", "memory.offload_optimizer=true").parts
    assert "optimizer" not in away
    assert away["critic"] < parts("algorithm.name=ppo").parts["critic"] / 1.4


def test_who_serves_is_counted_on_the_first_device(shape_of_7b):
    sizes = sizes_of(recipe(shape_of_7b))

    def first(*overrides, shard=4):
        one = fit(recipe(shape_of_7b, *overrides), sizes, ParallelSection(shard=shard), 4)
        return one.first, one.engine_share

    weights = 2 * sizes.numbers
    cache = {"key-value cache": 4 * GIB}
    apart = "rollout.samplers=1", "rollout.staleness=1"
    own = "rollout.staleness=1", "rollout.sharing=overlap", "rollout.policy=mask"
    vllm = "engine.type=vllm"
    assert first() == ({"whole model": weights} | cache, 0)
    assert first(*apart) == ({}, 0)
    assert first(*apart, shard=1) == (cache, 0), "it evaluates with the trainer's own weights"
    assert first(*own, shard=1) == ({OWN_WEIGHTS: weights} | cache, 0)
    assert first(vllm, shard=1) == ({"vLLM's weights": weights} | cache, 0)
    assert first(vllm, "engine.options={gpu_memory_utilization: 0.3}", shard=1) == ({}, 0.3)
    assert first("engine.type=sglang", shard=1) == ({}, 0)

    shared = recipe(shape_of_7b, vllm, "engine.options={gpu_memory_utilization: 0.3}")
    one = fit(shared, sizes, ParallelSection(shard=8), 8)
    assert one.needs(80 * GIB) == pytest.approx(one.on_first + 24 * GIB)
    line, *_ = judge_meshes([one], 8, 80 * GIB, "x", 1, ParallelSection())
    assert "vLLM's share 24.00" in line.finding


def test_235b_trains_on_256_devices_where_others_sample(shape_of_235b):
    apart = "rollout.samplers=8", "rollout.staleness=1"
    within = recipe(shape_of_235b, "trainer.micro_batch_tokens=8192")
    beside = recipe(shape_of_235b, "trainer.micro_batch_tokens=8192", *apart)
    sizes = sizes_of(beside)
    assert 2.3e11 < sizes.numbers < 2.4e11

    mesh = ParallelSection(shard=256)
    assert not fit(within, sizes, mesh, 256).fits_in(80 * GIB), "438 GiB on the first one"
    assert fit(beside, sizes, mesh, 256).fits_in(80 * GIB)


@pytest.mark.parametrize(("bits", "bytes_of_a_weight"), [("none", 2), ("8bit", 1), ("4bit", 0.516)])
def test_adapters_need_no_weights_of_their_base(bits, bytes_of_a_weight, few_layers):
    config = recipe(few_layers, "model.lora.rank=16", f"model.lora.quantize={bits}")
    sizes = sizes_of(config)
    ends = 2 * 152064 * 3584  # never packed
    in_layers = 4 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert sizes.trained.total == 4 * 16 * (4 * 3584 + 2 * 3584 + 1024 + 3 * (3584 + 18944))

    parts = fit(config, sizes, ParallelSection(), 1).parts
    expected = bytes_of_a_weight * in_layers + 2 * ends + 4 * sizes.trained.total
    assert parts["weights"] == pytest.approx(expected, rel=1e-3)
    assert parts["optimizer"] == 8 * sizes.trained.total
    assert ("unpacked matrix" in parts) == (bits != "none")

    meshes = {str(one) for one in fits(config, sizes, 2)}
    assert ("shard=2" in meshes) == (bits == "none"), "packed weights are not sharded"
    copied = recipe(few_layers, "model.lora.rank=16", "algorithm.kl_coef=0.1")
    copy = fit(copied, sizes, ParallelSection(), 1).parts["reference copy"]
    assert copy == 4 * sizes.trained.total, "the base is its own reference's"


@pytest.mark.parametrize(
    ("memory", "is_named"), [(60.0, False), (30.0, True), (12.0, True), (1.0, False)]
)
def test_measures_that_are_enough_together_are_named_where_none_is_alone(
    few_layers, memory, is_named
):
    def needed(*overrides):
        words = [f"model.name={few_layers}", "model.dtype=bfloat16", "cold_start.episodes=0"]
        config = build_config({"environment": {"type": "coins"}}, [*words, *overrides])
        if not overrides:
            return check_meshes(config, 1, memory, "coins")[-1].advice
        return min(one.needs(memory * GIB) for one in fits(config, sizes_of(config), 1))

    advice = needed()
    named = re.match(r"set ([^;]+), with which it needs ([\d.]+) GiB and fits; ", advice)
    if not is_named:
        assert named is None, "one measure is enough, or three are not"
        return

    changes, amount = named.groups()
    words = changes.split()
    assert len({word.split("=")[0] for word in words}) == len(words) == 2
    assert needed(*words) == pytest.approx(float(amount) * GIB, abs=0.01 * GIB)
    assert needed(*words) <= 0.9 * memory * GIB
    assert all(needed(word) > 0.9 * memory * GIB for word in words), "none alone"


def test_a_saved_adapter_brings_its_own_rank(few_layers, tmp_path):
    saved = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    sizes = sizes_of(recipe(few_layers, f"model.lora.adapter={tmp_path}"))
    assert sizes.trained.total == 4 * 4 * (3584 + 3584)


def test_measures_are_computed_and_ordered_by_what_they_save(few_layers):
    config = build_config(
        {"environment": {"type": "coins"}},
        [f"model.name={few_layers}", "model.dtype=bfloat16", "cold_start.episodes=0"],
    )
    last = check_meshes(config, 1, 30.0, "coins")[-1]
    assert last.status == "wrong"

    saved = dict(re.findall(r"(?:^|; )([^;]+) saves ([\d.]+) GiB", last.advice))
    amounts = [float(amount) for amount in saved.values()]
    assert amounts == sorted(amounts, reverse=True)
    assert {change.split("=")[0] for change in saved} == {
        "--devices", "engine.kv_cache_gb", "memory.checkpointing", "memory.offload_activations",
        "memory.offload_optimizer", "memory.optimizer", "model.lora.rank",
        "trainer.micro_batch_tokens",
    }  # fmt: skip
    assert "model.lora.rank=16 model.lora.quantize=4bit" in saved
    assert re.search(r"--devices=\d+ saves \S+ GiB and fits", last.advice)

    need = min(one.needs(30 * GIB) for one in fits(config, sizes_of(config), 1))
    adapted = recipe(few_layers, "model.lora.rank=16", "memory.checkpointing=none")
    (left,) = (one.needs(30 * GIB) for one in fits(adapted, sizes_of(adapted), 1))
    assert float(saved["model.lora.rank=16"]) == pytest.approx((need - left) / GIB, abs=0.01)

    sparing = "memory.checkpointing=full", "memory.optimizer=adamw_8bit", "model.lora.rank=16"
    tight = check_meshes(recipe(few_layers, *sparing), 1, 3.0, "coins")[-1].advice
    assert "model.lora.quantize=4bit saves" in tight
    assert not any(f"{word.split('=')[0]}=" in tight for word in sparing)


def test_of_a_hub_model_its_configuration_alone_is_fetched(few_layers, tmp_path, monkeypatch):
    import huggingface_hub

    def download(source, file, local_dir):
        assert (source, file) == ("some/model", "config.json")
        shutil.copy(few_layers / file, local_dir)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *words: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    assert sizes_of(recipe("some/model")).numbers == sizes_of(recipe(few_layers)).numbers


def test_many_devices_are_a_launch(shape_of_7b):
    found = check_meshes(recipe(shape_of_7b), 16, 80.0, "coins")
    assert "agentevo launch coins " in found[-1].advice and "--on slurm" in found[-1].advice
    assert "--set trainer_nodes=2 --set gpus=8" in found[-1].advice


def test_conversations_need_no_engine_and_no_reference(few_layers):
    words = [f"model.name={few_layers}", "model.dtype=bfloat16", "algorithm.kl_coef=0.1"]
    words += ["data.train=[chats.jsonl]", "sft.micro_batch_tokens=3000"]
    config = build_config({}, words, needs_environment=False)
    one = fit(config, sizes_of(config), ParallelSection(), 1)
    assert not one.first
    assert "reference copy" not in one.parts

    *_, last = check_meshes(config, 2, 80.0, "chats.yaml")
    assert "micro-batches of 3,000 tokens" in last.finding
    assert "-m agentevo sft chats.yaml" in last.advice
    assert "torchrun --nnodes=2" in check_meshes(config, 16, 80.0, "chats.yaml")[-1].advice


@pytest.mark.parametrize(("devices", "word"), [(0, "give 1 to"), (10**9, "give 1 to")])
def test_impossible_numbers_are_refused(devices, word, shape_of_7b):
    with pytest.raises(ConfigError, match=word):
        check_meshes(recipe(shape_of_7b), devices, 80.0, "coins")
    with pytest.raises(ConfigError, match="give 1 to 64 processes"):
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
