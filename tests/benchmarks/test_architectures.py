"""Architectures against plain transformers, by what writes docs/architectures.md. The whole list
takes minutes: `python benchmarks/architectures.py`."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
from slow import slow, soak
from tiny_vision import FAMILIES, VARIANTS

from agentevo.models.known_ways import known_ways, way_of

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
QUICK = (
    "deepseek_v3",
    "diffllama",
    "qwen2_moe, with windows",
    "qwen3_5_text",
    "gpt_oss",
    "mimo_v2_flash",
)
SLOW = (
    "gpt2",
    "bert, is_decoder",
    "lfm2",
    "llama4_text, scaled by position",
    "mamba2",
)
SOAK = (
    "cohere2",
    "jetmoe",
    "opt",
    "gemma3n_text, shared keys",
    "kimi_linear",
    "nemotron_h",
    "hrm_text",
    "phimoe, RoPE longrope",
    "longcat_flash",
    "minicpm3",
    "llama, RoPE longrope",
    "gemma3_text, RoPE yarn and default",
    "gemma4_text, shared keys",
    "deepseek_v32",
    "deepseek_v4",
    "granite_swa",
    "zamba2",
    "gemma4_text",
    "afmoe",
    "apertus",
    "deepseek_v2",
    "ernie4_5",
    "exaone4",
    "gemma3_text",
    "glm4",
    "granite",
    "olmo2",
    "phi3",
    "smollm3",
    *(f"llama, RoPE {kind}" for kind in ("default", "linear", "dynamic", "yarn", "llama3")),
    "llama, RoPE proportional",
    "qwen3_next",
)
"""Variants of those above, and further kinds of RoPE."""


@pytest.fixture
def architectures(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("architectures")
    for name in ("architectures", "tiny_configs"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *slow(*SLOW), *soak(*SOAK)])
def test_training_engine_and_adapters_are_what_transformers_computes(name, architectures):
    row = architectures.check(name)
    assert row.verdict == "exact", row
    assert row.figures.keys() >= {"training", "gradient", "engine"}
    assert "lora" in row.figures or "Mamba-based" in row.lora_refusal


@pytest.mark.parametrize("name", ["bert", *slow("roberta", "xlnet")])
def test_what_is_refused_is_refused_before_anything_is_computed(name, architectures):
    row = architectures.check(name)
    assert row.verdict == "refused" and "a token sees those after it" in row.refusal


def test_every_architecture_of_transformers_is_on_the_page(architectures):
    page = (BENCHMARKS.parent / "docs" / "architectures.md").read_text(encoding="utf-8")
    missing = [name for name in architectures.all_names() if f"| {name} |" not in page]
    assert not missing, "run `python benchmarks/architectures.py --write`"


def test_the_list_of_models_says_what_the_page_says(architectures):
    page = (BENCHMARKS.parent / "docs" / "architectures.md").read_text(encoding="utf-8")
    line = re.compile(r"^\| ([^,|]+) \| \w+ \| (tree|rows)(?:, shared)? \|", re.MULTILINE)
    ways = line.findall(page.partition("## Models that see")[0])
    listed = [(model_type, way) for way, types in known_ways().items() for model_type in types]
    assert sorted(ways) == sorted(listed), "run `python benchmarks/architectures.py --write`"
    assert way_of("llama") == "tree" and way_of("mamba2") == "rows" and way_of("bert") is None


def test_every_family_that_sees_is_on_the_page_below_the_limit():
    page = (BENCHMARKS.parent / "docs" / "architectures.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Models that see")
    rows = re.findall(
        r"^\| [^|]+ \| (\w+) \| (?:tree|rows|rows, shared) \| (.+) \|$", section, re.M
    )
    assert [name for name, _ in rows] == [*FAMILIES, *VARIANTS]
    for name, figures in rows:
        assert all(float(figure) <= 1e-4 for figure in figures.split(" | ")), name


@pytest.mark.slow
def test_a_family_that_sees_is_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("vision_architectures")
    row = module.measure("llava")
    assert row["way"] == "tree"
    assert all(row[column] <= module.LIMIT for column in module.COLUMNS)
    assert "| LLaVA | llava | tree | " in module.describe({"llava": row})
