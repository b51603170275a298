"""What meshes need, from shapes alone; and the measured step of one on this machine."""

import json
import re
import shutil

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from agentevo.config import ParallelSection, build_config
from agentevo.errors import ConfigError
from agentevo.runs.doctor.checks import GIB
from agentevo.runs.doctor.memory_estimate import (
    engine_bytes,
    layer_bytes,
    longest_pass,
    process_terms,
    sizes_of,
    total,
    unloaded_policy,
)
from agentevo.runs.doctor.mesh_estimate import ROOM, check_meshes, estimate_mesh, estimate_meshes
from agentevo.runs.doctor.mesh_step import check_mesh_step

MEMORY = 80 * GIB


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


def recipe(name, *overrides, **mesh):
    words = [f"model.name={name}", "model.dtype=bfloat16", "cold_start.episodes=0"]
    words += ["memory.checkpointing=full"]
    words += [f"trainer.parallel.{key}={size}" for key, size in mesh.items()]
    return build_config({"environment": {"type": "coins"}}, [*words, *overrides])


def sizes_in(config):
    return sizes_of(unloaded_policy(config))


@pytest.mark.slow
def test_a_model_that_one_device_cannot_hold_is_sharded(shape_of_7b):
    config = recipe(shape_of_7b)
    sizes = sizes_in(config)
    assert 7.5e9 < sizes.numbers < 7.8e9

    alone = estimate_mesh(config, sizes, ParallelSection(), 8, MEMORY)
    assert total(alone) > 16 * sizes.numbers, "masters, gradients, moments, and what computes"

    sharded = estimate_meshes(config, sizes, 8, MEMORY)[ParallelSection(shard=8)]
    states = sum(sharded[name] for name in ("weights", "gradients", "optimizer"))
    assert 16 * sizes.numbers / 8 < states < 16 * sizes.numbers / 8 + 10 * GIB
    assert sharded["engine"] == 2 * sizes.numbers + 4 * GIB, "a whole model, and its cache"

    fitting = check_meshes(config, 8, 80.0, "coins run.dir=x")
    assert fitting.status == "good"
    assert "torchrun --standalone --nproc-per-node=8 -m agentevo train coins" in fitting.advice
    assert "trainer.parallel.shard=" in fitting.advice
    nothing = check_meshes(config, 8, 8.0, "coins")
    assert nothing.status == "wrong" and "Limit memory" in nothing.advice


@pytest.mark.slow
def test_the_table_has_a_row_for_each_mesh_whose_terms_add_up(shape_of_7b):
    finding = check_meshes(recipe(shape_of_7b), 8, 80.0, "coins").finding
    head, header, *rows = finding.splitlines()
    assert re.match(r"\d+ of \d+ meshes fit 8 devices of 80.0 GiB with micro-batches of ", head)
    assert header.split()[:3] == ["mesh", "weights", "gradients"]
    assert 1 < len(rows) <= 6
    for row in rows:
        *terms, whole = map(float, re.findall(r"\d+\.\d\d", row))
        assert sum(terms) == pytest.approx(whole, abs=0.05)
        assert whole <= ROOM * 80


@pytest.mark.slow
def test_a_recipe_with_a_mesh_is_judged_by_it_alone(shape_of_7b):
    check = check_meshes(recipe(shape_of_7b, pipeline=2), 8, 80.0, "coins")
    assert check.status == "wrong", "half of the weights, moments and gradients are too much"
    (row,) = check.finding.splitlines()[2:]
    assert row.split("  ")[4].strip() == "pipeline=2 x replicas=4"

    key = "trainer.parallel.shard=8"
    check = check_meshes(recipe(shape_of_7b, shard=8), 8, 80.0, f"coins {key}")
    assert check.status == "good" and check.advice.count(key) == 1
    with pytest.raises(ConfigError, match="does not divide the 8 processes"):
        check_meshes(recipe(shape_of_7b, pipeline=3), 8, 80.0, "coins")


def test_more_shards_take_less_and_so_does_half_a_sequence(shape_of_7b):
    config = recipe(shape_of_7b)
    sizes = sizes_in(config)

    def terms(**mesh):
        return estimate_mesh(config, sizes, ParallelSection(**mesh), 16, MEMORY)

    most = [total(terms(shard=n)) for n in (2, 4, 8, 16)]
    assert most == sorted(most, reverse=True)
    assert terms(context=2)["activations"] < 0.7 * terms()["activations"]
    assert terms(tensor=2)["gradients"] == terms()["gradients"] / 2


