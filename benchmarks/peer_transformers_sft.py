"""Peer worker: supervised training steps of transformers' Trainer with a LoRA adapter by PEFT; see
`peer_steps`.

usage: peer_transformers_sft.py MODEL_FOLDER ADAPTER_FOLDER ROWS_JSON NUM_THREADS ROWS_JSON: a file
with a list of {"input_ids": ids, "labels": ids, -100 where nothing is trained}; one optimizer step
is all of them. request: {"micro_batch": rows in one forward pass, "grouped": whether rows of
similar length meet in one}

Batches are padded by DataCollatorForSeq2Seq, the collator of transformers for rows with labels. No
gradient checkpointing, float32.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import peft
import torch
import transformers
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

from peer_steps import FIRST_STEP, FIRST_STEP_TOKENS, QUIET, Clock, Watched, serve
from peer_worker import Line


class Supervised(Watched, Trainer):
    def training_step(
        self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if self.state.global_step == 0:
            inputs = {name: values[:, :FIRST_STEP_TOKENS] for name, values in inputs.items()}
        return super().training_step(model, inputs, *args, **kwargs)


def main() -> None:
    line = Line()
    folder = sys.argv[1]
    adapter = sys.argv[2]
    rows_file = sys.argv[3]
    threads = int(sys.argv[4])
    torch.set_num_threads(threads)

    with open(rows_file) as file:
        rows: list[dict[str, list[int]]] = json.load(file)

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def make_trainer(settings: dict[str, Any], clock: Clock) -> Supervised:
        arguments = TrainingArguments(
            output_dir=os.environ.get("TMPDIR", "/tmp") + "/agentevo-bench-sft",
            per_device_train_batch_size=settings["micro_batch"],
            gradient_accumulation_steps=len(rows) // settings["micro_batch"],
            train_sampling_strategy="group_by_length" if settings["grouped"] else "random",
            gradient_checkpointing=False,
            learning_rate=1e-5,
            **FIRST_STEP,
            **QUIET,
        )
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return Supervised(
            model=peft.PeftModel.from_pretrained(base, adapter, is_trainable=True),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
            processing_class=tokenizer,
            callbacks=[clock],
        )

    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }
    serve(
        line,
        {
            "versions": versions,
            "settings": "Trainer, use_cpu, float32, DataCollatorForSeq2Seq, PEFT LoRA",
        },
        make_trainer,
    )


if __name__ == "__main__":
    main()
