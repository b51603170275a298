"""A member of a round in a process of its own, which ends or stops itself where it is told to.

python broadcast_member.py asks|sends FOLDER NEVER|ASKED|BUCKET KILL|STOP
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from agentevo.errors import EngineError, WeightsNotSentError
from agentevo.inference import broadcast_group
from agentevo.inference.broadcast_group import Group
from agentevo.inference.broadcast_sender import BroadcastSender
from agentevo.inference.broadcast_source import BroadcastSource

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


def taken(source: BroadcastSource, within_s: float = 120.0) -> tuple[int, dict[str, torch.Tensor]]:
    """What the trainer sends next, as a version and its tensors."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        latest = source.announced()
        if latest is None:
            time.sleep(0.01)
            continue
        try:
            return latest.version, dict(source.read(latest.version, sha256=latest.sha256))
        except WeightsNotSentError:
            continue
    raise AssertionError(f"nothing was sent within {within_s} s")


def started(*words: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str], word: str) -> None:
    """Waits until it has said so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"the member has ended without {word}: {process.wait(30)}")


def _end(how: str) -> None:
    print("ends", flush=True)
    os.kill(os.getpid(), signal.SIGKILL if how == "KILL" else signal.SIGSTOP)


def main() -> None:
    role, folder, when, how = sys.argv[1:]
    broadcast_group.BUCKET_BYTES = BUCKET
    passed, real = [0], Group.broadcast

    def counted(self: Group, tensor: torch.Tensor) -> None:
        passed[0] += 1
        if when == "BUCKET" and passed[0] > IN_THE_MIDDLE:
            _end(how)
        real(self, tensor)

    Group.broadcast = counted
    if role == "sends":
        sender = BroadcastSender(Path(folder), Mixed(1), note=print)
        print("ready", flush=True)
        while True:
            asyncio.run(sender.publish(1) if not sender._latest else sender.look_after())
    source = BroadcastSource(Path(folder), torch.device("cpu"))
    if when == "ASKED":
        real_ask = source._files.ask

        def asked(ask: object) -> None:
            real_ask(ask)
            _end(how)

        source._files.ask = asked
    print("ready", flush=True)
    while True:
        try:
            print(f"has {taken(source)[0]}", flush=True)
        except EngineError as error:
            print(f"lost: {error}", flush=True)


if __name__ == "__main__":
    main()
