"""Predicted memory against the measured peak of real training steps, each in a process of its
own."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from slow import soak
from tiny_vision import tiny_vision

from agentevo.config import LoraSection, build_config
from agentevo.models.compute.adapters import add_adapter
from agentevo.models.compute.compiled import compile_layers
from agentevo.runs.doctor.memory_estimate import (
    Load,
    layer_bytes,
    process_terms,
    shape_of,
    shape_policy,
    sizes_of,
    total,
    trained_of,
)

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
GPU_RESULTS = BENCHMARKS / "results" / "2026-11-26-h200-gpu.json"
SIZES = {"hidden": 256, "layers": 3, "vocabulary": 8192, "length": 512}


def of_benchmarks(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return of_benchmarks("training_memory")


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield of_benchmarks("gpu")


MEASURED = [
    {"samples": 4, "checkpointing": "selective"},
    {"samples": 4, "rank": 8, "dtype": "bfloat16"},
    {"samples": 8, "parts": 2, "shard": 2},
    {"samples": 6, "parts": 3},
    {"samples": 16, "parts": 8, "pipeline": 2, "layers": 4, "which": 0},
    {"samples": 4, "rank": 8},
    {"samples": 4, "rank": 8, "checkpointing": "selective"},
    {"samples": 4},
    {"samples": 12, "length": 384, "checkpointing": "full"},
    {"samples": 3, "kind": "sft"},
    {"samples": 8, "parts": 2, "shard": 2, "length": 1024, "checkpointing": "full"},
    {"samples": 16, "parts": 8, "pipeline": 2, "layers": 4},
    {"samples": 32, "parts": 8, "pipeline": 4, "layers": 4, "which": 0, "checkpointing": "full"},
]


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "case", MEASURED, ids=lambda case: " ".join(f"{key}={case[key]}" for key in case)
)
def test_the_prediction_is_right_within_15_percent(case, benchmark):
    predicted, measured = benchmark.measure(**SIZES | case)
    assert predicted == pytest.approx(measured, rel=0.15), (
        f"{predicted / 2**20:.0f} MiB predicted, {measured / 2**20:.0f} measured"
    )


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_long_context_takes_memory_in_proportion_to_its_length(benchmark):
    """One sequence of 8K and one of 16K tokens: neither attention nor the output layer makes
    anything that grows with the square."""
    sizes = {"hidden": 128, "layers": 2, "vocabulary": 4096, "samples": 1, "checkpointing": "full"}
    (_, short), (predicted, long) = (
        benchmark.measure(**sizes, length=length) for length in (8192, 16384)
    )
    assert 1.8 < (long - benchmark.LIBRARIES) / (short - benchmark.LIBRARIES) < 2.2
    assert predicted == pytest.approx(long, rel=0.15)


def test_activations_by_hand(random_model):
    """A Llama layer of width 32 (query 32, key 16, 4 heads) with 48 inner units, in float32: what
    its backward pass needs."""
    model = random_model("llama").alone
    shape = shape_of(model)
    trained = trained_of(model)
    assert (shape.query, shape.key, shape.head_norms, shape.tied) == (32, 16, False, True)

    norms = 2 * 3 * 32
    attention = 2 * 32 + 2 * 16 + 4
    mlp = 4 * 48
    assert layer_bytes(shape, trained, "none") == 4 * (norms + attention + mlp)
    assert layer_bytes(shape, trained, "full") == 4 * 32
    assert (
        layer_bytes(shape, trained, "full")
        < layer_bytes(shape, trained, "selective")
        < layer_bytes(shape, trained, "none")
    )
    assert shape_of(random_model("qwen3").alone).head_norms


def terms(model, load: Load, *overrides: str) -> dict[str, float]:
    config = build_config({"environment": {"type": "coins"}}, overrides)
    return process_terms(config, sizes_of(model), load=load)


def test_what_is_trained_decides(random_model):
    plain = copy.deepcopy(random_model("qwen2").alone)
    load = Load(tokens=1000, rows=500, on_cpu=False)
    whole = terms(plain, load)
    numbers = sum(p.numel() for p in plain.parameters())
    assert whole["optimizer"] == 8 * numbers
    assert whole["weights"] == 4 * numbers

    section = LoraSection(rank=2, targets=("q_proj",))
    few = terms(add_adapter(copy.deepcopy(plain), section, seed=0), load)
    assert few["optimizer"] < whole["optimizer"] / 10
    assert few["activations"] < whole["activations"]

    eight = terms(plain, load, "memory.optimizer=adamw_8bit")
    assert 0.25 <= eight["optimizer"] / whole["optimizer"] < 0.26
    assert terms(plain, load, "memory.offload_optimizer=true")["optimizer"] == 0

    half = terms(plain.bfloat16(), load)
    assert half["weights"] == 6 * numbers, "and float32 masters"
    assert half["optimizer"] == 8 * numbers


@pytest.mark.slow
def test_frozen_parts_of_a_model_that_sees_are_not_trained():
    def of(name, vision):
        config = build_config({"model": {"name": name, "vision": vision}}, needs_environment=False)
        return sizes_of(shape_policy(config, tiny_vision(name).config))

    whole = of("qwen2_vl", {})
    assert whole.frozen_bytes == 0
    without = of("qwen2_vl", {"freeze": ["tower", "projector"]})
    assert 0 < 4 * without.trained.total == 4 * whole.trained.total - without.frozen_bytes
    assert of("qwen2_vl", {"images": False}).frozen_bytes == without.frozen_bytes
    text = of("qwen3_5", {"images": False})  # its type has a class without a tower
    assert text.numbers < of("qwen3_5", {}).numbers


def test_memory_grows_linearly_with_tokens(random_model):
    model = random_model("llama").alone
    for mode in ("none", "selective", "full"):
        sizes = [
            total(terms(model, Load(n, n, on_cpu=False), f"memory.checkpointing={mode}"))
            for n in (100_000, 200_000, 400_000)
        ]
        assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.2)


@pytest.mark.parametrize("name", ["0.5b", "0.6b", "1.5b", "7b"])
def test_a_gpus_peak_was_foreseen(name, gpu):
    """Peaks that `benchmarks/gpu.py` measured on an H200, layers compiled."""
    results = json.loads(GPU_RESULTS.read_text())["results"]
    found = next(
        result for result in results if result["part"] == "train" and result["model"] == name
    )

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = gpu.SHAPES[name]()

    torch.set_default_dtype(torch.float32)
    tokens = found["micro"]
    load = Load(tokens, tokens * 3 // 4, on_cpu=False)
    assert total(terms(compile_layers(model), load)) == pytest.approx(
        found["peak_gib"] * 2**30, rel=0.15
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["0.5B", *soak("7B")])
def test_the_page_shows_what_the_command_prints(name, capsys):
    of_benchmarks("memory_table").print_table(80 * 2**30, (), [name])
    page = Path(__file__).resolve().parents[3] / "docs" / "training.md"
    assert capsys.readouterr().out.splitlines()[-1] in page.read_text().splitlines()
