"""What a run says of its training before the first step."""

from types import SimpleNamespace

import pytest
from transformers import PretrainedConfig

from agentevo.config import build_config
from agentevo.runs.orchestration.trainers import rounding_notes, training_notes


@pytest.mark.parametrize(
    ("device", "dtype", "name", "advised"),
    [
        ("cuda", "float32", "org/model", True),
        ("npu", "float32", "org/model", True),
        ("cuda", "bfloat16", "org/model", False),
        ("cpu", "float32", "org/model", False),
        ("cuda", "float32", "tiny", False),
    ],
)
def test_bfloat16_is_asked_for_on_an_accelerator(device, dtype, name, advised):
    model = {"name": name, "dtype": dtype}
    config = build_config({"environment": {"type": "coins"}, "model": model})
    placed = SimpleNamespace(device=SimpleNamespace(type=device), config=PretrainedConfig())
    tasks = SimpleNamespace(shortfall=lambda: None)
    notes = training_notes(SimpleNamespace(config=config, model=placed, tasks=tasks), "train")
    assert any("set model.dtype=bfloat16" in note for note in notes) is advised


@pytest.mark.parametrize(("asks", "coef"), [(True, 0.0), (True, 0.01), (False, 0.0)])
def test_a_router_s_loss_that_is_not_added_is_named(asks, coef):
    trainer = {"router_aux_loss_coef": coef}
    tree = {"environment": {"type": "coins"}, "model": {"name": "tiny"}, "trainer": trainer}
    config = build_config(tree)
    router = PretrainedConfig(output_router_logits=asks, router_aux_loss_coef=0.02)
    model = SimpleNamespace(device=SimpleNamespace(type="cpu"), config=router)
    tasks = SimpleNamespace(shortfall=lambda: None)
    notes = training_notes(SimpleNamespace(config=config, model=model, tasks=tasks), "train")
    named = any("see trainer.router_aux_loss_coef" in note for note in notes)
    assert named is (asks and not coef)


@pytest.mark.parametrize(
    ("algorithm", "command", "ending"),
    [
        ("grpo", "train", "adds none: see trainer.router_aux_loss_coef"),
        ("dpo", "train", "adds none"),
        ("dpo", "sft", "adds none: see sft.router_aux_loss_coef"),
    ],
)
def test_a_router_s_loss_is_advised_only_where_it_is_possible(algorithm, command, ending):
    tree = {"environment": {"type": "coins"}, "model": {"name": "tiny"}}
    config = build_config(tree | {"algorithm": {"name": algorithm}})
    router = PretrainedConfig(output_router_logits=True)
    model = SimpleNamespace(device=SimpleNamespace(type="cpu"), config=router)
    tasks = SimpleNamespace(shortfall=lambda: None)
    notes = training_notes(SimpleNamespace(config=config, model=model, tasks=tasks), command)
    assert any(note.endswith(ending) for note in notes)


ROUNDS = {"type": "vllm", "options": {"quantization": "fp8", "kv_cache_dtype": "fp8"}}


@pytest.mark.parametrize(
    ("engine", "algorithm", "expected"),
    [
        (
            ROUNDS,
            {},
            ["quantization=fp8, kv_cache_dtype=fp8", "token_tis corrects", "gap_mean and"],
        ),
        (ROUNDS, {"importance": "token_mis", "old_logprobs": "recomputed"}, ["token_mis corrects"]),
        (ROUNDS, {"importance": "none"}, ["nothing corrects", "would measure"]),
        (ROUNDS, {"name": "decoupled_ppo"}, ["the weights of its loss decoupled_ppo correct"]),
        (
            {"type": "sglang", "options": {"args": ["--quantization", "fp8", "--tp-size=2"]}},
            {},
            ["sglang rounds (--quantization=fp8)"],
        ),
        ({"type": "sglang", "options": {"args": ["--kv-cache-dtype=auto"]}}, {}, []),
        ({"type": "vllm", "options": {"kv_cache_dtype": "auto"}}, {}, []),
        ({"type": "vllm", "options": {"speculative_config": {"method": "ngram"}}}, {}, []),
        ({"type": "torch"}, {}, []),
    ],
)
def test_a_run_says_what_corrects_for_an_engine_that_rounds(engine, algorithm, expected):
    tree = {"environment": {"type": "coins"}, "model": {"name": "tiny"}}
    config = build_config(tree | {"engine": engine, "algorithm": algorithm})
    notes = " ".join(rounding_notes(config))
    assert bool(notes) is bool(expected) and all(text in notes for text in expected)
