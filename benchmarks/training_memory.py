"""Peak memory of training steps, measured in a child process each, beside what `agentevo doctor`
predicts.

    python benchmarks/training_memory.py [--hidden 512 --layers 6 --vocabulary 16384]
        [--length 1024 --samples 4]

Measured is the peak of resident memory over two optimizer steps, above what is resident once the
model is loaded. glibc is told to return freed blocks of 1 MiB and more at once
(MALLOC_MMAP_THRESHOLD_), as it does by itself with blocks of 32 MiB: so a small run shows what a
large one takes. `--plain-malloc` leaves that out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

MIB = 2**20
LIBRARIES = 28 * MIB
"""The memory of oneDNN and small allocations, measured from the first pass on."""
CASES: dict[str, dict[str, Any]] = {
    "full fine-tuning": {},
    "full, checkpointing=selective": {"checkpointing": "selective"},
    "full, checkpointing=full": {"checkpointing": "full"},
    "full, shorter micro-batches": {"parts": 4},
    "LoRA rank 16": {"rank": 16},
    "LoRA rank 16, checkpointing=full": {"rank": 16, "checkpointing": "full"},
    "LoRA rank 16, checkpointing=selective": {"rank": 16, "checkpointing": "selective"},
    "LoRA rank 16, bfloat16": {"rank": 16, "dtype": "bfloat16"},
    "LoRA rank 16, bfloat16, full": {"rank": 16, "dtype": "bfloat16", "checkpointing": "full"},
    "SFT": {"kind": "sft"},
    "bfloat16": {"dtype": "bfloat16"},
    "in two parts, shorter micro-batches": {"shard": 2, "parts": 2},
    "the same, checkpointing=full": {"shard": 2, "parts": 2, "checkpointing": "full"},
    "first of two stages, in 4 parts": {"pipeline": 2, "parts": 4, "which": 0},
    "last of two stages, in 4 parts": {"pipeline": 2, "parts": 4},
}
"""Options of `measure` beside the sizes."""


def measure(  # noqa: PLR0913 (the recipe of one measurement)
    *,
    hidden: int,
    layers: int,
    vocabulary: int,
    length: int,
    samples: int,
    kind: str = "rl",
    checkpointing: str = "none",
    parts: int = 1,
    rank: int = 0,
    dtype: str = "float32",
    shard: int = 1,
    pipeline: int = 1,
    which: int = -1,
    plain_malloc: bool = False,
) -> tuple[float, float]:
    """(predicted, measured) bytes, in a process of its own. parts: micro-batches per step. shard:
    processes that each have a part of the weights (FSDP over gloo); pipeline: stages. Bytes are
    those of one of these processes (`which`), by default of the last."""
    given = {key: value for key, value in locals().items() if key != "plain_malloc"}
    environment = os.environ if plain_malloc else {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(given)]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    processes = [
        subprocess.Popen(
            command,
            env={
                **environment,
                **{"RANK": str(rank), "WORLD_SIZE": str(shard * pipeline)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(shard * pipeline)
    ]
    try:
        said = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()

    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"{given} failed:\n{errors[-2000:]}")

    predicted, measured = json.loads(said[which][0].splitlines()[-1])
    return predicted, measured


def _model(given: dict[str, Any]) -> Any:
    """A Llama of these sizes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    hidden = given["hidden"]
    shape: dict[str, Any] = {
        "intermediate_size": 8 * hidden // 3,
        "num_hidden_layers": given["layers"],
        "max_position_embeddings": 65536,
    }
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64 // 2}
    config = LlamaConfig(
        hidden_size=hidden,
        vocab_size=given["vocabulary"],
        tie_word_embeddings=given["pipeline"] == 1,
        **heads,
        **shape,
    )
    return LlamaForCausalLM(config).to(getattr(torch, given["dtype"])).eval()


def _sample(
    number: int, length: int, rng: random.Random, vocabulary: int, prompt: float = 0.5
) -> Any:
    """Random tokens, of which the first `prompt` are not trained on."""
    from agentevo.types import Sample

    mask = [place >= max(length * prompt, 1) for place in range(length)]
    return Sample(
        trajectory_id=f"t{number}",
        group_id=f"g{number}",
        ids=[rng.randrange(2, vocabulary) for _ in range(length)],
        loss_mask=mask,
        logprobs=[-5.0 if m else 0.0 for m in mask],
        versions=[0] * length,
        advantages=[1.0 for m in mask if m],
    )