@pytest.mark.slow
def test_stages_share_the_weights_and_keep_as_many_micro_batches_as_follow(shape_of_7b):
    sizes = sizes_in(recipe(shape_of_7b))
    alone = process_terms(recipe(shape_of_7b), sizes)
    staged = recipe(shape_of_7b, pipeline=4)
    stages = [process_terms(staged, sizes, n) for n in range(4)]
    for name in ("weights", "gradients", "optimizer"):
        assert sum(terms[name] for terms in stages) == pytest.approx(alone[name])

    activations = [terms["activations"] for terms in stages[:3]]
    per_layer = layer_bytes(sizes.shape, sizes.trained, "full") * longest_pass(staged, sizes)
    assert activations[0] - activations[1] == pytest.approx(8 * per_layer)  # 7 layers, and a send
    assert activations[1] - activations[2] == pytest.approx(8 * per_layer)

    def stage_numbers(*overrides):
        meshes = estimate_meshes(recipe(shape_of_7b, *overrides), sizes, 8, MEMORY)
        return {mesh.pipeline for mesh in meshes}

    assert stage_numbers() == {1, 2, 4}, "divisors of 28 layers and 8 devices"
    assert stage_numbers("algorithm.name=ppo") == {1}


@pytest.mark.parametrize(
    ("mesh", "part"), [({"pipeline": 2}, 1), ({"tensor": 2}, 1 / 2), ({"shard": 2}, 0)], ids=str
)
def test_the_output_layers_gradient_of_a_pass_is_counted_once(mesh, part, shape_of_7b):
    """Before it is added to that of earlier passes; of shards it is among what is gathered."""
    config = recipe(shape_of_7b, "trainer.micro_batch_tokens=256", **mesh)
    sizes = sizes_in(config)
    matrix = 4 * sizes.shape.vocabulary * sizes.shape.hidden
    blocks = process_terms(recipe(shape_of_7b, "trainer.micro_batch_tokens=256", shard=2), sizes)
    terms = process_terms(config, sizes, mesh.get("pipeline", 1) - 1)
    assert part * matrix <= terms["logits"] <= part * matrix + blocks["logits"]


@pytest.mark.slow
def test_what_a_recipe_asks_for_is_counted(shape_of_7b):
    sizes = sizes_in(recipe(shape_of_7b))

    def terms(*overrides):
        return process_terms(recipe(shape_of_7b, *overrides, shard=4), sizes)

    assert terms()["other models"] == 0
    assert terms("algorithm.kl_coef=0.1")["other models"] == sizes.numbers, "4 bytes over 4"
    away = terms("algorithm.name=ppo", "memory.offload_optimizer=true")
    assert away["optimizer"] == 0
    assert away["other models"] < terms("algorithm.name=ppo")["other models"] / 1.4


def test_the_engine_is_counted_on_the_first_device(shape_of_7b):
    sizes = sizes_in(recipe(shape_of_7b))

    def engine(*overrides, shard=1):
        return engine_bytes(recipe(shape_of_7b, *overrides, shard=shard), sizes, MEMORY)

    weights = 2 * sizes.numbers
    cache = 4 * GIB
    apart = "rollout.samplers=1", "rollout.staleness=1"
    separate = "rollout.staleness=1", "rollout.sharing=overlap", "rollout.policy=mask"
    vllm = "engine.type=vllm"
    assert engine(shard=4) == weights + cache
    assert engine(*apart, shard=4) == 0
    assert engine(*apart) == cache, "it evaluates with the trainer's own weights"
    assert engine(*separate) == weights + cache
    assert engine("engine.kv_cache_tokens=1000") == 1000 * 28 * 2 * 512 * 2
    assert engine(vllm) == weights + cache
    share = "engine.options={gpu_memory_utilization: 0.3}"
    assert engine(vllm, share) == pytest.approx(0.3 * MEMORY)
    assert engine("engine.type=sglang") == 0


@pytest.mark.slow
def test_235b_trains_on_256_devices_where_others_sample(shape_of_235b):
    words = shape_of_235b, "trainer.micro_batch_tokens=8192"
    sizes = sizes_in(recipe(*words))
    assert 2.3e11 < sizes.numbers < 2.4e11

    def is_enough(*overrides):
        terms = estimate_mesh(
            recipe(*words, *overrides), sizes, ParallelSection(shard=256), 256, MEMORY
        )
        return total(terms) <= ROOM * MEMORY

    assert not is_enough(), "438 GiB on the first one"
    assert is_enough("rollout.samplers=8", "rollout.staleness=1")


