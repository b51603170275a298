"""Seconds from a publish until an engine in another process serves it: by files in a folder, and
over a process group.

    agentevo models smollm2-135m-instruct
    .venv/bin/python benchmarks/broadcast.py [--steps 5] [--dtype bfloat16]

SmolLM2-135M on the CPU, trainer and one embedded engine on this machine, so what the group carries
goes over loopback (gloo). In each step every weight is changed, and the version is published by one
way after the other. `publish_s` is the trainer's time, `served_s` until the engine has verified it
and swapped it in, which the trainer need not wait for. Figures go to stdout as JSON lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from agentevo.config import EngineSection, ModelSection
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.inference.engine import NO_VERSION
from agentevo.inference.weights.broadcast_sender import BroadcastSender
from agentevo.inference.weights.broadcast_source import BroadcastSource
from agentevo.inference.weights.publication import Publication
from agentevo.inference.weights.weight_transport import WeightSender, WeightSource
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.models.compute.attention import prepare
from agentevo.models.files.load import load_model
from agentevo.runs.processes.serve import VersionFollower

MODEL = "smollm2-135m-instruct"
POLL_INTERVAL_S = 0.02
WAIT_S = 600.0


def source_of(way: str, folder: Path) -> WeightSource:
    return (
        WeightsFolder(folder) if way == "folder" else BroadcastSource(folder, torch.device("cpu"))
    )


def sender_of(way: str, folder: Path, model: torch.nn.Module) -> WeightSender:
    if way == "folder":
        return Publication(WeightsFolder(folder), model, keep=2, note=print)
    return BroadcastSender(folder, model, note=print)


def follow(way: str, folder: str, dtype: str, told: Connection) -> None:
    """The engine's process: tells each version and the moment it serves it."""
    torch.set_num_threads(1)
    loaded = load_model(ModelSection(name=MODEL, device="cpu", dtype=dtype))
    prepare(loaded.model)

    async def work() -> None:
        engine = TorchEngine(loaded.model, loaded.tokenizer, EngineSection(kv_cache_gb=0.1))
        await engine.begin(NO_VERSION)
        source = source_of(way, Path(folder))
        follower = VersionFollower(source, engine, "continue", deadline_s=WAIT_S, note=print)

        told.send(("ready", 0.0))
        while True:
            if await follower.look():
                told.send((engine.version, time.monotonic()))
            await asyncio.sleep(POLL_INTERVAL_S)

    asyncio.run(work())


async def served(sender: WeightSender, engine: Connection, version: int) -> dict[str, float]:
    """Publishes once, and looks after it as a trainer that waits does."""
    began = time.monotonic()
    await sender.publish(version)
    published = time.monotonic()

    while not engine.poll():
        await asyncio.sleep(POLL_INTERVAL_S)
        await sender.look_after()

    serves, at = engine.recv()
    assert serves == version
    return {"publish_s": round(published - began, 3), "served_s": round(at - began, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()

    torch.set_num_threads(1)
    model = load_model(ModelSection(name=MODEL, device="cpu", dtype=asked.dtype)).model
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[int], dict[str, Any]]] = {}
        engines = []
        for way in ("folder", "broadcast"):
            place = Path(folder) / way
            ours, theirs = context.Pipe()
            engine = context.Process(
                target=follow, args=(way, str(place), asked.dtype, theirs), daemon=True
            )
            engine.start()
            theirs.close()
            engines.append(engine)
            assert ours.recv()[0] == "ready"

            sender = sender_of(way, place, model)
            ways[way] = lambda version, sender=sender, ours=ours: asyncio.run(
                served(sender, ours, version)
            )

        for step in range(asked.steps + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            row = {way: take(step) for way, take in ways.items()}
            print(json.dumps({"step": step, "dtype": asked.dtype} | row), flush=True)

        for engine in engines:
            engine.kill()


if __name__ == "__main__":
    main()
