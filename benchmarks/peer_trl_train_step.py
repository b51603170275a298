"""Peer worker: training steps of TRL's GRPO trainer on given completions, without generation; see
`peer_steps`.

usage: peer_trl_train_step.py MODEL_FOLDER ROWS_JSON NUM_THREADS plain|checkpointing ROWS_JSON: a
file with a list of {"prompt": ids, "completion": ids, "old_logprobs": one per completion token,
"advantage": number}. request: {"micro_batch": rows in one forward pass, "compact": bool}. `compact`
makes TRL's output layer score completions only, as it does on a GPU; as it is, on a CPU it scores
every position and drops the prompts' afterwards.

The trainer's loop, loss, clipping and optimizer are TRL's; only `_generate_and_score_completions`
is replaced, by one that returns the rows padded as TRL pads: prompts on the left and completions on
the right, to the longest of the step.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import transformers
import trl
import trl.trainer.utils
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad

from peer_steps import FIRST_STEP, FIRST_STEP_TOKENS, QUIET, Clock, Watched, serve
from peer_worker import Line

ON_TRITON = trl.trainer.utils._use_triton
Row = dict[str, Any]


def padded(
    rows: list[Row], key: str, side: str, value: float, dtype: torch.dtype, cut: int | None
) -> torch.Tensor:
    """[B, longest]"""
    return pad(
        [torch.tensor(row[key][:cut], dtype=dtype) for row in rows],
        padding_value=value,
        padding_side=side,
    )


def ready_made(rows: list[Row], pad_id: int, cut: int | None) -> dict[str, torch.Tensor]:
    """What TRL's own function returns. `cut`: most tokens of each prompt and each completion."""
    tokens = [
        {
            **row,
            "prompt_mask": [1] * len(row["prompt"]),
            "completion_mask": [1] * len(row["completion"]),
        }
        for row in rows
    ]
    completion_mask = padded(tokens, "completion_mask", "right", 0, torch.long, cut)
    return {
        "prompt_ids": padded(tokens, "prompt", "left", pad_id, torch.long, cut),
        "prompt_mask": padded(tokens, "prompt_mask", "left", 0, torch.long, cut),
        "completion_ids": padded(tokens, "completion", "right", pad_id, torch.long, cut),
        "completion_mask": completion_mask,
        "old_per_token_logps": padded(tokens, "old_logprobs", "right", 0.0, torch.float32, cut),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
        "num_items_in_batch": completion_mask.sum(),
    }


class GivenRows(Watched, GRPOTrainer):
    rows: list[Row]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return ready_made(
            self.rows,
            self._tokenizer.pad_token_id,
            FIRST_STEP_TOKENS if self.state.global_step == 0 else None,
        )


def main() -> None:
    line = Line()
    folder = sys.argv[1]
    rows_file = sys.argv[2]
    threads = int(sys.argv[3])
    way = sys.argv[4]
    torch.set_num_threads(threads)

    with open(rows_file) as file:
        rows: list[Row] = json.load(file)

    def make_trainer(settings: dict[str, Any], clock: Clock) -> GivenRows:
        trl.trainer.utils._use_triton = (lambda device: True) if settings["compact"] else ON_TRITON
        config = GRPOConfig(
            output_dir=os.environ.get("TMPDIR", "/tmp") + "/agentevo-bench-trl",
            per_device_train_batch_size=settings["micro_batch"],
            gradient_accumulation_steps=len(rows) // settings["micro_batch"],
            num_generations=len(rows),
            beta=0.0,
            num_iterations=1,
            gradient_checkpointing=way == "checkpointing",
            temperature=1.0,
            learning_rate=1e-6,
            **FIRST_STEP,
            **QUIET,
        )
        trainer = GivenRows(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [""] * 64 * len(rows)}),
            callbacks=[clock],
        )
        trainer.rows = rows
        return trainer

    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }
    settings = (
        "GRPOTrainer, use_cpu, float32, loss_type dapo (its default), beta 0, gradient "
        f"checkpointing {way == 'checkpointing'}"
    )
    serve(line, {"versions": versions, "settings": settings}, make_trainer)


if __name__ == "__main__":
    main()
