"""What the token tree is worth for models with attention sinks or chunks: log-probs and gradient of
8 answers to one prompt, by the tree and by rows (`trainer.compute`) of the same random model.

    .venv/bin/python benchmarks/compute_ways.py --repeats 3

Prompt: 1,000 tokens; each answer: 100, trained. The ways alternate, their log-probs must agree, and
the ratio is time(rows) / time(tree), of medians, in processor time of one thread.
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
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "sliding_window": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "granite_swa": {"sliding_window": 128},
    "llama4_text": {"attention_chunk_size": 512, "intermediate_size_mlp": 256},
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


def run(model: PreTrainedModel, samples: list[Sample]) -> tuple[float, torch.Tensor]:
    """Processor seconds of a pass with its gradient, and the log-probs by sample and place."""
    model.zero_grad()
    started = time.process_time()
    batch = pack(samples, CPU, merge=shares_prefixes(model, wanted=True))
    logp, _ = token_logprobs(model, batch)
    logp.sum().backward()
    seconds = time.process_time() - started
    return seconds, logp.detach()[torch.argsort(batch.samples * 10_000 + batch.places)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    samples = make_samples()
    for name, kinds in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**SHAPE | kinds)).float()
        ways = {
            "tree": prepare(copy.deepcopy(model), compute="tree"),
            "rows": prepare(model, compute="rows"),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for repeat in range(1 + repeats):  # the first is left out
            logprobs = []
            for way, prepared in ways.items():
                spent, logp = run(prepared, samples)
                logprobs.append(logp)
                seconds[way] += [spent] if repeat else []

        difference = float((logprobs[0] - logprobs[1]).abs().max())
        if difference > 1e-4:
            raise SystemExit(f"{name}: log-probs differ by {difference:.1e}")

        tree, rows = median(seconds["tree"]), median(seconds["rows"])
        print(
            f"{name}: tree {tree:.2f} s, rows {rows:.2f} s, ratio {rows / tree:.2f}, "
            f"log-probs within {difference:.0e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
