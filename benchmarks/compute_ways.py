"""What it is worth to compute a shared prompt once: log-probs and gradient of 8 answers to one
prompt by a random model (`trainer.compute`, `trainer.prefix_merging`):

    rows      each answer with its prompt, by transformers
    shared    rows that continue from the state of the prompt (recurrent models)
    tree      the token tree (models with attention sinks or chunks)

    .venv/bin/python benchmarks/compute_ways.py --repeats 3

Prompt: 1,000 tokens; each answer: 100, trained. The ways alternate, their log-probs must agree, and
the ratio is time(rows) / time(the other way), of medians, in processor time of one thread.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from statistics import median
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from agentevo.models.compute.attention import prepare
from agentevo.models.compute.rows import shares_prefixes
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import Sample
from grpo_rows import random_ids

PROMPT_TOKENS = 1000
ANSWER_TOKENS = 100
NUM_ANSWERS = 8
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
DEFAULT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
TREE_MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"sliding_window": 128} | DEFAULT_ROPE,
    "granite_swa": {"sliding_window": 128},
    "llama4_text": {"attention_chunk_size": 512, "intermediate_size_mlp": 256},
}
STATE_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "mamba"],
        "n_groups": 2,
        "mamba_num_heads": 16,
        "mamba_head_dim": 32,
        "ssm_state_size": 64,
        "chunk_size": 64,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]} | DEFAULT_ROPE,
}


def make_samples() -> list[Sample]:
    rng = random.Random(0)
    vocabulary = SHAPE["vocab_size"]
    prompt = random_ids(rng, vocabulary, PROMPT_TOKENS)
    mask = [False] * PROMPT_TOKENS + [True] * ANSWER_TOKENS
    return [
        Sample.given(str(number), "", [*prompt, *random_ids(rng, vocabulary, ANSWER_TOKENS)], mask)
        for number in range(NUM_ANSWERS)
    ]


def run(model: PreTrainedModel, samples: list[Sample], merge: bool) -> tuple[float, torch.Tensor]:
    """Processor seconds of a pass with its gradient, and the log-probs by sample and place."""
    model.zero_grad()
    started = time.process_time()
    batch = pack(samples, CPU, merge=shares_prefixes(model, wanted=merge))
    logp, _ = token_logprobs(model, batch)
    logp.sum().backward()
    seconds = time.process_time() - started
    return seconds, logp.detach()[torch.argsort(batch.samples * 10_000 + batch.places)]


def compare(name: str, kinds: dict[str, Any], way: str, repeats: int) -> str:
    """A line with the times of rows and of `way`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**SHAPE | kinds)).float()
    ways = {"rows": prepare(copy.deepcopy(model), compute="rows")}
    ways[way] = prepare(model, compute="tree") if way == "tree" else ways["rows"]
    if not shares_prefixes(ways[way], wanted=True):
        raise SystemExit(f"{name} shares no states")

    samples = make_samples()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(1 + repeats):  # the first is left out
        logprobs = []
        for number, (key, prepared) in enumerate(ways.items()):
            spent, logp = run(prepared, samples, merge=number > 0)
            logprobs.append(logp)
            seconds[key] += [spent] if repeat else []

    difference = float((logprobs[0] - logprobs[1]).abs().max())
    if difference > 1e-4:
        raise SystemExit(f"{name}: log-probs differ by {difference:.1e}")

    rows, other = (median(spent) for spent in seconds.values())
    return (
        f"{name}: rows {rows:.2f} s, {way} {other:.2f} s, ratio {rows / other:.2f}, "
        f"log-probs within {difference:.0e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for way, models in (("shared", STATE_MODELS), ("tree", TREE_MODELS)):
        for name, kinds in models.items():
            print(compare(name, kinds, way, repeats), flush=True)


if __name__ == "__main__":
    main()
