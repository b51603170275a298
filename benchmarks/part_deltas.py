"""What it costs to publish weights that lie in parts on several processes: bytes, seconds and
memory, in full and as what changed.

    agentevo models smollm2-135m-instruct
    .venv/bin/python benchmarks/part_deltas.py [--processes 2] [--steps 3] [--lr 1e-6]

SmolLM2-135M in bfloat16, FSDP over gloo with float32 shards; each step is AdamW on the log-probs of
96 tokens a process of a page of docs/, clipped to norm 1. After each, one folder is given the
version in full, gathered tensor by tensor, and one as a delta, of which every process compares its
part; a reader that follows the second has to find the bits of the first. Memory is the peak of
resident memory while a version is published, of each process, as a share of the bytes of the whole
model; the copy that each process keeps is counted beside it. Figures go to stdout as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from agentevo.config import ModelSection, ParallelSection, TrainerSection
from agentevo.inference.weights.part_deltas import PublishedParts
from agentevo.inference.weights.weight_delta import num_bytes
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.models.compute.sharded import note_change, shard, skeleton_of
from agentevo.models.files.load import load_model
from agentevo.models.files.split_models import InParts, PartsCommand, register_in_parts
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.training.mesh import make_meshes
from agentevo.training.optimization import Optimization
from agentevo.training.sharding.saving import weight_parts
from agentevo.types import Sample

sys.path.insert(0, str(Path(__file__).parent))
from memory import peak_bytes

TOKENS = 96
FULL_EVERY = 100
WAYS = ("full", "delta")


def publish(version: int, folders: dict[str, WeightsFolder], model: Any, way: str) -> None:
    """By the first process; the others do what they are told, until all is done."""
    if distributed.get_rank() == 0:
        folders[way].write(version, model, keep=2)
        tell(None)
        return

    told: list[PartsCommand | None] = [None]
    while True:
        distributed.broadcast_object_list(told, 0)
        if told[0] is None:
            return
        KEPT[way].carry_out(told[0])


KEPT: dict[str, PublishedParts] = {}
"""Of a process other than the first."""


def tell(command: PartsCommand | None) -> None:
    distributed.broadcast_object_list([command], 0)


def sample(ids: list[int], number: int) -> Sample:
    mask = [False, *[True] * (len(ids) - 1)]
    zeros = [0.0] * len(ids)
    return Sample(
        trajectory_id=str(number), group_id=str(number), ids=ids, loss_mask=mask, logprobs=zeros,
        versions=[0] * len(ids), advantages=zeros[1:],
    )  # fmt: skip


def measure(
    version: int, folders: dict[str, WeightsFolder], model: Any, reader: WeightsFolder
) -> dict[str, Any]:
    """Publishes both ways, and compares."""
    row: dict[str, Any] = {}
    for way in WAYS:
        began = time.perf_counter()
        peak = peak_bytes(lambda way=way: publish(version, folders, model, way))
        took = time.perf_counter() - began
        peaks: list[int] = [0] * distributed.get_world_size()
        distributed.all_gather_object(peaks, peak)
        row[way] = {"publish_s": round(took, 2), "peaks": peaks}

    if distributed.get_rank() == 0:
        found = reader.read(version)
        expected = WeightsFolder(folders["full"].folder).read(version)
        for name, tensor in expected.items():
            assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name

        whole = num_bytes(expected)
        for way in WAYS:
            row[way]["bytes"] = folders[way]._manifest(version, None).bytes / whole
            row[way]["peaks"] = [round(peak / whole, 3) for peak in row[way]["peaks"]]
            row[way]["bytes"] = round(row[way]["bytes"], 5)

        row["is_delta"] = bool(folders["delta"]._manifest(version, None).chain)

    return row


def process(rank: int, asked: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=asked.processes,
        timeout=timedelta(minutes=10),
    )  # fmt: skip

    loaded = load_model(ModelSection(name="smollm2-135m-instruct", dtype="bfloat16"))
    text = (Path(__file__).parent.parent / "docs" / "design.md").read_text()
    ids = loaded.tokenizer(text)["input_ids"]
    model = shard(loaded.model, make_meshes(ParallelSection(shard=asked.processes), "cpu").data)
    own = lambda only_trained: weight_parts(model, only_trained)  # noqa: E731
    register_in_parts(model, InParts(skeleton_of(model), own, tell))
    KEPT.update({way: PublishedParts(own) for way in WAYS})

    every = {"full": 1, "delta": FULL_EVERY}
    folders = {way: WeightsFolder(Path(folder) / way, full_every=every[way]) for way in WAYS}
    reader = WeightsFolder(Path(folder) / "delta", full_every=FULL_EVERY)
    optimization = Optimization(model.parameters(), TrainerSection(max_grad_norm=1.0))
    for version in range(asked.steps + 1):
        if version:
            at = (version * asked.processes + rank) * TOKENS
            batch = pack([sample(ids[at : at + TOKENS], rank)], torch.device("cpu"))
            optimization.begin(asked.lr)
            logprobs, _ = token_logprobs(model, batch)
            optimization.backward(-logprobs.sum() / (TOKENS - 1) / asked.processes)
            optimization.finish()
            note_change(model)

        row = measure(version, folders, model, reader)
        if rank == 0:
            print(json.dumps({"step": version, "lr": asked.lr} | row), flush=True)

    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-6)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(process, (asked, folder), nprocs=asked.processes)


if __name__ == "__main__":
    main()
