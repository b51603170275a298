"""An engine's side of weights that go over a process group: it asks for the newest version, waits
for the round that the trainer answers with, and receives.

One ask exists at a time. It is renewed while a caller waits here, and names the version that was
newest when it was written. Once there is a newer version, the engine asks for that one instead.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from agentevo.devices import identity
from agentevo.errors import EngineError, WeightsLostError, WeightsNotSentError
from agentevo.inference.broadcast_files import (
    RENEW_S,
    BroadcastFiles,
    Incoming,
    PlaceAnswer,
    PlaceRequest,
)
from agentevo.inference.broadcast_group import receive
from agentevo.inference.engine import Weights
from agentevo.inference.weight_transport import Latest
from agentevo.models.parts import Spec

WAIT_S = 2.0
"""Longest wait of one call, in seconds; the ask remains."""
ANSWER_S = 3.0
"""An ask that is gone for this long without an answer was deleted, and is rewritten."""
LOOK_S = 0.1


class BroadcastSource:
    """A WeightSource and a GroupSource, see the module. `device`: where `read` receives tensors
    over NCCL."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._files = BroadcastFiles(folder)
        self._device = device
        self._engine = uuid.uuid4().hex
        self._asked: PlaceRequest | None = None
        self._gone_at: float | None = None
        """When the ask was first seen to be taken."""
        self._has_ended = False

    @property
    def place(self) -> str:
        """See WeightSource.place."""
        return f"a trainer of {self._files.folder.parent} that runs (rollout.transport=broadcast)"

    def latest_version(self) -> Latest | None:
        """See WeightSource.latest_version."""
        return self._files.latest_version()

    def state(self, version: int) -> object:
        """See WeightSource.state."""
        return self._files.latest_version()

    def read(self, version: int, *, sha256: str | None = None) -> Weights:
        """See WeightSource.read. On this engine's device if they come over NCCL."""
        latest = self._files.latest_version()
        if latest is None or latest.version != version or sha256 not in (None, latest.sha256):
            raise WeightsNotSentError(f"version {version} is no longer the newest")
        return receive_place(self.incoming(latest, [identity(self._device)]), 0, self._device)

    def specs(self, latest: Latest) -> dict[str, Spec]:
        """See GroupSource.specs."""
        return self._files.contents(latest.sha256).specs

    def incoming(self, latest: Latest, places: Sequence[str]) -> Incoming:
        """See GroupSource.incoming."""
        try:
            answer = self._answer_for(latest, list(places))
        except OSError as error:
            raise EngineError(
                f"{self._files.folder} can't be written to ({error}), and an engine asks for "
                "weights there: make it writable, or set rollout.transport=folder"
            ) from error

        self._asked = None
        if answer.sha256 != latest.sha256:
            raise WeightsLostError(f"the answer is for other weights than version {latest.version}")

        return Incoming(str(self._files.folder), answer)

    def withdraw(self) -> None:
        """See GroupSource.withdraw. If a round is answered already, the thread that waits for it
        joins it."""
        self._has_ended = True
        ask = self._asked
        with suppress(OSError):  # the ask is stale soon
            if ask is not None and self._files.withdraw(ask):
                self._asked = None

    def _answer_for(self, latest: Latest, places: list[str]) -> PlaceAnswer:
        ask = self._asked
        if ask is None or (ask.sha256, ask.places) != (latest.sha256, places):
            if ask is not None:
                self._files.withdraw(ask)
            where = f"{socket.gethostname()} {os.getpid()}"
            ask = PlaceRequest(uuid.uuid4().hex, self._engine, latest.sha256, places, where)
            self._files.ask(ask)
            self._asked = ask
            self._gone_at = None

        ends = time.monotonic() + WAIT_S
        renewed = time.monotonic()
        while time.monotonic() < ends:
            if (answer := self._files.answer(ask)) is not None:
                return answer
            if self._files.latest_version() != latest:
                break
            if self._has_ended and (self._asked is None or self._files.withdraw(ask)):
                break

            if time.monotonic() - renewed > RENEW_S:
                renewed = time.monotonic()
                if self._files.renew(ask):
                    self._gone_at = None
                elif self._gone_at is None:
                    self._gone_at = renewed
                elif renewed - self._gone_at > ANSWER_S:
                    self._asked = None
                    break

            time.sleep(LOOK_S)

        raise WeightsNotSentError(f"version {latest.version} was asked for and is not sent yet")


def receive_place(incoming: Incoming, place: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The weights that one process of an engine receives, see `receive`. Raises EngineError."""
    files = BroadcastFiles(Path(incoming.folder))
    specs = files.contents(incoming.answer.sha256).specs
    try:
        return receive(files, incoming.answer, specs, place, device)
    except (RuntimeError, MemoryError) as error:  # no room for them, for example
        raise EngineError(f"weights can't be received ({error}): not served") from error
