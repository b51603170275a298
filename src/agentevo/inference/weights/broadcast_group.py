"""Sends weights over a process group in one round: the trainer is rank 0, and the other ranks
receive.

    join -> buckets of bytes -> sent.json -> compare -> agree

Each round creates a new group, separate from the other groups of these processes. Everything but
the tensors goes over gloo. Tensors go over NCCL if trainer and receivers each have their own CUDA
device, and otherwise over gloo as well. Tensors are packed into buckets of at most BUCKET_BYTES, so
the trainer holds one bucket and one tensor at a time.

Invariant: `receive` returns exactly the bits that `send` was given, or raises WeightsLostError. The
fingerprints that prove it are in the run's folder and are not sent over the group.

A member that dies or hangs ends the round for all, within JOIN_S before it begins and BUCKET_S for
each bucket. Nothing is encrypted, and members are not authenticated.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import psutil
import torch
from torch import distributed

from agentevo.errors import ConfigError, EngineError, WeightsLostError
from agentevo.inference.weights.broadcast_files import BroadcastFiles, PlaceAnswer, SentRecord
from agentevo.inference.weights.fingerprints import fingerprint
from agentevo.models.compute.parts import Spec, as_bytes
from agentevo.runtime import devices

BUCKET_BYTES = 2**28
JOIN_S = 20.0
"""The time limit for all members of a round to join."""
BUCKET_S = 60.0
"""The time limit for one bucket. It includes the time in which the trainer gathers the bucket."""
VISIBLE_S = 15.0
"""The time limit for a file on a network disk to become visible to other machines."""
INTERFACE = "GLOO_SOCKET_IFNAME"
_CPU = torch.device("cpu")
_ENVIRONMENT = threading.Lock()
_KEPT_STORES: deque[object] = deque(maxlen=8)
"""The stores of the last rounds. The C++ code ends the process if a store's file is deleted while
the store is being destroyed. Later rounds drop a store when its file is already gone, or stays."""


def check_network() -> None:
    """Raises ConfigError if gloo finds no address to listen on. Otherwise the process would only
    fail in each round."""
    interfaces = os.environ.get(INTERFACE, "")
    try:
        for interface in filter(None, interfaces.split(",")):
            distributed.ProcessGroupGloo.create_device(interface=interface)
        if not interfaces:
            distributed.ProcessGroupGloo.create_default_device()
    except RuntimeError as error:
        networks = ", ".join(sorted(psutil.net_if_addrs()))
        raise ConfigError(
            "rollout.transport=broadcast: gloo finds no address to listen on with "
            f"{INTERFACE}={interfaces or '(unset)'}: set it to one of this machine's networks "
            f"({networks}) that trainer and engines share"
        ) from error


class BroadcastPiece(NamedTuple):
    """Bytes of a tensor within a bucket."""

    name: str
    begin: int
    end: int


def buckets(specs: Mapping[str, Spec], most: int) -> Iterator[list[BroadcastPiece]]:
    """The contents of each bucket: all bytes of all tensors, in order. Tensors without bytes have
    one empty piece."""
    bucket = list[BroadcastPiece]()
    room = most
    for name, spec in specs.items():
        begin = 0
        while True:
            end = min(spec.num_bytes, begin + room)
            bucket.append(BroadcastPiece(name, begin, end))
            room -= end - begin
            begin = end

            if room == 0:
                yield bucket
                bucket = []
                room = most

            if begin == spec.num_bytes:
                break

    if bucket:
        yield bucket


def backend_of(places: Iterable[str]) -> Literal["gloo", "nccl"]:
    """The process group's back end for tensors between these devices (`devices.identity`)."""
    return "nccl" if devices.are_joined_by_nccl(places) else "gloo"


class BroadcastGroup:
    """A member of a round. Its methods raise WeightsLostError when another member is gone."""

    def __init__(self, answer: PlaceAnswer, store: str, rank: int, device: torch.device) -> None:
        self.device = device if answer.backend == "nccl" else _CPU
        """The device of the tensors that are broadcast."""
        with _reporting_lost_members():
            self._join(answer, store, rank, device)

    def _join(self, answer: PlaceAnswer, store: str, rank: int, device: torch.device) -> None:
        file = distributed.FileStore(store, answer.world)
        _KEPT_STORES.append(file)

        file.set_timeout(timedelta(seconds=JOIN_S))
        self._control: Any = distributed.ProcessGroupGloo(
            distributed.PrefixStore("gloo", file),
            rank,
            answer.world,
            timeout=timedelta(seconds=JOIN_S),
        )
        self._tensors: Any = self._control
        if answer.backend == "nccl":  # all members have joined
            try:
                meeting = distributed.PrefixStore("nccl", file)
                self._tensors = _nccl(meeting, rank, answer.world, device)
            except BaseException:
                self._control.abort()
                raise

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcasts from rank 0."""
        group = self._control if tensor.device.type == "cpu" else self._tensors
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=BUCKET_S)
        with _reporting_lost_members():
            group.broadcast([tensor], options).wait(timedelta(seconds=BUCKET_S))

    def refusals(self, refuses: bool) -> int:
        """The number of members that refuse."""
        count = torch.tensor([int(refuses)], dtype=torch.int64, device=_CPU)
        options = distributed.AllreduceOptions()
        options.timeout = timedelta(seconds=BUCKET_S)
        with _reporting_lost_members():
            self._control.allreduce([count], options).wait(timedelta(seconds=BUCKET_S))
        return int(count)

    def close(self) -> None:
        """Closes the group. Members that still wait for this one then see that it left."""
        for group in {id(group): group for group in (self._tensors, self._control)}.values():
            group.abort()


def _nccl(store: Any, rank: int, world: int, device: torch.device) -> Any:
    """A process group of NCCL. PyTorch reads TORCH_NCCL_BLOCKING_WAIT here. If it is set, a missing
    member raises an error in the waiting member; otherwise PyTorch ends the process."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    if device.index is not None:
        devices.use_device(device, device.index)

    kinds: Any = distributed
    options = kinds.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=BUCKET_S)
    with _ENVIRONMENT:
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            return kinds.ProcessGroupNCCL(store, rank, world, options)
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


