"""What training and generation reach on one GPU, with random weights of real models' shapes.

usage: gpu.py [--parts attention,train,engine,mismatch] [--models 0.6b,1.5b,7b] [--out FILE]

    attention  the compiled FlexAttention over a tree beside PyTorch's own flash attention, the
               same text, forward and backward
    train      tokens per second and MFU of a whole GRPO step (forward, backward, AdamW) in bfloat16
    engine     tokens per second of the embedded engine beside transformers' `generate` on the same
               prompts, and the time of a swap of weights
    mismatch   log-probs of engine and trainer in bfloat16: how far apart

Each part and model is a process of its own, with a deadline. Those of one wave start together, so
that imports and compiling overlap; what is timed has the GPU alone, by a lock. Results are JSON
lines.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentevo.config import AlgorithmSection, EngineSection, MemorySection, TrainerSection
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.activations import keep_activations
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.compiled import compile_layers
from agentevo.models.compute.device_peak import device_peak
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.flex_tree import FlexTree
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.training.trainer import Trainer
from agentevo.training.tree import build_tree
from agentevo.training.workload import DISTINCT
from agentevo.types import SamplingParams
from grpo_rows import Row, random_ids, samples_of

GPU = torch.device("cuda")
VOCABULARY = 151936
SHAPES: dict[str, Callable[[], PreTrainedModel]] = {
    "0.5b": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
            num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
            max_position_embeddings=32768,
        )
    ),
    "0.6b": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
            num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
            max_position_embeddings=40960,
        )
    ),
    "1.5b": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
            num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True,
            max_position_embeddings=32768,
        )
    ),
    "7b": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=4096,
        )
    ),
}  # fmt: skip
"""Those of Qwen2.5-0.5B, Qwen3-0.6B, Qwen2.5-1.5B and Llama-2-7B."""
WORK: dict[str, dict[str, Any]] = {
    "0.5b": {"length": 4096, "rows": 16, "micro": 16384},
    "0.6b": {"length": 16384, "rows": 4, "micro": 16384},
    "1.5b": {"length": 4096, "rows": 8, "micro": 8192},
    "7b": {"length": 4096, "rows": 8, "micro": 4096},
}
"""Tokens of a text, texts of a step, tokens of a micro-batch."""
COMPILING = (2, 2304)
"""Texts of the step that compiles; like the others but short."""
WAVES = (("0.5b", "0.6b", "1.5b"), ("7b",))
"""Models that the GPU has room for at once."""
PART_S = 150
PROMPT_TOKENS = 256
NEW_TOKENS = 128
REQUESTS = (1, 16, 64)
OLD_LOGPROB = -11.0
"""Near what random weights give every token."""
LOCK = Path(tempfile.gettempdir()) / "agentevo-gpu-benchmark.lock"


def plain_model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with GPU:
        model = SHAPES[name]()
    torch.set_default_dtype(torch.float32)
    return model.eval()


def model_of(name: str) -> PreTrainedModel:
    return prepare(plain_model_of(name))


def rows_of(count: int, length: int, vocabulary: int) -> list[Row]:
    """Texts that share nothing, of which the later three quarters are trained, as in a long
    reasoning trace."""
    rng = random.Random(0)
    prompt = length // 4
    return [
        Row(
            random_ids(rng, vocabulary, prompt),
            random_ids(rng, vocabulary, length - prompt),
            rng.gauss(0, 1),
            [OLD_LOGPROB] * (length - prompt),
        )
        for _ in range(count)
    ]


@contextmanager
def alone() -> Iterator[None]:
    """While it is open no other process of this benchmark uses the GPU."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def seconds_of(work: Callable[[], Any], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)

    return found


