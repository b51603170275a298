"""How the trained weights reach the engines.

The trainer holds a `WeightSender`; an engine in another process reads a `WeightSource`.
`rollout.transport` in a recipe names a `WeightTransport`, which knows both. Other packages add
theirs under the entry-point group `agentevo.transports` (docs/engines.md).

Invariant: an engine serves exactly the weights for which `begin` or `publish` were called, under
that version; a version is served whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol, runtime_checkable

import msgspec

from agentevo.config import RunConfig
from agentevo.inference.engine import InFlight, UpdatableEngine, Weights
from agentevo.runtime.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from agentevo.inference.weights.broadcast_files import IncomingWeights
    from agentevo.models.compute.parts import Spec


LATEST_FILE = "latest.json"
CONFIG_FILE = "config.yaml"
"""The run's configuration under rollout.weights.url."""
WRITER_FILE = "writer.json"
"""An id under rollout.weights.url that is also in ID_FILE, in the folder of the run's trainer."""
ID_FILE = "weights/writer"
LAST_VERSION = 2**53
"""The largest version that fits a folder name. No run reaches it."""


class Latest(msgspec.Struct, frozen=True):
    """The newest version of a WeightSource."""

    version: Annotated[int, msgspec.Meta(ge=0, le=LAST_VERSION)]
    sha256: str
    """Checksum of that version's weights."""


class WeightSender(Protocol):
    """The trainer's side. The model's weights do not change while one of its methods runs."""

    async def begin(self, version: int) -> None:
        """Sets the version of the model's current weights at the start of a run. `version` may be
        lower than a version that was sent before."""
        ...

    async def publish(self, version: int) -> None:
        """Publishes the model's current weights as `version`. Engines serve them from now on, or as
        soon as they can."""
        ...

    async def look_after(self) -> None:
        """Restores files or messages of the newest version that were lost. The trainer calls this
        method repeatedly while it waits, so the method is cheap if nothing was lost."""
        ...


class WeightSource(Protocol):
    """The side of an engine in another process. Its methods block, and are called from a thread.
    All except `place` raise EngineError for weights that can't be read."""

    @property
    def place(self) -> str:
        """Where the weights come from, for messages."""
        ...

    def latest_version(self) -> Latest | None:
        """The version that was published last; None before the first."""
        ...

    def state(self, version: int) -> object:
        """A value that changes whenever the version was rewritten. An engine that refused the
        version may then try again."""
        ...

    def read(self, version: int, *, sha256: str | None = None) -> Weights:
        """Reads exactly the weights that were sent, on the CPU. `sha256`: their expected
        checksum."""
        ...


@runtime_checkable
class GroupSource(Protocol):
    """A WeightSource whose weights come over a process group. An engine's processes can join the
    group themselves. Its methods block."""

    def specs(self, latest: Latest) -> Mapping[str, Spec]:
        """The dtype and shape of each tensor of the version. Raises EngineError."""
        ...

    def incoming(self, latest: Latest, places: Sequence[str]) -> IncomingWeights:
        """Asks for the version on behalf of these receiving processes (`places`), and waits until
        the trainer is ready to send it. The processes must then join immediately. Raises
        WeightsNotSentError after some seconds, and EngineError."""
        ...

    def withdraw(self) -> None:
        """Withdraws the ask when the engine ends, so that the trainer does not wait for it."""
        ...


@runtime_checkable
class ReceivingEngine(Protocol):
    """An engine whose processes receive weights themselves."""

    async def places(self, specs: Mapping[str, Spec]) -> list[str]:
        """The device of each of the processes, in their order (`devices.identity`); empty if the
        engine gets the weights through `publish`. Raises EngineError for weights that do not fit
        the engine."""
        ...

    async def receive(
        self, version: int, incoming: IncomingWeights, *, in_flight: InFlight, deadline_s: float
    ) -> None:
        """As `publish`, but each process receives the weights itself. Raises WeightsLostError if
        they did not arrive."""
        ...


class SenderFactory(Protocol):
    """Makes the trainer's side of a transport."""

    def __call__(
        self,
        model: nn.Module,
        engine: UpdatableEngine,
        config: RunConfig,
        note: Callable[[str], None],
    ) -> WeightSender:
        """`model` is the trained model, `engine` is this process's engine, and `note` gets messages
        for the user. Raises ConfigError."""
        ...


SourceFactory = Callable[[RunConfig], WeightSource]


@dataclass(frozen=True)
class WeightTransport:
    """A value of `rollout.transport`."""

    about: str
    """One line for `agentevo list transports`."""
    sender: SenderFactory
    source: SourceFactory | None = None
    """Opens the source for engines in other processes. None: the transport reaches only this
    process's engine."""


transports: Registry[WeightTransport] = Registry("transports")


def is_others(stored_id: str, writer_id: str) -> bool:
    """Whether the id in WRITER_FILE belongs to another run. False if there is no id yet, or only a
    prefix of this run's id, from an interrupted upload."""
    return bool(stored_id) and not writer_id.startswith(stored_id)


def others_weights(url: str) -> str:
    """The error message if the weights belong to another run."""
    return (
        f"rollout.weights.url={url} has the weights of another run: use another address for this "
        "run, or delete those weights if that run has ended"
    )