@contextmanager
def _reporting_lost_members() -> Iterator[None]:
    """Turns errors of calls that need the other members into WeightsLostError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition(". This is typically")[0]
        raise WeightsLostError(
            f"a member of the group is gone, or hangs ({reason[:300]})"
        ) from error


@contextmanager
def _join_group(
    files: BroadcastFiles, answer: PlaceAnswer, rank: int, device: torch.device
) -> Iterator[BroadcastGroup]:
    folder = files.path(answer.round)
    if not folder.is_dir():  # FileStore would wait 300 s for it, and hold the interpreter's lock
        raise WeightsLostError("the round ended before this member joined it")

    group = BroadcastGroup(answer, str(folder / "store"), rank, device)
    try:
        yield group
    finally:
        group.close()


def send(
    files: BroadcastFiles,
    answer: PlaceAnswer,
    specs: Mapping[str, Spec],
    opened: Callable[[], AbstractContextManager[Iterable[tuple[str, torch.Tensor]]]],
    device: torch.device,
) -> int:
    """On the trainer: sends the tensors to all other members, in the order of `specs`. `opened`
    opens the tensors after all members have joined. Returns how many members received other bits.
    Raises WeightsLostError, and OSError for files."""
    with _join_group(files, answer, 0, device) as group, opened() as tensors:
        coming = iter(tensors)
        fingerprints = dict[str, str]()
        buffer = torch.empty(_buffer_size(specs), dtype=torch.uint8, device=group.device)
        for bucket in buckets(specs, BUCKET_BYTES):
            filled = 0
            for piece in bucket:
                if piece.begin == 0:
                    bits = _next_bits(coming, piece.name, specs[piece.name], fingerprints)
                size = piece.end - piece.begin
                buffer[filled : filled + size] = bits[piece.begin : piece.end]
                filled += size

            if filled:
                group.broadcast(buffer[:filled])

        files.write_sent(answer.round, SentRecord(answer.sha256, fingerprints))
        group.broadcast(torch.ones(1, dtype=torch.uint8, device=_CPU))
        return group.refusals(False)


def _next_bits(
    coming: Iterator[tuple[str, torch.Tensor]], name: str, spec: Spec, fingerprints: dict[str, str]
) -> torch.Tensor:
    next_name, tensor = next(coming)
    if next_name != name or Spec(tensor.dtype, tuple(tensor.shape)) != spec:
        raise EngineError(
            f"{next_name} {tuple(tensor.shape)} was sent instead of {name} {spec.shape}: this is "
            "a defect, please report it"
        )

    fingerprints[name] = fingerprint(tensor)
    return as_bytes(tensor.detach().contiguous())


def receive(
    files: BroadcastFiles,
    answer: PlaceAnswer,
    specs: Mapping[str, Spec],
    place: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """In a receiving process of an engine: receives the tensors, on `device` with NCCL, otherwise
    on the CPU. Raises WeightsLostError."""
    with _join_group(files, answer, answer.first_rank + place, device) as group:
        tensors = dict[str, torch.Tensor]()
        fingerprints = dict[str, str]()
        buffer = torch.empty(_buffer_size(specs), dtype=torch.uint8, device=group.device)
        for bucket in buckets(specs, BUCKET_BYTES):
            filled = sum(piece.end - piece.begin for piece in bucket)
            if filled:
                group.broadcast(buffer[:filled])

            begin = 0
            for piece in bucket:
                spec = specs[piece.name]
                if piece.begin == 0:
                    tensors[piece.name] = torch.empty(
                        spec.shape, dtype=spec.dtype, device=group.device
                    )

                end = begin + piece.end - piece.begin
                as_bytes(tensors[piece.name])[piece.begin : piece.end] = buffer[begin:end]
                begin = end

                if piece.end == spec.num_bytes:
                    fingerprints[piece.name] = fingerprint(tensors[piece.name])

        group.broadcast(torch.zeros(1, dtype=torch.uint8, device=_CPU))
        sent = _sent(files, answer.round)
        wrong = sorted(
            name for name in fingerprints if fingerprints[name] != sent.fingerprints.get(name)
        )
        is_right = (
            sent.sha256 == answer.sha256
            and not wrong
            and len(sent.fingerprints) == len(fingerprints)
        )
        try:
            group.refusals(not is_right)
        except WeightsLostError:
            if not is_right:
                raise
            # Another member left, but these weights have arrived.

    if not is_right:
        raise WeightsLostError(
            f"{len(wrong)} tensors did not arrive as they were sent"
            + (f", {wrong[0]} first" if wrong else "")
        )

    return tensors


def _buffer_size(specs: Mapping[str, Spec]) -> int:
    return min(BUCKET_BYTES, sum(spec.num_bytes for spec in specs.values()))


def _sent(files: BroadcastFiles, round_id: str) -> SentRecord:
    """Waits for `sent.json`: after the trainer writes the file, another machine may see it
    later."""
    ends = time.monotonic() + VISIBLE_S
    while True:
        try:
            return files.sent(round_id)
        except EngineError as error:
            if time.monotonic() > ends:
                raise WeightsLostError(str(error)) from error
            time.sleep(0.05)