def attention(_: str) -> dict[str, Any]:
    length = 16384
    heads = 16
    groups = 8
    dim = 128
    q, k, v = (
        torch.randn(length, count, dim, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, groups, groups)
    )
    plan = FlexTree(build_tree([list(range(length))]), GPU)
    plan.texts = []  # which would take flash attention

    def ours() -> torch.Tensor:
        return plan.attend(q, k, v, dim**-0.5, None, None)

    def flash() -> torch.Tensor:
        by_head = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(
            *by_head, is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)

    up = torch.randn(length, heads, dim, device=GPU, dtype=torch.bfloat16)
    numbers: dict[str, Any] = {}
    flops = 2 * length * length * heads * dim  # causal: half of 4 N^2 H D
    for name, function in (("flex", ours), ("flash", flash)):
        forward = lambda function=function: function().detach()  # noqa: E731
        both = lambda function=function: function().backward(up)  # noqa: E731
        both()

        with alone():
            forward_s = statistics.median(seconds_of(forward, 10))
            both_s = statistics.median(seconds_of(both, 10))

        numbers[f"{name}_forward_tflops"] = flops / forward_s / 1e12
        numbers[f"{name}_both_tflops"] = 3.5 * flops / both_s / 1e12
        numbers[f"{name}_both_ms"] = both_s * 1e3

    return numbers


def train(name: str, profile: Path | None = None, eager: bool = False) -> dict[str, Any]:
    work = WORK[name]
    model = model_of(name)
    memory = MemorySection(checkpointing=work.get("checkpointing", "none"))

    if not eager:
        compile_layers(model)

    keep_activations(model, memory)
    section = TrainerSection(
        learning_rate=1e-6, warmup_steps=0, micro_batch_tokens=work["micro"], steps=100
    )
    trainer = Trainer(model, section, AlgorithmSection(), memory=memory)
    vocabulary = model.config.vocab_size
    trainer.step(samples_of(rows_of(*COMPILING, vocabulary)))
    rows = samples_of(rows_of(work["rows"], work["length"], vocabulary))
    with alone():
        metrics = trainer.step(rows)
        torch.cuda.reset_peak_memory_stats()
        repeats = seconds_of(lambda: trainer.step(rows), 3)

    seconds = statistics.median(repeats)
    peak = device_peak(GPU, torch.bfloat16)
    if profile is not None:
        with torch.profiler.profile() as profiler:
            trainer.step(rows)
            torch.cuda.synchronize()

        kernels = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
        kernels.sort(key=lambda e: -e.self_device_time_total)
        profile.write_text(
            "\n".join(
                f"{e.self_device_time_total / 1e3:9.2f} ms {e.count:6} {e.key[:140]}"
                for e in kernels[:70]
            )
        )

    return {
        **work,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_s": metrics["trainer/distinct_tokens"] / seconds,
        "mfu": metrics[DISTINCT] / seconds / peak.flops_per_s,
        "seconds": seconds,
        "torch_compile": not eager,
        "repeats": repeats,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": metrics["actor/pg_loss"],
    }


def generate(engine: TorchEngine, count: int, prompt: int, new: int, seed: int) -> tuple[Any, ...]:
    rng = random.Random(seed)
    prompts = [random_ids(rng, 30000, prompt) for _ in range(count)]

    async def run() -> Any:
        return await asyncio.gather(
            *(
                engine.generate(
                    ids,
                    SamplingParams(temperature=1.0, max_new_tokens=new, seed=seed * 1000 + k),
                    deadline_s=200,
                )
                for k, ids in enumerate(prompts)
            )
        )

    started = time.perf_counter()
    found = asyncio.run(run())
    return time.perf_counter() - started, prompts, found


def transformers_seconds(model: PreTrainedModel, prompts: list[list[int]]) -> float:
    """Of transformers' `generate` over prompts of one length: SDPA, its growing cache."""
    ids = torch.tensor(prompts, device=GPU)
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    generated = lambda: model.generate(  # noqa: E731
        ids, attention_mask=torch.ones_like(ids), generation_config=config
    )
    return seconds_of(generated, 1)[0]


