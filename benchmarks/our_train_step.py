"""Our side of the memory benchmark, in a process of its own and by the peers' protocol
(`peer_worker`); answers as `peer_steps` says.

usage: our_train_step.py MODEL_FOLDER ROWS_JSON NUM_THREADS SETTINGS_JSON SETTINGS_JSON: {"trainer":
keys of the recipe's section trainer, "memory": keys of its section memory} request: {}, one
training step; the first comes after a step on short rows, which makes the optimizer's state.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from agentevo.config import MemorySection
from agentevo.models.compute import activations
from grpo_rows import Row, samples_of
from memory import reset_peak, resident_bytes
from ours import load
from peer_worker import Line
from train_step import TrainStep

FIRST_STEP_TOKENS = 16
NO_LEARNING_RATE = 1e-30
"""Rounds to no change of a weight."""


def main() -> None:
    line = Line()
    folder = Path(sys.argv[1])
    rows_file = Path(sys.argv[2])
    threads = int(sys.argv[3])
    settings = json.loads(sys.argv[4])
    torch.set_num_threads(threads)
    rows = [Row(**row) for row in json.loads(rows_file.read_text())]
    library_bytes = reset_peak()
    memory = MemorySection(**settings["memory"])
    loaded = load(folder)
    activations.keep_activations(loaded.model, memory)

    ours = TrainStep(
        loaded, rows, {**settings["trainer"], "learning_rate": NO_LEARNING_RATE}, memory=memory
    )
    ours.trainer.step(samples_of([_first_tokens(row) for row in rows]))

    for _ in line.requests({"versions": {"torch": torch.__version__}, "settings": settings}):
        reset_peak()
        step, _ = ours.step()
        sizes = {
            "peak_bytes": resident_bytes("VmHWM"),
            "state_bytes": _state_bytes(ours),
            "library_bytes": library_bytes,
        }
        line.reply({**asdict(step), **sizes})


def _first_tokens(row: Row) -> Row:
    cut = slice(FIRST_STEP_TOKENS)
    return replace(
        row,
        prompt=row.prompt[cut],
        completion=row.completion[cut],
        old_logprobs=row.old_logprobs[cut],
    )


def _state_bytes(ours: TrainStep) -> int:
    """Weights, gradients and all tensors of the optimizer."""
    states = ours.trainer.optimization.optimizer.state.values()
    tensors = [
        value for state in states for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return sum(2 * p.nbytes for p in ours.trainer.model.parameters()) + sum(
        t.nbytes for t in tensors
    )


if __name__ == "__main__":
    main()
