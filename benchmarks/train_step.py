"""One training step of GRPO without generation, ours against TRL's trainer: same weights, rows, old
log-probs, advantages and loss.

Both sides take one AdamW step on all rows in float32: clipped token ratios (0.2), mean over all
completion tokens, no KL term, gradients clipped to norm 1, no gradient checkpointing. Loss and
gradient norm of the first step must agree, or there is no ratio.

TRL runs as it is, at the micro-batch that turns out fastest for it in the first round; then, at the
same, `compact`: on a CPU TRL 1.16 takes every position through the output layer, on a GPU only the
completions, and compact makes it do the latter here.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from transformers import PreTrainedModel

import peers
from agentevo.config import AlgorithmSection, TrainerSection
from agentevo.models.files.load import LoadedModel
from agentevo.training.trainer import Trainer
from agentevo.training.workload import DISTINCT
from figures import Figure, check_equal
from grpo_rows import Row, long_rows, samples_of, shared_rows, unshared_rows
from machine import Rate
from ours import load

LEARNING_RATE = 1e-6
MICRO_BATCHES = (1, 4)
"""Rows in one forward pass that TRL is tried with."""
ROWS: dict[str, Callable[[PreTrainedModel], list[Row]]] = {
    "shared": shared_rows,
    "unshared": unshared_rows,
}
LOSS_TOLERANCE = 1e-4
NORM_TOLERANCE = 1e-3
TRL_CHECKPOINTING = (True, False)
"""True is its default."""
OUR_CHECKPOINTING = ("none", "selective", "full")
"""memory.checkpointing"""
LONG_ROW_TOKENS = 4096


@dataclass(frozen=True)
class Step:
    seconds: float
    loss: float
    grad_norm: float

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Step:
        return cls(answer["seconds"], answer["loss"], answer["grad_norm"])


class TrainStep:
    """Our side."""

    def __init__(
        self, loaded: LoadedModel, rows: Sequence[Row], keys: Mapping[str, Any], **options: Any
    ) -> None:
        """keys: of the trainer's section; options: of Trainer."""
        self.samples = samples_of(rows)
        section = TrainerSection(**{"learning_rate": LEARNING_RATE, "warmup_steps": 0, **keys})
        self.trainer = Trainer(loaded.model, section, AlgorithmSection(), **options)

    def step(self) -> tuple[Step, dict[str, float]]:
        started = time.perf_counter()
        metrics = self.trainer.step(self.samples)
        return Step(
            time.perf_counter() - started, metrics["actor/pg_loss"], metrics["actor/grad_norm"]
        ), metrics


def check_same(what: str, ours: Step, theirs: Step) -> None:
    """Raises NotComparableError. Both are first steps from the same weights."""
    check_equal(f"{what}, loss", ours.loss, theirs.loss, LOSS_TOLERANCE)
    check_equal(f"{what}, gradient norm", ours.grad_norm, theirs.grad_norm, NORM_TOLERANCE)


def tried(
    ask: Callable[[dict[str, Any]], Step], settings: Sequence[dict[str, Any]], ours: Step, what: str
) -> dict[str, float]:
    """Seconds of one step with each of the peer's settings, by their text, once each was seen to
    compute what we do."""
    seconds = {}
    for setting in settings:
        step = ask(setting)
        check_same(f"{what} {json.dumps(setting)}", ours, step)
        seconds[json.dumps(setting)] = step.seconds
    return seconds


