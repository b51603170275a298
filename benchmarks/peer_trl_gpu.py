"""TRL's GRPO step on one GPU, without generation, for `gpu.py`: float32 weights under bfloat16
autocast, as TRL trains; rows, advantages and shapes are those of `gpu.py`.

usage: peer_trl_gpu.py MODEL
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import gpu
from agentevo.config import ModelSection
from agentevo.models.files.load import load_model
from peer_trl_train_step import ready_made

STEPS = 5


class GivenRows(GRPOTrainer):
    rows: list[dict[str, Any]]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        made = ready_made(self.rows, 0, None)
        return {name: tensor.to(self.accelerator.device) for name, tensor in made.items()}


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.started)


def tokenizer() -> PreTrainedTokenizerFast:
    made: Any = load_model(
        ModelSection(name="tiny", device="cpu"), corpus=lambda: ["some words"]
    ).tokenizer
    return made


def main() -> None:
    name = sys.argv[1]
    work = gpu.WORK[name]
    torch.manual_seed(0)

    with gpu.GPU:
        model = gpu.SHAPES[name]()

    clock = Clock()
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=work["micro"] // work["length"],
        gradient_accumulation_steps=work["rows"] * work["length"] // work["micro"],
        num_generations=work["rows"],
        beta=0.0,
        num_iterations=1,
        gradient_checkpointing="--checkpointing" in sys.argv,
        temperature=1.0,
        learning_rate=1e-6,
        bf16=True,
        max_steps=STEPS,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = GivenRows(
        model=model,
        processing_class=tokenizer(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [""] * 64 * work["rows"]}),
        callbacks=[clock],
    )
    rows = gpu.rows_of(work["rows"], work["length"], model.config.vocab_size)
    trainer.rows = [row.json() for row in rows]
    with gpu.alone():
        trainer.train()

    seconds = statistics.median(clock.seconds[2:])
    print(
        json.dumps(
            {
                "seconds": seconds,
                "tokens_per_s": work["rows"] * work["length"] / seconds,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                "all": clock.seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
