"""Peer worker: whole GRPO steps of TRL's trainer (generate, score, update), as `peer_worker`
describes.

usage: peer_trl_grpo_step.py MODEL_FOLDER PROMPTS_JSON NUM_THREADS [MICRO_BATCH] PROMPTS_JSON: a
file with a list of prompts (text, already in the model's chat format). request: {"steps": n};
answer: {"seconds": [one wall time a step], "tokens": completion tokens a step}

Settings are those of our side: 4 prompts x 8 completions of up to 16 tokens, on-policy (one update
a batch), no KL term, no gradient checkpointing, AdamW, float32. MICRO_BATCH completions go through
the model at once (default: all 32).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from peer_worker import Line

NUM_GENERATIONS = 8
MAX_COMPLETION_TOKENS = 16


def reward_characters(completions: list[str], **_: Any) -> list[float]:
    """Any reward that differs within a group: without a spread there would be no gradient."""
    return [float(len(set(text))) for text in completions]


def make_trainer(folder: str, prompts: list[str], micro_batch: int, callback: Any) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    batch = len(prompts) * NUM_GENERATIONS
    config = GRPOConfig(
        output_dir=os.environ.get("TMPDIR", "/tmp") + "/agentevo-bench-trl",
        use_cpu=True,
        bf16=False,
        fp16=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=batch // micro_batch,
        num_generations=NUM_GENERATIONS,
        max_completion_length=MAX_COMPLETION_TOKENS,
        beta=0.0,
        num_iterations=1,
        gradient_checkpointing=False,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        learning_rate=1e-6,
        max_steps=1_000_000,
        logging_steps=1_000_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        seed=0,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )

    return GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=reward_characters,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts * 64}),
        callbacks=[callback],
    )


def make_callback(line: Line, description: dict[str, Any]) -> Any:
    """A trainer callback that holds the training loop between steps until the harness asks for more
    of them."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.requests = line.requests(description)
            self.wanted = 0
            self.seconds: list[float] = []
            self.tokens = 0.0
            self.started = 0.0

        def wait(self, control: Any) -> None:
            request = next(self.requests, None)
            if request is None:
                control.should_training_stop = True
                return
            self.wanted = request["steps"]
            self.seconds = []
            self.started = time.perf_counter()

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            now = time.perf_counter()
            self.seconds.append(now - self.started)
            self.started = now
            if len(self.seconds) == self.wanted:
                line.reply({"seconds": self.seconds, "tokens": len_tokens(self.trainer)})
                self.wait(control)

        trainer: Any = None

    return Clock()


def len_tokens(trainer: Any) -> float:
    """Mean completion tokens of the last step times completions, from TRL's own log."""
    lengths = trainer._metrics["train"].get("completions/mean_length", [])
    return float(lengths[-1]) * NUM_GENERATIONS * 4 if lengths else 0.0


def main() -> None:
    line = Line()
    folder = sys.argv[1]
    prompts_file = sys.argv[2]
    threads = int(sys.argv[3])
    import torch
    import transformers
    import trl

    torch.set_num_threads(threads)
    with open(prompts_file) as file:
        prompts: list[str] = json.load(file)

    micro_batch = int(sys.argv[4]) if len(sys.argv) > 4 else len(prompts) * NUM_GENERATIONS
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }
    settings = (
        "GRPOTrainer, use_cpu, float32, beta 0, num_iterations 1, no gradient "
        f"checkpointing, micro-batch {micro_batch}"
    )
    clock = make_callback(line, {"versions": versions, "settings": settings})
    clock.trainer = make_trainer(folder, prompts, micro_batch, clock)
    clock.trainer.train()


if __name__ == "__main__":
    main()