def against_trl(
    folder: Path, trl: peers.Peer, kind: str, rows: Sequence[Row], repeats: int
) -> list[Figure]:
    """`kind`: one of ROWS. The first round compares results and finds TRL's micro-batch; then
    everybody takes turns."""
    ours = TrainStep(load(folder), rows, {})
    first, metrics = ours.step()

    def ask(setting: dict[str, Any]) -> Step:
        return Step.of(trl.ask(setting))

    trials = tried(
        ask, [{"micro_batch": size, "compact": False} for size in MICRO_BATCHES], first, kind
    )
    best = json.loads(min(trials, key=lambda name: trials[name]))
    compact = {**best, "compact": True}
    trials |= tried(ask, [compact], first, kind)

    seconds: dict[str, list[float]] = {"agentevo": [], "trl": [], "trl_compact": []}
    for _ in range(repeats):
        seconds["agentevo"].append(ours.step()[0].seconds)
        seconds["trl"].append(ask(best).seconds)
        seconds["trl_compact"].append(ask(compact).seconds)

    medians = {name: median(values) for name, values in seconds.items()}
    rate = Rate(flops_per_s=metrics[DISTINCT] / medians["agentevo"])
    raw = {
        "unit": "s",
        "medians": medians,
        "repeats": seconds,
        "trials": trials,
        "micro_batch": best["micro_batch"],
        "loss": first.loss,
        "tokens": {
            "logical": int(metrics["trainer/logical_tokens"]),
            "distinct": int(metrics["trainer/distinct_tokens"]),
            "trained": int(metrics["trainer/trained_tokens"]),
            "padded": len(rows)
            * (max(len(row.prompt) for row in rows) + max(len(row.completion) for row in rows)),
        },
    }
    del ours
    gc.collect()
    meaning = f"seconds of one GRPO training step, {kind} prompts"

    return [
        Figure(f"train_{kind}_vs_trl", medians["trl"] / medians["agentevo"], meaning, raw, rate),
        Figure(
            f"train_{kind}_vs_trl_compact",
            medians["trl_compact"] / medians["agentevo"],
            f"{meaning}, TRL's output layer compact",
            raw,
            rate,
        ),
    ]


def against_trl_in_memory(
    folder: Path, model: PreTrainedModel, scratch: Path, threads: int
) -> list[Figure]:
    """Peak of resident memory of one step on rows of 4,096 tokens, one at a time, each way in a
    process of its own. Both sides' best."""
    rows = scratch / "long_rows.json"
    rows.write_text(json.dumps([row.json() for row in long_rows(model)]))
    keys = {"micro_batch_tokens": LONG_ROW_TOKENS}
    answers: dict[str, dict[str, Any]] = {}
    for way in OUR_CHECKPOINTING:
        with peers.our_train_step(
            folder, rows, threads, {"trainer": keys, "memory": {"checkpointing": way}}
        ) as ours:
            answers[f"agentevo, checkpointing {way}"] = ours.ask({})

    first = Step.of(next(iter(answers.values())))
    for compact, on in product((False, True), TRL_CHECKPOINTING):
        with peers.trl_train_step(folder, rows, threads, checkpointing=on) as trl:
            name = f"trl{'_compact' if compact else ''}, checkpointing {on}"
            answers[name] = trl.ask({"micro_batch": 1, "compact": compact})

    for name, answer in answers.items():
        check_same(name, first, Step.of(answer))

    figures = []
    for peer in ("trl", "trl_compact"):
        whole = {name: answer["peak_bytes"] for name, answer in answers.items()}
        without = {
            name: size - answers[name]["state_bytes"] - answers[name]["library_bytes"]
            for name, size in whole.items()
        }
        meaning = "peak of resident memory of a GRPO step at 4,096 tokens"
        figures.append(_memory_figure(f"train_memory_vs_{peer}", peer, whole, meaning))
        meaning += " without libraries, weights, gradients and optimizer"
        figures.append(
            _memory_figure(f"train_memory_vs_{peer}_without_state", peer, without, meaning)
        )

    return figures


def _memory_figure(name: str, peer: str, sizes: Mapping[str, int], meaning: str) -> Figure:
    """sizes: side and its way, separated by a comma -> bytes. The best way of each side."""
    mib = {way: size / 2**20 for way, size in sizes.items()}
    ours, theirs = (
        min(size for way, size in mib.items() if way.startswith(f"{side},"))
        for side in ("agentevo", peer)
    )
    return Figure(name, theirs / ours, meaning, {"unit": "MiB", "medians": mib})
