"""A member of a round in a process of its own, which ends or stops itself where it is told to.

python broadcast_member.py asks|sends FOLDER NEVER|ASKED|BUCKET KILL|STOP
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from engine_process import CONTEXT

from agentevo.errors import WeightsNotSentError
from agentevo.inference.weights import broadcast_group
from agentevo.inference.weights.broadcast_files import PlaceRequest
from agentevo.inference.weights.broadcast_group import BroadcastGroup
from agentevo.inference.weights.broadcast_sender import BroadcastSender
from agentevo.inference.weights.broadcast_source import BroadcastSource

BUCKET = 64
"""Bytes, so that small tensors take many."""
IN_THE_MIDDLE = 5
"""Buckets that have passed by then."""


class Mixed(torch.nn.Module):
    """Parameters of several dtypes and shapes, among them what is easily lost on the way."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
            values = torch.randn(shape, generator=generator).to(dtype)
            return torch.nn.Parameter(values)

        self.table = some(40, 7)
        self.bits_16 = some(33, 3, dtype=torch.bfloat16)
        self.none = some(0, 4)
        self.one = some()
        self.bits_64 = some(5, dtype=torch.float64)
        self.strange = torch.nn.Parameter(
            torch.tensor([-0.0, float("inf"), float(seed)], dtype=torch.float32)
        )
        self.frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)


def taken(source: BroadcastSource, within_s: float = 300.0) -> tuple[int, dict[str, torch.Tensor]]:
    """What the trainer sends next, as a version and its tensors."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        latest = source.latest_version()
        if latest is None:
            time.sleep(0.01)
            continue

        try:
            return latest.version, dict(source.read(latest.version, sha256=latest.sha256))
        except WeightsNotSentError:
            continue

    raise AssertionError(f"nothing was sent within {within_s} s")


def _end(tell: Connection, how: signal.Signals) -> None:
    tell.send("ends")
    os.kill(os.getpid(), how)


def asks(folder: Path, tell: Connection, when: str, how: signal.Signals) -> None:
    """An engine that ends once it has asked (`ASKED`), or in the middle of a round (`BUCKET`)."""
    _ends_in_the_middle(tell, how, when == "BUCKET")
    source = BroadcastSource(folder, torch.device("cpu"))
    if when == "ASKED":
        ask = source._files.ask

        def asked(one: PlaceRequest) -> None:
            ask(one)
            _end(tell, how)

        source._files.ask = asked  # type: ignore[method-assign]

    taken(source)


def sends(folder: Path, tell: Connection) -> None:
    """A trainer that is killed in the middle of a round."""
    _ends_in_the_middle(tell, signal.SIGKILL, True)
    sender = BroadcastSender(folder, Mixed(1), note=print)
    asyncio.run(sender.publish(1))
    tell.send("published")
    while True:
        asyncio.run(sender.look_after())


def _ends_in_the_middle(tell: Connection, how: signal.Signals, does: bool) -> None:
    broadcast_group.BUCKET_BYTES = BUCKET
    passed = [0]
    real = BroadcastGroup.broadcast

    def counted(self: BroadcastGroup, tensor: torch.Tensor) -> None:
        passed[0] += 1
        if does and passed[0] > IN_THE_MIDDLE:
            _end(tell, how)
        real(self, tensor)

    BroadcastGroup.broadcast = counted  # type: ignore[method-assign]


@contextmanager
def member(
    target: Callable[..., None], folder: Path, *more: Any
) -> Iterator[Callable[[str], None]]:
    """Waits, when it is called, until the member has said a word."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(folder, theirs, *more), daemon=True)
    process.start()
    theirs.close()

    def said(word: str) -> None:
        assert ours.poll(120) and ours.recv() == word

    try:
        yield said
    finally:
        process.kill()
        process.join(300)
