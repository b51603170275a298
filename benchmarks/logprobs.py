"""Log-probs without logits (`training/linear_logprobs.py`) against our own dense way, from logits
with one saved copy of them: time and peak memory of forward and backward pass, first of the output
layer alone, then of the whole update of the trainer.

    .venv/bin/python benchmarks/run.py --only logprobs

Sequences of 500 tokens, every one of them trained; shapes and weights are SmolLM2-135M's (V =
49152, H = 576, tied), float32. Both ways take turns. Memory is the peak of resident memory over
what was there before; it counts the gradients, which both ways make.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch

from agentevo.models.files.load import LoadedModel
from agentevo.training.batching.packing import PackedBatch, pack
from agentevo.training.kernels.linear_logprobs import linear_logprobs
from agentevo.training.kernels.logprobs import selected_logprobs
from agentevo.training.kernels.output_layer import all_logits, token_logprobs
from agentevo.types import Sample
from figures import Figure
from memory import peak_bytes

ROWS = {
    "output_layer": (500, 2000, 8000),
    "frozen_output_layer": (500, 2000, 8000),
    "update": (500, 2000),
}
"""8,000 tokens in one micro-batch would need about 12 GB for what the layers keep of them."""
LENGTH = 500
TEMPERATURE = 1.0


def batch_of(num_tokens: int, vocabulary: int) -> PackedBatch:
    """Sequences that share nothing, in one micro-batch."""
    rng = random.Random(num_tokens)
    samples = []
    for number in range(num_tokens // LENGTH):
        ids = [rng.randrange(vocabulary) for _ in range(LENGTH + 1)]
        mask = [False, *[True] * LENGTH]
        blank = [0.0] * len(ids)
        samples.append(
            Sample(
                trajectory_id=str(number),
                group_id=str(number),
                ids=ids,
                loss_mask=mask,
                logprobs=blank,
                versions=[0] * len(ids),
                advantages=blank[1:],
            )
        )

    return pack(samples, torch.device("cpu"))


def output_layer(
    loaded: LoadedModel, num_rows: int, *, frozen: bool = False
) -> dict[str, Callable[[], None]]:
    """Both ways from hidden states to gradients in them and, unless it is frozen, in the weight."""
    layer = loaded.model.get_output_embeddings()
    weight = layer.weight.detach().requires_grad_(not frozen)
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, weight.shape[1], generator=generator).requires_grad_()
    rows = torch.arange(num_rows)
    targets = torch.randint(len(weight), (num_rows,), generator=generator)
    linear = type(layer).sharing(layer)
    linear.weight = torch.nn.Parameter(weight.detach(), requires_grad=not frozen)

    def backward(found: tuple[torch.Tensor, torch.Tensor]) -> None:
        found[0].sum().backward()
        hidden.grad = weight.grad = linear.weight.grad = None

    return {
        "dense": lambda: backward(selected_logprobs(linear(hidden), rows, targets, TEMPERATURE)),
        "without logits": lambda: backward(
            linear_logprobs(hidden, weight, None, rows, targets, TEMPERATURE)
        ),
    }


def update(loaded: LoadedModel, num_rows: int) -> dict[str, Callable[[], None]]:
    """Both ways from tokens to gradients in the whole model."""
    model = loaded.model
    batch = batch_of(num_rows, model.config.vocab_size)

    def backward(found: tuple[torch.Tensor, torch.Tensor]) -> None:
        found[0].sum().backward()
        model.zero_grad(set_to_none=True)

    return {
        "dense": lambda: backward(
            selected_logprobs(
                all_logits(model, batch), batch.rows, batch.targets, batch.temperature
            )
        ),
        "without logits": lambda: backward(token_logprobs(model, batch)),
    }


PARTS = {
    "output_layer": output_layer,
    "frozen_output_layer": partial(output_layer, frozen=True),
    "update": update,
}


def compared(name: str, ways: Mapping[str, Callable[[], None]], repeats: int) -> list[Figure]:
    """Time and memory of the dense way over ours."""
    for run in ways.values():  # warms up: what is made once belongs to neither
        run()

    memory = {way: peak_bytes(run) / 2**20 for way, run in ways.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            started = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - started)

    medians = {way: median(taken) for way, taken in seconds.items()}
    time_raw = {"unit": "s", "medians": medians, "repeats": seconds}
    memory_raw = {"unit": "MiB", "medians": memory}
    return [
        Figure(
            f"{name}_time",
            medians["dense"] / medians["without logits"],
            "seconds of forward and backward pass",
            time_raw,
        ),
        Figure(
            f"{name}_memory",
            memory["dense"] / memory["without logits"],
            "peak memory of forward and backward pass",
            memory_raw,
        ),
    ]


def without_logits(loaded: LoadedModel, part: str, num_rows: int, repeats: int) -> list[Figure]:
    """`part`: one of PARTS."""
    return compared(f"logprobs_{part}_{num_rows}", PARTS[part](loaded, num_rows), repeats)