def _spread_child(given: dict[str, Any]) -> tuple[float, float]:
    """One process of several. Every token is trained on, as `doctor --devices` supposes."""
    from datetime import timedelta

    from torch import distributed

    from agentevo.config import AlgorithmSection, MemorySection, ParallelSection, build_config
    from agentevo.models.compute.activations import keep_activations
    from agentevo.models.compute.attention import prepare
    from agentevo.runs.doctor.memory_estimate import FLOAT, process_terms, sizes_of, total
    from agentevo.training.distribute import spread
    from agentevo.training.mesh import make_meshes
    from agentevo.training.sharding.layouts import local
    from agentevo.training.trainer import Trainer
    from memory import peak_bytes

    distributed.init_process_group("gloo", timeout=timedelta(seconds=300))
    size = given["shard"]
    most = given["length"] * given["samples"] // given["parts"]
    parallel = ParallelSection(shard=size, pipeline=given["pipeline"])
    memory = MemorySection(checkpointing=given["checkpointing"])
    model = keep_activations(prepare(_model(given)), memory)
    sizes = sizes_of(model)
    keys = [f"trainer.micro_batch_tokens={most}", "rollout.samplers=1", "rollout.staleness=1"]
    keys += ["sampling.max_new_tokens=1", "model.device=cpu"]
    keys.append(f"memory.checkpointing={given['checkpointing']}")
    keys += [f"trainer.parallel.{key}={given[key]}" for key in ("shard", "pipeline")]
    config = build_config({"environment": {"type": "coins"}}, keys)
    stage = distributed.get_rank() % given["pipeline"]
    parts = process_terms(config, sizes, stage)
    spread(model, make_meshes(parallel, "cpu"))

    trainer = Trainer(
        model, config.trainer.model_copy(update={"minibatches": 1}), AlgorithmSection(),
        memory=memory,
    )  # fmt: skip
    rng = random.Random(0)
    vocabulary = given["vocabulary"]
    items = [
        _sample(n, given["length"], rng, vocabulary, 0) for n in range(given["samples"] * size)
    ]

    held = sum(local(parameter).numel() for parameter in model.parameters())
    measured = float(peak_bytes(lambda: [trainer.step(items) for _ in range(2)]))
    distributed.barrier()
    distributed.destroy_process_group()

    return total(parts) - FLOAT * held + LIBRARIES, measured


def _child(given: dict[str, Any]) -> tuple[float, float]:
    import torch

    from agentevo.config import (
        AlgorithmSection,
        LoraSection,
        MemorySection,
        SFTSection,
        TrainerSection,
        build_config,
    )
    from agentevo.models.compute.activations import keep_activations
    from agentevo.models.compute.adapters import add_adapter
    from agentevo.models.compute.attention import prepare
    from agentevo.runs.doctor.memory_estimate import (
        Load,
        process_terms,
        sizes_of,
        total,
        weight_bytes,
    )
    from agentevo.training.batching.passes import micro_batches
    from agentevo.training.supervised import SupervisedTrainer
    from agentevo.training.trainer import Trainer
    from memory import peak_bytes

    if max(given["shard"], given["pipeline"]) > 1:
        return _spread_child(given)

    rng = random.Random(0)
    model = _model(given)
    if given["rank"]:
        model = add_adapter(model, LoraSection(rank=given["rank"]), seed=0)

    memory = MemorySection(checkpointing=given["checkpointing"])
    model = keep_activations(prepare(model), memory)
    most = given["length"] * given["samples"] // given["parts"]
    items = [_sample(n, given["length"], rng, given["vocabulary"]) for n in range(given["samples"])]
    batches = [batch for _, batch in micro_batches(items, most, torch.device("cpu"))]
    largest = max(batches, key=lambda batch: batch.num_distinct)
    load = Load(largest.num_distinct, len(largest.logit_nodes), True, len(batches) == 1)
    keys = [f"memory.checkpointing={given['checkpointing']}"]
    config = build_config({"environment": {"type": "coins"}}, keys)
    predicted = total(process_terms(config, sizes_of(model), load=load)) - weight_bytes(model)

    trainer: Any
    if given["kind"] == "sft":
        trainer = SupervisedTrainer(model, SFTSection(micro_batch_tokens=most), 10, memory=memory)
    else:
        trainer = Trainer(
            model, TrainerSection(micro_batch_tokens=most), AlgorithmSection(), memory=memory
        )

    measured = float(peak_bytes(lambda: [trainer.step(items) for _ in range(2)]))
    return predicted + LIBRARIES, measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "hidden": 512,
        "layers": 6,
        "vocabulary": 16384,
        "length": 1024,
        "samples": 4,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)

    parser.add_argument("--plain-malloc", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    child = options.pop("child")
    if child is not None:
        print(json.dumps(_child(json.loads(child))))
        return

    print(
        f"{'':36} {'predicted':>10} {'measured':>10} {'off by':>8}   (MiB above the loaded model)"
    )
    for name, case in CASES.items():
        predicted, measured = measure(**options, **case)
        print(
            f"{name:36} {predicted / MIB:10.0f} {measured / MIB:10.0f} "
            f"{predicted / measured - 1:+8.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
