"""The files through which trainer and engines coordinate when weights go over a process group. The
files are small, appear atomically, and hold no tensors.

    RUN/weights/latest.json            the version, and the SHA-256 of...
                tensors-SHA256.json    ...its contents: names, dtypes and shapes
                asks/ID.json           an engine's request for the version in latest.json
                answers/ID.json        the round in which the engine gets the version
                rounds/ID/store        the rendezvous of the round's members
                rounds/ID/sent.json    the fingerprint of each tensor that was sent

An engine renews its request while it waits, so the request of a dead engine expires. The trainer
deletes a request when it takes it, so it answers each request once. Other files in these folders
are ignored or deleted.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import torch

from agentevo.errors import EngineError
from agentevo.inference.weights.weight_transport import LAST_VERSION, LATEST_FILE, Latest
from agentevo.models.compute.parts import Spec
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.files import open_regular, write_atomic

STALE_S = 15.0
"""A request that was not renewed for this long belongs to an engine that no longer runs."""
RENEW_S = 1.0
MAX_PLACES = 256
"""The maximum number of receiving processes in a round. Engines beyond it join the next round."""
_ASK_BYTES = 2**16
_FILE_BYTES = 2**26
_Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
T = TypeVar("T")


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


class Contents(msgspec.Struct, frozen=True):
    """The contents of a version. Trainer and engines identify the version by its SHA-256."""

    version: Annotated[int, msgspec.Meta(ge=0, le=LAST_VERSION)]
    written: _Id
    """A random id of this publication. It differs if a later trainer publishes the same version
    again."""
    tensors: list[TensorEntry]

    @classmethod
    def of(cls, version: int, specs: Mapping[str, Spec]) -> Contents:
        entries = [
            TensorEntry(name, str(spec.dtype).removeprefix("torch."), tuple(spec.shape))
            for name, spec in specs.items()
        ]
        return cls(version, uuid.uuid4().hex, entries)

    @property
    def specs(self) -> dict[str, Spec]:
        """The tensors in the order in which they are sent. Raises EngineError for dtypes that this
        PyTorch does not have."""
        specs = {}
        for entry in self.tensors:
            dtype = getattr(torch, entry.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise EngineError(
                    f"version {self.version} has {entry.name} as {entry.dtype}, which this "
                    "PyTorch does not know: install the trainer's release"
                )
            specs[entry.name] = Spec(dtype, entry.shape)

        return specs


class PlaceRequest(msgspec.Struct, frozen=True):
    """The request of a waiting engine."""

    id: _Id
    engine: _Id
    """The name of the engine, the same in all its requests."""
    sha256: str
    """The checksum of the contents that the engine wants."""
    places: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_PLACES)]
    """The device of each process that receives weights, see `devices.identity`."""
    where: str
    """The engine's name in messages."""


class PlaceAnswer(msgspec.Struct, frozen=True):
    """The answer to a request: the round in which the engine receives weights."""

    round: _Id
    sha256: str
    """The checksum of the contents that are sent."""
    backend: Literal["gloo", "nccl"]
    """The process group's back end for the tensors."""
    first_rank: Annotated[int, msgspec.Meta(ge=1)]
    """The rank of the engine's first receiving process. The trainer has rank 0."""
    world: Annotated[int, msgspec.Meta(ge=2, le=MAX_PLACES + 1)]

    def __post_init__(self) -> None:
        if self.first_rank >= self.world:
            raise ValueError(f"place {self.first_rank} of {self.world}")


class IncomingWeights(msgspec.Struct, frozen=True):
    """Weights that the processes of an engine are about to receive."""

    folder: str
    answer: PlaceAnswer


class SentRecord(msgspec.Struct, frozen=True):
    """The trainer's record of what it sent to the group of a round."""

    sha256: str
    fingerprints: dict[str, str]


