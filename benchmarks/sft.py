"""A step of supervised training with LoRA, ours against plain transformers + PEFT: same weights,
adapter, rows and trained tokens.

Rows are conversations of many lengths, made here from a seed: 1 to 4 turns, texts of random words
with log-normal lengths (the user's of median 24 words, the assistant's of 40, sigma 0.8). They
share nothing but what the chat template puts before each (a system prompt of its own); the figures'
raw numbers count the tokens that merging it saves. Only what the assistant says is trained.

One optimizer step is all rows. The adapter (rank 16, alpha 32, all linear layers) has random A and
B, so that both matter to the loss. Loss and gradient norm of the first step must agree.
transformers is tried with several micro-batches; the one that is fastest counts.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import peers
from agentevo.config import LoraSection, ModelSection, SFTSection
from agentevo.data import ChatRow
from agentevo.models.compute.adapters import add_adapter, write_adapter
from agentevo.models.compute.attention import prepare
from agentevo.models.files.load import load_model
from agentevo.training.assistant_tokens import AssistantTokens
from agentevo.training.supervised import SupervisedTrainer
from agentevo.training.workload import DISTINCT
from agentevo.types import Sample
from figures import Figure
from machine import Rate
from train_step import Step, tried

NUM_ROWS = 16
RANK = 16
ALPHA = 32
B_DEVIATION = 0.01
LEARNING_RATE = 1e-5
DEFAULT_MICRO_BATCH = 8
"""transformers' own."""
MICRO_BATCHES = (1, 4, DEFAULT_MICRO_BATCH)
GROUPED_MICRO_BATCHES = (4, DEFAULT_MICRO_BATCH)
TEXT = (
    "the river runs past old stone houses and green hills where people walk slowly under tall "
    "trees while birds sing in early morning "
    "light after long rain because nobody knows which road leads to town or how far it may be "
    "from here before winter comes with snow"
)


def conversations(seed: int = 4) -> list[ChatRow]:
    rng = random.Random(seed)
    words = TEXT.split()

    def text(median_words: int) -> str:
        return " ".join(
            rng.choices(words, k=max(2, round(rng.lognormvariate(math.log(median_words), 0.8))))
        )

    def conversation(number: int) -> ChatRow:
        messages = []
        for _ in range(rng.randint(1, 4)):
            messages += [
                {"role": "user", "content": text(24)},
                {"role": "assistant", "content": text(40)},
            ]
        return ChatRow(f"row {number}", messages)

    return [conversation(number) for number in range(NUM_ROWS)]


def make_adapter(folder: Path, out: Path) -> Path:
    """An adapter in PEFT's format whose B is not zero."""
    loaded = load_model(ModelSection(name=str(folder), device="cpu"))
    model = add_adapter(loaded.model, LoraSection(rank=RANK, alpha=ALPHA), seed=5)
    rng = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(B_DEVIATION * torch.randn(parameter.shape, generator=rng))

    out.mkdir()
    write_adapter(model, out)
    return out


def peer_row(sample: Sample) -> dict[str, list[int]]:
    labels = [
        token if trained else -100
        for token, trained in zip(sample.ids.tolist(), sample.loss_mask, strict=True)
    ]
    return {"input_ids": sample.ids.tolist(), "labels": labels}


class SupervisedStep:
    """Our side."""

    def __init__(self, folder: Path, adapter: Path) -> None:
        loaded = load_model(
            ModelSection(name=str(folder), device="cpu", lora=LoraSection(adapter=adapter))
        )
        encoder = AssistantTokens(loaded.tokenizer, max_tokens=4096)
        self.samples = [
            row.sample()
            for conversation in conversations()
            for row in encoder.encode(conversation)[0]
        ]
        section = SFTSection(learning_rate=LEARNING_RATE, warmup_ratio=0.0, schedule="constant")
        self.trainer = SupervisedTrainer(prepare(loaded.model), section, total_steps=1000)

    def step(self) -> tuple[Step, dict[str, float]]:
        started = time.perf_counter()
        metrics = self.trainer.step(self.samples)
        return Step(
            time.perf_counter() - started, metrics["sft/loss"], metrics["actor/grad_norm"]
        ), metrics


def padded_tokens(samples: Sequence[Sample], micro_batch: int) -> int:
    """Of one pass over the rows in the order they are in."""
    lengths = [len(sample.ids) for sample in samples]
    parts = [lengths[start : start + micro_batch] for start in range(0, len(lengths), micro_batch)]
    return sum(len(part) * max(part) for part in parts)


def against_transformers(ours: SupervisedStep, peer: peers.Peer, repeats: int) -> list[Figure]:
    """The first round compares results and finds the peer's best micro-batches; then everybody
    takes turns."""
    first, metrics = ours.step()

    def ask(setting: dict[str, Any]) -> Step:
        return Step.of(peer.ask(setting))

    plain = tried(
        ask, [{"micro_batch": size, "grouped": False} for size in MICRO_BATCHES], first, "sft"
    )
    grouped = tried(
        ask,
        [{"micro_batch": size, "grouped": True} for size in GROUPED_MICRO_BATCHES],
        first,
        "sft",
    )
    settings = {
        "best": json.loads(min(plain, key=lambda name: plain[name])),
        "default": {"micro_batch": DEFAULT_MICRO_BATCH, "grouped": False},
        "grouped": json.loads(min(grouped, key=lambda name: grouped[name])),
    }
    seconds: dict[str, list[float]] = {"agentevo": [], **{name: [] for name in settings}}
    for _ in range(repeats):
        seconds["agentevo"].append(ours.step()[0].seconds)
        for name, setting in settings.items():
            seconds[name].append(ask(setting).seconds)

    medians = {name: median(values) for name, values in seconds.items()}
    logical = int(metrics["trainer/logical_tokens"])
    distinct = int(metrics["trainer/distinct_tokens"])
    raw = {
        "unit": "s",
        "medians": medians,
        "repeats": seconds,
        "trials": plain | grouped,
        "settings": settings,
        "loss": first.loss,
        "tokens": {
            "logical": logical,
            "saved_by_merging": logical - distinct,
            "trained": int(metrics["trainer/trained_tokens"]),
            "padded_by_default": padded_tokens(ours.samples, DEFAULT_MICRO_BATCH),
        },
    }
    rate = Rate(flops_per_s=metrics[DISTINCT] / medians["agentevo"])
    meaning = "seconds of a supervised step with LoRA; transformers + PEFT"

    return [
        Figure(
            "sft_vs_transformers",
            medians["best"] / medians["agentevo"],
            f"{meaning}, its best micro-batch",
            raw,
            rate,
        ),
        Figure(
            "sft_vs_transformers_default",
            medians["default"] / medians["agentevo"],
            f"{meaning}, micro-batch 8 as by default",
            raw,
            rate,
        ),
        Figure(
            "sft_vs_transformers_grouped",
            medians["grouped"] / medians["agentevo"],
            f"{meaning}, rows grouped by length",
            raw,
            rate,
        ),
    ]