def engine(name: str, profile: Path | None = None) -> dict[str, Any]:
    ours = TorchEngine(model_of(name), config=EngineSection())
    peer = plain_model_of(name)
    peer.generation_config = GenerationConfig()
    generate(ours, 2, 64, 8, 0)
    transformers_seconds(peer, [[5] * 64] * 2)

    weights = {key: p.detach().clone() for key, p in ours.model.named_parameters()}
    numbers: dict[str, Any] = {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
    with alone():
        for count in REQUESTS:
            seconds, prompts, completions = generate(ours, count, PROMPT_TOKENS, NEW_TOKENS, count)
            numbers[f"tokens_per_s_{count}"] = sum(len(c.ids) for c in completions) / seconds
            numbers[f"transformers_tokens_per_s_{count}"] = (
                count * NEW_TOKENS / transformers_seconds(peer, prompts)
            )

        swaps = seconds_of(lambda: asyncio.run(ours.publish(ours.version + 1, weights)), 3)

    if profile is not None:
        with torch.profiler.profile() as profiler:
            generate(ours, 16, PROMPT_TOKENS, 16, 7)
        averages = profiler.key_averages()
        by_cpu = averages.table(sort_by="self_cpu_time_total", row_limit=45)
        by_gpu = averages.table(sort_by="self_device_time_total", row_limit=30)
        profile.write_text(f"{by_cpu}\n{by_gpu}")

    numbers["swap_s"] = statistics.median(swaps)
    return numbers


def mismatch(name: str) -> dict[str, Any]:
    model = model_of(name)
    with torch.no_grad():  # as unsure as a trained model: without it all tokens are as likely
        model.get_output_embeddings().weight.mul_(3.0)

    _, prompts, found = generate(TorchEngine(model, config=EngineSection()), 16, 256, 64, 5)
    rows = [
        Row(prompt, one.ids, 0.0, one.logprobs) for prompt, one in zip(prompts, found, strict=True)
    ]
    batch = pack(samples_of(rows), GPU)
    with torch.no_grad():
        logp = batch.table(token_logprobs(model, batch)[0].float())

    difference = (logp - batch.rollout_logprobs)[batch.mask].abs()
    return {
        "mean_nats": float(difference.mean()),
        "p99_nats": float(difference.quantile(0.99)),
        "largest_nats": float(difference.max()),
        "mean_logprob": float(logp[batch.mask].mean()),
    }


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "attention": attention,
    "train": train,
    "engine": engine,
    "mismatch": mismatch,
}


PROFILED = ("train", "engine")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--models", default="0.5b,0.6b,1.5b,7b")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--one", help="PART:MODEL, in this process")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--eager", action="store_true", help="trainer.torch_compile=false")
    options = parser.parse_args()
    if options.one:
        part, _, model = options.one.partition(":")
        extra = {"profile": options.profile} if part in PROFILED else {}
        if part == "train":
            extra["eager"] = options.eager
        print(json.dumps(PARTS[part](model, **extra)))
        return

    parts = options.parts.split(",")
    models = options.models.split(",")
    for wave in WAVES:
        work = [(part, model) for part in parts for model in wave if model in models]
        work = [(p, m) for p, m in work if p != "attention"]
        if "attention" in parts and wave is WAVES[0]:
            work.append(("attention", "-"))
        with ThreadPoolExecutor(max(1, len(work))) as pool:
            list(pool.map(lambda one: report(*one, options), work))


def report(part: str, model: str, options: argparse.Namespace) -> None:
    more = ["--eager"] if options.eager else []
    if options.profile and part in PROFILED:
        more += ["--profile", f"{options.profile}-{part}-{model}.txt"]

    started = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--one", f"{part}:{model}", *more],
            capture_output=True, text=True, timeout=PART_S, check=False,
        )  # fmt: skip
        said = done.stdout.strip().splitlines()
        failed = done.returncode != 0
        numbers = {"error": done.stderr[-1500:]} if failed else json.loads(said[-1])
    except subprocess.TimeoutExpired:
        numbers = {"error": f"not done within {PART_S} s"}

    line = {"part": part, "model": model, "wall_s": time.perf_counter() - started, **numbers}
    print(json.dumps(line), flush=True)
    with options.out.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
