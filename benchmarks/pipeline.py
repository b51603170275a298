"""How long the stages of a pipeline stand still: an optimizer step of two stages beside the same
step of one process.

    .venv/bin/python benchmarks/pipeline.py [--repeats 5]

A Llama of random weights in float32: 8 layers, width 256, a small vocabulary, micro-batches of 128
tokens. Each process has one thread. Were stages alike and hidden states for nothing, a step of M
micro-batches on N stages would take (M + N - 1) / (M N) of one process's seconds. Of each the
fastest of all repeats counts: a machine's other work only adds seconds.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

MICRO_BATCHES = (1, 2, 4, 8, 16)
LENGTH = 128
VOCABULARY = 512
STAGES = 2


def seconds_of_steps(stages: int, repeats: int, meeting: str, process: int) -> list[float]:
    """The fastest step of each number of micro-batches."""
    from datetime import timedelta

    import torch
    from torch import distributed
    from transformers import LlamaConfig, LlamaForCausalLM

    from agentevo.config import ParallelSection, SFTSection
    from agentevo.models.compute.attention import prepare
    from agentevo.training.distribute import spread
    from agentevo.training.mesh import make_meshes
    from agentevo.training.supervised import SupervisedTrainer
    from agentevo.types import Sample

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = prepare(LlamaForCausalLM(config).eval())
    if stages > 1:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=process,
            world_size=stages,
            timeout=timedelta(seconds=300),
        )
        spread(model, make_meshes(ParallelSection(pipeline=stages), "cpu"))

    trainer = SupervisedTrainer(model, SFTSection(micro_batch_tokens=LENGTH), 1000)
    rng = random.Random(0)
    rows = [[rng.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(max(MICRO_BATCHES))]
    mask = [place > 0 for place in range(LENGTH)]
    samples = [Sample.given(f"t{n}", f"g{n}", row, mask) for n, row in enumerate(rows)]
    found = []
    for count in MICRO_BATCHES:
        times = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            trainer.step(samples[:count])
            times.append(time.perf_counter() - started)
        found.append(min(times[1:]))

    if stages > 1:
        distributed.destroy_process_group()

    return found


def measured(stages: int, repeats: int) -> list[float]:
    """The first process's."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        words = [sys.executable, __file__, "--repeats", str(repeats), "--stages", str(stages)]
        processes = [
            subprocess.Popen(
                [*words, "--meeting", meeting, "--process", str(process)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for process in range(stages)
        ]
        try:
            said = [process.communicate(timeout=1200)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()

    return [float(word) for word in said[0].split()]


def table(alone: Sequence[float], shared: Sequence[float]) -> str:
    lines = ["micro-batches | 1 process, s | 2 stages, s | stands still | by the formula"]
    for count, one, two in zip(MICRO_BATCHES, alone, shared, strict=True):
        idle = 1 - one / (STAGES * two)
        ideal = (STAGES - 1) / (count + STAGES - 1)
        lines.append(f"{count:13} | {one:12.2f} | {two:11.2f} | {idle:12.0%} | {ideal:14.0%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stages", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stages is not None:
        print(*seconds_of_steps(given.stages, given.repeats, given.meeting, given.process))
        return

    print(table(measured(1, given.repeats), measured(STAGES, given.repeats)))


if __name__ == "__main__":
    main()
