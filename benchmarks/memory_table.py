"""What training models of usual sizes needs, as `agentevo doctor --devices` computes it: the table
of docs/training.md. Nothing is trained, and no weight is made.

    python benchmarks/memory_table.py [--device-memory 80] [memory.checkpointing=none ...]

Further words are overrides of the recipe. A cell is the peak on one device, in GiB, with the
embedded engine, where that fits; else the least number of devices, a power of 2, that a mesh of the
trainer fits, while engines have devices of their own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import Qwen2Config

from agentevo.config import RunConfig, build_config
from agentevo.runs.doctor.checks import GIB
from agentevo.runs.doctor.memory_estimate import sizes_of, total, unloaded_policy
from agentevo.runs.doctor.mesh_estimate import ROOM, estimate_meshes

SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
}
"""Of Qwen2.5: width, inner width, layers, heads, key-value heads, vocabulary, tied embeddings."""
ADAPTERS = {
    "full": [],
    "LoRA": ["model.lora.rank=16"],
    "QLoRA": ["model.lora.rank=16", "model.lora.quantize=4bit"],
}
RECIPE = ("model.dtype=bfloat16", "memory.checkpointing=full", "trainer.micro_batch_tokens=8192")
APART = ("rollout.samplers=1", "rollout.staleness=1")
MOST_DEVICES = 64


def write_shape(name: str, folder: Path) -> None:
    """The config.json of a Qwen2.5 of that size."""
    hidden, inner, layers, heads, keys, vocabulary, is_tied = SHAPES[name]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
        tie_word_embeddings=is_tied,
        architectures=["Qwen2ForCausalLM"],
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))


def describe_need(name: str, memory: float, overrides: Sequence[str]) -> str:
    """A cell of the table. `memory`: bytes of a device."""
    with tempfile.TemporaryDirectory() as folder:
        write_shape(name, Path(folder))
        words = [f"model.name={folder}", *RECIPE, *overrides]
        config, apart = (
            build_config({"environment": {"type": "coins"}}, [*words, *more])
            for more in ((), APART)
        )
        sizes = sizes_of(unloaded_policy(config))

    def least(recipe: RunConfig, devices: int) -> float:
        return min(map(total, estimate_meshes(recipe, sizes, devices, memory).values()))

    if (alone := least(config, 1)) <= ROOM * memory:
        return f"{alone / GIB:.1f}"

    devices = 2
    while least(apart, devices) > ROOM * memory:
        devices *= 2
        if devices > MOST_DEVICES:
            return "does not fit"

    return f"{devices} devices"


def print_table(memory: float, overrides: Sequence[str], names: Sequence[str]) -> None:
    """`memory`: bytes of a device."""
    print("| model | " + " | ".join(ADAPTERS) + " |")
    print("|---|" + "---|" * len(ADAPTERS))
    for name in names:
        cells = [describe_need(name, memory, [*words, *overrides]) for words in ADAPTERS.values()]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device-memory", type=float, default=80.0, help="GiB of each device")
    parser.add_argument("--model", choices=list(SHAPES), help="one row alone")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    names = [options.model] if options.model else list(SHAPES)
    print_table(options.device_memory * GIB, options.overrides, names)


if __name__ == "__main__":
    main()
