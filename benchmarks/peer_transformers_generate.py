"""Peer worker: transformers `generate` on a batch of prompts (SDPA attention, KV cache), as
`peer_worker` describes.

usage: peer_transformers_generate.py MODEL_FOLDER NUM_THREADS request: {"prompts": [[ids], ...] of
one length, "new_tokens": n, "temperature": t}; answer: {"seconds": wall, "tokens": generated}
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from peer_worker import Line


def generate(model: PreTrainedModel, request: dict[str, Any]) -> dict[str, float]:
    prompts = torch.tensor(request["prompts"])  # [N, L]
    sampled = request["temperature"] > 0
    config = GenerationConfig(
        max_new_tokens=request["new_tokens"],
        min_new_tokens=None,
        do_sample=sampled,
        temperature=request["temperature"] if sampled else None,
        top_k=0 if sampled else None,
        top_p=1.0 if sampled else None,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
    )
    started = time.perf_counter()
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": (out.shape[1] - prompts.shape[1]) * out.shape[0]}


def main() -> None:
    line = Line()
    folder = sys.argv[1]
    threads = int(sys.argv[2])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    model.generation_config = GenerationConfig()  # the folder's eos would end completions early
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for request in line.requests(
        {
            "versions": versions,
            "settings": "generate, SDPA, float32, dynamic KV cache, top_k 0, top_p 1",
        }
    ):
        line.reply(generate(model, request))


if __name__ == "__main__":
    main()
