"""Rounds between a trainer and engines that are all in the test's process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from broadcast_member import taken

from agentevo.errors import WeightsLostError
from agentevo.inference.weights.broadcast_sender import BroadcastSender
from agentevo.inference.weights.broadcast_source import BroadcastSource
from agentevo.models.compute.parameters import trained_weights

Taken = tuple[int, dict[str, torch.Tensor]]
"""A version and its tensors."""


@contextmanager
def waiting(*sources: BroadcastSource) -> Iterator[list[Future[Taken]]]:
    """What each is sent meanwhile."""
    with ThreadPoolExecutor(len(sources)) as threads:
        yield [threads.submit(taken, source) for source in sources]


def source_of(folder: Path) -> BroadcastSource:
    return BroadcastSource(folder, torch.device("cpu"))


def looked_after(sender: BroadcastSender, *futures: Future[Taken]) -> list[Taken]:
    """Looks after what was published until they have it."""

    async def work() -> None:
        async with asyncio.timeout(300):
            while not all(future.done() for future in futures):
                await sender.look_after()
                await asyncio.sleep(0.02)

    asyncio.run(work())
    return [future.result() for future in futures]


def settled(sender: BroadcastSender, *futures: Future[Taken]) -> tuple[Future[Taken], ...]:
    """The same where they may fail."""
    with suppress(WeightsLostError):
        looked_after(sender, *futures)
    return futures


def assert_has(found: Taken, version: int, model: torch.nn.Module) -> None:
    assert found[0] == version

    wanted = trained_weights(model)
    assert list(found[1]) == list(wanted)
    for name, tensor in wanted.items():
        got = found[1][name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert (
            got.reshape(-1)
            .view(torch.uint8)
            .equal(tensor.contiguous().reshape(-1).view(torch.uint8))
        ), name


def until(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)