@pytest.mark.parametrize(("bits", "bytes_of_a_weight"), [("none", 2), ("8bit", 1), ("4bit", 0.516)])
def test_adapters_need_no_weights_of_their_base(bits, bytes_of_a_weight, few_layers):
    config = recipe(few_layers, "model.lora.rank=16", f"model.lora.quantize={bits}")
    sizes = sizes_in(config)
    ends = 2 * 152064 * 3584  # never packed
    in_layers = 4 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert sizes.trained.total == 4 * 16 * (4 * 3584 + 2 * 3584 + 1024 + 3 * (3584 + 18944))

    terms = process_terms(config, sizes)
    expected = bytes_of_a_weight * in_layers + 2 * ends + 4 * sizes.trained.total
    assert terms["weights"] == pytest.approx(expected, rel=1e-3)
    assert terms["optimizer"] == 8 * sizes.trained.total

    meshes = estimate_meshes(config, sizes, 2, MEMORY)
    is_sharded = ParallelSection(shard=2) in meshes
    assert is_sharded == (bits == "none"), "packed weights are not sharded"
    copied = recipe(few_layers, "model.lora.rank=16", "algorithm.kl_coef=0.1")
    copies = process_terms(copied, sizes)["other models"]
    assert copies == 4 * sizes.trained.total, "the base is its own reference's"


def test_a_saved_adapter_brings_its_own_rank(few_layers, tmp_path):
    saved = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    sizes = sizes_in(recipe(few_layers, f"model.lora.adapter={tmp_path}"))
    assert sizes.trained.total == 4 * 4 * (3584 + 3584)


def test_of_a_hub_model_its_configuration_alone_is_fetched(few_layers, tmp_path, monkeypatch):
    import huggingface_hub

    def download(source, file, local_dir):
        assert (source, file) == ("some/model", "config.json")
        shutil.copy(few_layers / file, local_dir)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *words: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    assert sizes_in(recipe("some/model")).numbers == sizes_in(recipe(few_layers)).numbers


def test_conversations_need_no_engine_and_no_reference(few_layers):
    words = [f"model.name={few_layers}", "model.dtype=bfloat16", "algorithm.kl_coef=0.1"]
    words += ["data.train=[chats.jsonl]", "sft.micro_batch_tokens=3000"]
    config = build_config({}, words, needs_environment=False)
    terms = estimate_mesh(config, sizes_in(config), ParallelSection(), 1, MEMORY)
    assert terms["engine"] == terms["other models"] == 0

    check = check_meshes(config, 16, 80.0, "chats.yaml")
    assert "micro-batches of 3,000 tokens" in check.finding
    assert "torchrun --nnodes=2 --nproc-per-node=8" in check.advice
    assert "-m agentevo sft chats.yaml" in check.advice


@pytest.mark.parametrize("number", [0, 10**9])
def test_impossible_numbers_are_refused(number, shape_of_7b):
    with pytest.raises(ConfigError, match="give 1 to"):
        check_meshes(recipe(shape_of_7b), number, 80.0, "coins")
    with pytest.raises(ConfigError, match="give 1 to 64 processes"):
        check_mesh_step(recipe("tiny"), number, ["coins"])
    with pytest.raises(ConfigError, match="does not divide the 3 processes"):
        check_mesh_step(recipe("tiny", shard=2), 3, ["coins"])


@pytest.mark.soak
@pytest.mark.parametrize("key", ["shard", "pipeline", "context"])
def test_the_step_of_a_mesh_is_measured_beside_its_estimate(key):
    mesh = f"trainer.parallel.{key}=2"
    words = ["coins", "model.name=tiny", "cold_start.episodes=0", "run.threads=1", mesh]
    words += ["trainer.micro_batch_tokens=4096", "model.device=cpu"]
    check = check_mesh_step(build_config({"environment": {"type": "coins"}}, words[1:]), 2, words)
    assert check.status == "good"
    measured, estimated = re.search(
        rf"2 processes \({key}=2\) made one step with micro-batches of 4,096 tokens: the peak is "
        r"([\d.]+) GiB on the device that needs most, the estimate ([\d.]+)",
        check.finding,
    ).groups()
    assert 0.5 * float(estimated) < float(measured) < float(estimated) + 1


@pytest.mark.slow
def test_a_failed_step_names_the_error_and_not_the_launcher():
    words = ["coins", "model.name=tiny", "trainer.parallel.tensor=3", "model.device=cpu"]
    check = check_mesh_step(build_config({"environment": {"type": "coins"}}, words[1:]), 3, words)
    assert check.status == "wrong"
    reason = "exit code 1: error: trainer.parallel.tensor is not possible with 4 attention heads"
    assert reason in check.finding and "ChildFailed" not in check.finding