class BroadcastFiles:
    """Reads and writes these files. Methods block. Reading raises EngineError, writing OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asks = folder / "asks"
        self._answers = folder / "answers"
        self._rounds = folder / "rounds"

    def begin(self) -> None:
        """Prepares the folder for a new trainer. Deletes the answers and rounds of the previous
        trainer."""
        for folder in (self._answers, self._rounds):
            shutil.rmtree(folder, ignore_errors=True)
        self.make_folders()

    def make_folders(self) -> None:
        """Creates the folders that are missing."""
        for folder in (self._asks, self._answers, self._rounds):
            folder.mkdir(parents=True, exist_ok=True)

    def announce(self, contents: Contents) -> Latest:
        """Makes this version the newest one."""
        raw = msgspec.json.encode(contents)
        latest = Latest(contents.version, hashlib.sha256(raw).hexdigest())
        write_atomic(self._contents(latest.sha256), raw, durable=True)
        before = self._read_latest()
        write_atomic(self.folder / LATEST_FILE, msgspec.json.encode(latest), durable=True)

        kept_paths = {
            self._contents(version.sha256) for version in (latest, before) if version is not None
        }
        for path in self.folder.glob("tensors-*.json"):
            if path not in kept_paths:
                path.unlink(missing_ok=True)

        return latest

    def latest_version(self) -> Latest | None:
        """The announced version; None before the first."""
        path = self.folder / LATEST_FILE
        return self._read_decoded(path, Latest) if path.exists() else None

    def is_whole(self, latest: Latest) -> bool:
        """Whether this version is announced and its contents can be read."""
        try:
            self.contents(latest.sha256)
            return self.latest_version() == latest
        except EngineError:
            return False

    def contents(self, sha256: str) -> Contents:
        path = self._contents(sha256)
        raw = self._raw(path)
        if hashlib.sha256(raw).hexdigest() != sha256:
            raise EngineError(f"{path} is not what was written: not served")
        return self._decode(path, raw, Contents)

    def ask(self, request: PlaceRequest) -> None:
        """Writes the request. A second call replaces it."""
        write_atomic(self._ask(request.id), msgspec.json.encode(request))

    def renew(self, request: PlaceRequest) -> bool:
        """Renews the request. Returns False if the trainer took the request, or it was deleted.
        After this call an existing answer is visible; before it, a network disk could still report
        a cached absence."""
        probe = self._answers / f".{request.engine}"
        probe.touch()
        probe.unlink()

        try:
            os.utime(self._ask(request.id))
        except FileNotFoundError:
            return False

        return True

    def withdraw(self, request: PlaceRequest) -> bool:
        """Deletes the request. Returns False if the trainer took it, or it was deleted already."""
        try:
            self._ask(request.id).unlink()
        except FileNotFoundError:
            return False
        return True

    def answer(self, request: PlaceRequest) -> PlaceAnswer | None:
        """The answer to the request, or None."""
        path = self._answer(request.id)
        return self._read_decoded(path, PlaceAnswer) if path.exists() else None

    def asks(self, sha256: str) -> list[PlaceRequest]:
        """The requests for these weights. Requests of engines that no longer run are deleted."""
        clock = self._asks / ".clock"
        clock.unlink(missing_ok=True)
        clock.touch()  # the clock of the folder's machine; the write also refreshes the listing
        now = clock.stat().st_mtime
        requests = []
        for entry in os.scandir(self._asks):
            match = re.fullmatch(r"([0-9a-f]{32})\.json", entry.name)
            try:
                status = entry.stat(follow_symlinks=False)
                if abs(now - status.st_mtime) > STALE_S:
                    raise EngineError("its engine is gone")
                if match is None:
                    continue

                request = self._read_decoded(Path(entry.path), PlaceRequest, max_bytes=_ASK_BYTES)
                if request.id != match[1]:
                    raise EngineError("it has another engine's name")
            except FileNotFoundError:
                continue
            except EngineError:
                _remove(Path(entry.path))
                continue

            if request.sha256 == sha256:
                requests.append(request)

        return requests

    @contextmanager
    def round(self, round_id: str, answers: Mapping[str, PlaceAnswer]) -> Iterator[Path]:
        """Creates a round's folder and answers the requests (`answers`: request id -> answer).
        Deletes the folder at the end of the block."""
        folder = self.path(round_id)
        try:
            folder.mkdir(parents=True)
            for request_id, answer in answers.items():
                write_atomic(self._answer(request_id), msgspec.json.encode(answer))
            yield folder
        finally:
            for request_id in answers:
                with suppress(OSError):
                    self._answer(request_id).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)

    def take(self, requests: Iterable[PlaceRequest]) -> list[PlaceRequest]:
        """Deletes the requests that still exist, and returns them."""
        return [request for request in requests if self.withdraw(request)]

    def path(self, round_id: str) -> Path:
        """The folder of a round."""
        return self._rounds / round_id

    def write_sent(self, round_id: str, sent: SentRecord) -> None:
        write_atomic(self.path(round_id) / "sent.json", msgspec.json.encode(sent))

    def sent(self, round_id: str) -> SentRecord:
        return self._read_decoded(self.path(round_id) / "sent.json", SentRecord)

    def _contents(self, sha256: str) -> Path:
        return self.folder / f"tensors-{sha256}.json"

    def _ask(self, request_id: str) -> Path:
        return self._asks / f"{request_id}.json"

    def _answer(self, request_id: str) -> Path:
        return self._answers / f"{request_id}.json"

    def _read_latest(self) -> Latest | None:
        try:
            return self.latest_version()
        except EngineError:
            return None

    def _read_decoded(self, path: Path, kind: type[T], *, max_bytes: int = _FILE_BYTES) -> T:
        return self._decode(path, self._raw(path, max_bytes), kind)

    def _raw(self, path: Path, max_bytes: int = _FILE_BYTES) -> bytes:
        try:
            with open_regular(path) as file:
                raw = file.read(max_bytes + 1)
        except OSError as error:
            raise EngineError(f"{path} can't be read ({error})") from error

        if len(raw) > max_bytes:
            raise EngineError(
                f"{path} is longer than {max_bytes} bytes, which AgentEvo never writes"
            )
        return raw

    def _decode(self, path: Path, raw: bytes, kind: type[T]) -> T:
        try:
            return decode_json(raw, kind)
        except msgspec.MsgspecError as error:
            raise EngineError(
                f"{path} can't be read ({error}): it is torn, or another program wrote it"
            ) from error


def _remove(path: Path) -> None:
    """Deletes a file or folder that is not part of the protocol."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
