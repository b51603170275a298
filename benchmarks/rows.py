"""Models that compute rows against peers on the same weights and cores.

    .venv/bin/python benchmarks/rows.py --save

The models have random weights: Qwen3-Next (10M parameters) and LFM2 (13M). Ours and theirs take
turns. Prints ratios of medians of the repeats.

`rows_generate_MODEL_N`: tokens per second of the embedded engine over transformers' `generate`.
Every repeat has new prompts of 48 tokens, with 64 new tokens each, and one round warms up.

    1           one request; at least 1.0
    16_in_turn  16 requests at once over `generate` called 16 times; at least 4
    16_batched  16 requests at once over `generate` on one batch of prompts of equal length

`rows_step_MODEL_train_KIND_vs_trl`: seconds of TRL's GRPO training step over ours, as in
train_step.py, with the vocabulary of SmolLM2. KIND is `shared` (8 answers to one prompt of 1,000
tokens) or `unshared`; at least 1.0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from agentevo.config import EngineSection
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.attention import prepare
from figures import Figure, write_results
from generate import NEW_TOKENS, PROMPT_TOKENS, TEMPERATURE, random_prompts
from machine import describe_machine
from ours import load, model_folder, time_generate
from peers import Peer, trl_train_step
from train_step import ROWS, against_trl

SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 320,
    "intermediate_size": 896,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 40,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_hidden_layers": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 40,
        "linear_value_head_dim": 40,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
}
CASES = {"1": 1, "16_in_turn": 16, "16_batched": 16}


def write_model(name: str, folder: Path, **changes: Any) -> int:
    """Writes the weights, and returns how many there are."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**SHAPE | MODELS[name] | changes)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def ask(peer: Peer, prompts: list[list[int]], in_turn: bool) -> float:
    """The peer's tokens per second."""
    answers = [
        peer.ask({"prompts": batch, "new_tokens": NEW_TOKENS, "temperature": TEMPERATURE})
        for batch in ([[prompt] for prompt in prompts] if in_turn else [prompts])
    ]
    return sum(a["tokens"] for a in answers) / sum(a["seconds"] for a in answers)


def compare(name: str, folder: Path, peer: Peer, repeats: int, size: int) -> list[Figure]:
    """The figures of one model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = TorchEngine(prepare(model.eval()), config=EngineSection())
    figures = []
    for case, count in CASES.items():
        speeds: dict[str, list[float]] = {"agentevo": [], peer.name: []}
        for repeat in range(repeats + 1):
            prompts = random_prompts(count, PROMPT_TOKENS, repeat)
            prompts = [[token % SHAPE["vocab_size"] for token in prompt] for prompt in prompts]
            seconds, tokens = time_generate(engine, prompts, NEW_TOKENS, TEMPERATURE, repeat)
            theirs = ask(peer, prompts, in_turn=case.endswith("in_turn"))
            if repeat:
                speeds["agentevo"].append(tokens / seconds)
                speeds[peer.name].append(theirs)

        medians = {key: median(values) for key, values in speeds.items()}
        raw = {"unit": "tokens/s", "medians": medians, "repeats": speeds, "parameters": size}
        meaning = f"generation of {name}, {case.replace('_', ' ')}"
        figure = Figure(
            f"rows_generate_{name}_{case}", medians["agentevo"] / medians[peer.name], meaning, raw
        )
        figures.append(figure)
        print(figure.line(), flush=True)
        print(figure.details(), file=sys.stderr, flush=True)

    return figures


def compare_steps(
    name: str, folder: Path, threads: int, repeats: int
) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of one model's training steps, and TRL's record."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    tokenizer.save_pretrained(folder)
    write_model(name, folder, vocab_size=len(tokenizer), max_position_embeddings=2048)
    figures: list[Figure] = []
    record: dict[str, Any] = {}
    for kind, make_rows in ROWS.items():
        rows = make_rows(load(folder).model)
        file = folder / f"{kind}_rows.json"
        file.write_text(json.dumps([row.json() for row in rows]))
        with trl_train_step(folder, file, threads) as trl:
            for figure in against_trl(folder, trl, kind, rows, repeats):
                figures.append(replace(figure, name=f"rows_step_{name}_{figure.name}"))
                print(figures[-1].line(), flush=True)
                print(figures[-1].details(), file=sys.stderr, flush=True)
            record = trl.record()

    return figures, record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/...json")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    before = describe_machine()
    figures: list[Figure] = []
    peers = {}
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            size = write_model(name, Path(folder))
            words = [folder, str(options.threads)]
            with Peer("transformers", None, "peer_transformers_generate.py", words) as peer:
                figures += compare(name, Path(folder), peer, options.repeats, size)
                peers[name] = peer.record()

        with tempfile.TemporaryDirectory() as folder:
            steps, record = compare_steps(name, Path(folder), options.threads, options.repeats)
            figures += steps
            peers[f"{name}_step"] = record

    if options.save:
        print(write_results(figures, {}, peers, before, "rows"))


if __name__ == "__main__":
    main()
