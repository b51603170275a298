"""The families of models that see, computed by AgentEvo and by transformers' plain forward pass.

    .venv/bin/python benchmarks/vision_architectures.py --write     # the table of the page
    .venv/bin/python benchmarks/vision_architectures.py qwen2_vl    # one family

Of each a tiny model with random weights is made (tests/support/tiny_vision.py), and compared with
transformers' own eager pass of every sequence alone, from its pixels, in float32:

    training     log-probs of packed samples, of which three share a beginning with an image
    gradient     of a weighted sum of them, in the embeddings, the tower and the projector
    engine       log-probs as drawn, in two turns of a session; the second shows new images
    second turn  log-probs of a pass over rows that continues from a first turn, with a new image
    LoRA         the training column again, with adapters in all parts that can have them

A figure is the largest absolute difference of log-probs in nats, for gradients |g - e| / |e|. The
same comparisons are tests: tests/models/vision, tests/inference/test_engine_images.py,
tests/training/test_images.py. The command ends with exit code 1 if a figure is above LIMIT.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from figures import Figure, write_results
from machine import describe_machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from adapted_models import moved  # noqa: E402
from seeing import Seeing, second_turn_difference  # noqa: E402
from seeing_policies import play_two_turns, seeing_policy  # noqa: E402
from seeing_samples import branches, compare_packed, packed_difference  # noqa: E402
from tiny_vision import FAMILIES, VARIANTS, write_tiny_vision  # noqa: E402

from agentevo.config import EngineSection, LoraSection  # noqa: E402
from agentevo.errors import ModelError  # noqa: E402
from agentevo.inference.embedded.torch_engine import TorchEngine  # noqa: E402
from agentevo.models.compute.rows import row_settings  # noqa: E402
from agentevo.models.files.merge import merge_adapter  # noqa: E402
from agentevo.models.files.save import save_model  # noqa: E402
from agentevo.training.batching import row_groups  # noqa: E402

PAGE = ROOT / "docs" / "architectures.md"
HEADING = "## Models that see"
LIMIT = 1e-4
COLUMNS = ("training", "gradient", "engine", "second turn", "LoRA")
TITLES = {
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_5": "Qwen3.5, full attention",
    "qwen3_5_linear": "Qwen3.5, linear attention",
    "idefics3": "Idefics3",
    "smolvlm": "SmolVLM",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4 E2B, E4B",
    "gemma4_vision": "larger Gemma 4",
    "internvl": "InternVL",
    "llava": "LLaVA",
}
SECTION = """{heading}

`python benchmarks/vision_architectures.py --write` made this table with transformers {version}, on
tiny models with random weights in float32 on a CPU. The figures are differences from transformers'
own eager pass of each sequence alone, from its pixels, in float32. What the families need is on
the page [Training](training.md#models-that-see).

- **training**, **gradient**: packed samples with images, of which three share a beginning with one
- **engine**: two turns of a session, as drawn; the second shows new images
- **second turn**: a pass over rows that continues from a first turn, with a new image
- **LoRA**: the training column with adapters in language model, tower and projector (Gemma 3 has
  no linear layer in its projector)

| family | type or variant | way | {columns} |
|---|---|---|{rules}
{lines}
"""


def measure(name: str) -> dict[str, Any]:
    """The way of a family and its figures, by column."""
    with TemporaryDirectory() as folder:
        return _measure(write_tiny_vision(name, Path(folder) / "model"), name, Path(folder))


def _measure(model: Path, name: str, work: Path) -> dict[str, Any]:
    seeing = Seeing.read(model, "auto")
    settings = row_settings(seeing.loaded.model)
    packed = compare_packed(seeing, *branches(seeing), merge=True)
    return {
        "way": "tree" if settings is None else "rows, shared" if settings.shares else "rows",
        "training": packed.difference,
        "gradient": packed.gradient_difference,
        "engine": _measure_engine(name),
        "second turn": second_turn_difference(Seeing.read(model, "rows")),
        "LoRA": _measure_lora(model, work),
    }


def _measure_engine(name: str) -> float:
    policy = seeing_policy(name)
    section = EngineSection(kv_cache_tokens=8192, prefill_tokens=16)
    engine = TorchEngine(policy.model, policy.processor.tokenizer, section)
    turns = asyncio.run(play_two_turns(policy, engine))
    return max(policy.difference(prompt, answer) for prompt, answer in turns)


def _measure_lora(model: Path, work: Path) -> float:
    """Transformers computes the merged weights."""
    adapted = _read_adapted(model)
    moved(adapted.loaded.model, by=0.05)
    adapter = save_model(adapted.loaded.model, adapted.loaded.tokenizer, work / "adapter")
    merged = Seeing.read(merge_adapter(adapter, work / "merged"), "rows")
    return packed_difference(Seeing(adapted.loaded, merged.plain), *branches(adapted))


def _read_adapted(model: Path) -> Seeing:
    parts = ["all-linear", "tower", "projector"]
    try:
        return Seeing.read(model, "auto", lora=LoraSection(rank=2, targets=parts))
    except ModelError:  # a projector without linear layers
        return Seeing.read(model, "auto", lora=LoraSection(rank=2, targets=parts[:2]))


def describe(rows: dict[str, dict[str, Any]]) -> str:
    """The section of the page."""
    lines = [
        f"| {TITLES[name]} | {name} | {row['way']} | "
        + " | ".join(f"{row[column]:.0e}" for column in COLUMNS)
        + " |"
        for name, row in rows.items()
    ]
    return SECTION.format(
        heading=HEADING,
        version=transformers.__version__,
        columns=" | ".join(COLUMNS),
        rules="---|" * len(COLUMNS),
        lines="\n".join(lines),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="families and variants; all without")
    parser.add_argument("--write", action="store_true", help="write the page and the results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    row_groups.SMALLEST_SAVING = 1  # the texts are short
    machine = describe_machine()

    rows = {}
    for name in options.names or (*FAMILIES, *VARIANTS):
        rows[name] = row = measure(name)
        figures = "  ".join(f"{column} {row[column]:.1e}" for column in COLUMNS)
        print(f"{name} ({row['way']}): {figures}", flush=True)

    if options.write:
        before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
        PAGE.write_text(f"{before.rstrip()}\n\n{describe(rows)}", encoding="utf-8")
        meaning = "largest difference from transformers' plain pass"
        figures = [
            Figure(name, max(row[column] for column in COLUMNS), meaning, row)
            for name, row in rows.items()
        ]
        print(write_results(figures, {}, {}, machine, part="vision"))

    sys.exit(any(not row[column] <= LIMIT for row in rows.values() for column in COLUMNS))


if __name__ == "__main__":
    main()
