"""An engine's side of receiving weights over a process group. The engine requests the newest
version, waits until the trainer answers with a round, and receives the weights in that round.

The engine has one request (PlaceRequest) at a time, for the version that was the newest when it
wrote the request. It renews the request while a caller waits. When a newer version appears, the
engine replaces the request.
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

from agentevo.errors import EngineError, WeightsLostError, WeightsNotSentError
from agentevo.inference.engine import Weights
from agentevo.inference.weights.broadcast_files import (
    RENEW_S,
    BroadcastFiles,
    IncomingWeights,
    PlaceAnswer,
    PlaceRequest,
)
from agentevo.inference.weights.broadcast_group import receive
from agentevo.inference.weights.weight_transport import Latest
from agentevo.models.compute.parts import Spec
from agentevo.runtime.devices import identity

WAIT_S = 2.0
"""The longest wait of one call, in seconds. The request remains valid after the call."""
ANSWER_S = 3.0
"""If the request is missing for this long and there is no answer, the file was deleted, and the
engine writes a new request."""
POLL_INTERVAL_S = 0.1


class BroadcastSource:
    """A WeightSource and a GroupSource. `device`: the device on which `read` receives tensors over
    NCCL."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._files = BroadcastFiles(folder)
        self._device = device
        self._engine = uuid.uuid4().hex
        self._request: PlaceRequest | None = None
        self._taken_at: float | None = None
        """The time at which this process first saw that the trainer had taken the request."""
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
        """See WeightSource.read. Tensors that arrive over NCCL are on this engine's device."""
        latest = self._files.latest_version()
        if latest is None or latest.version != version or sha256 not in (None, latest.sha256):
            raise WeightsNotSentError(f"version {version} is no longer the newest")
        return receive_place(self.incoming(latest, [identity(self._device)]), 0, self._device)

    def specs(self, latest: Latest) -> dict[str, Spec]:
        """See GroupSource.specs."""
        return self._files.contents(latest.sha256).specs

    def incoming(self, latest: Latest, places: Sequence[str]) -> IncomingWeights:
        """See GroupSource.incoming."""
        try:
            answer = self._answer_for(latest, list(places))
        except OSError as error:
            raise EngineError(
                f"{self._files.folder} can't be written to ({error}), and an engine requests "
                "weights there: make it writable, or set rollout.transport=folder"
            ) from error

        self._request = None
        if answer.sha256 != latest.sha256:
            raise WeightsLostError(f"the answer is for other weights than version {latest.version}")

        return IncomingWeights(str(self._files.folder), answer)

    def withdraw(self) -> None:
        """See GroupSource.withdraw. If the trainer has already answered, the waiting thread still
        joins the round."""
        self._has_ended = True
        request = self._request
        with suppress(OSError):  # the request soon expires
            if request is not None and self._files.withdraw(request):
                self._request = None

    def _answer_for(self, latest: Latest, places: list[str]) -> PlaceAnswer:
        request = self._request
        if request is None or (request.sha256, request.places) != (latest.sha256, places):
            if request is not None:
                self._files.withdraw(request)
            engine_name = f"{socket.gethostname()} {os.getpid()}"
            request = PlaceRequest(
                uuid.uuid4().hex, self._engine, latest.sha256, places, engine_name
            )
            self._files.ask(request)
            self._request = request
            self._taken_at = None

        deadline = time.monotonic() + WAIT_S
        renewed_at = time.monotonic()
        while time.monotonic() < deadline:
            if (answer := self._files.answer(request)) is not None:
                return answer
            if self._files.latest_version() != latest:
                break
            if self._has_ended and (self._request is None or self._files.withdraw(request)):
                break

            if time.monotonic() - renewed_at > RENEW_S:
                renewed_at = time.monotonic()
                if self._files.renew(request):
                    self._taken_at = None
                elif self._taken_at is None:
                    self._taken_at = renewed_at
                elif renewed_at - self._taken_at > ANSWER_S:
                    self._request = None
                    break

            time.sleep(POLL_INTERVAL_S)

        raise WeightsNotSentError(f"version {latest.version} was requested and is not sent yet")


def receive_place(
    incoming: IncomingWeights, place: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Receives the weights in one process of an engine, see `receive`. Raises EngineError."""
    files = BroadcastFiles(Path(incoming.folder))
    specs = files.contents(incoming.answer.sha256).specs
    try:
        return receive(files, incoming.answer, specs, place, device)
    except (RuntimeError, MemoryError) as error:  # for example, out of memory
        raise EngineError(f"weights can't be received ({error}): not served") from error
