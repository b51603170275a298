"""The built-in transports of trained weights to an engine (the trainer's own model, a copy in this
process, the run's folder, an object store, a process group), and the choice among all registered
transports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import distributed, nn

from agentevo.config import RunConfig, to_yaml
from agentevo.errors import ConfigError
from agentevo.inference.engine import EmbeddedEngine, UpdatableEngine, Weights
from agentevo.inference.weights.publication import Publication
from agentevo.inference.weights.weight_transport import (
    ID_FILE,
    SenderFactory,
    SourceFactory,
    WeightSender,
    WeightSource,
    WeightTransport,
    transports,
)
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.models.compute.parameters import trained_weights
from agentevo.runtime import devices

if TYPE_CHECKING:
    from agentevo.inference.weights.object_store import ObjectStoreWeights


class LocalWeights:
    """A WeightSender to the engine of this process. `weights` returns what the engine copies; None
    if the engine computes with the trainer's own model."""

    def __init__(
        self, engine: UpdatableEngine, config: RunConfig, weights: Callable[[], Weights | None]
    ) -> None:
        self._engine = engine
        self._config = config
        self._weights = weights

    async def begin(self, version: int) -> None:
        """See WeightSender.begin."""
        await self._engine.begin(version, self._weights(), deadline_s=self._config.engine.timeout_s)

    async def publish(self, version: int) -> None:
        """See WeightSender.publish."""
        await self._engine.publish(
            version,
            self._weights(),
            in_flight=self._config.rollout.in_flight,
            deadline_s=self._config.engine.timeout_s,
        )

    async def look_after(self) -> None:
        """See WeightSender.look_after. Does nothing, because the weights stay in this process."""


def _shared_sender(
    model: nn.Module, engine: UpdatableEngine, config: RunConfig, note: Callable[[str], None]
) -> LocalWeights:
    if not shares(engine, model):
        raise ConfigError(
            f"rollout.transport=shared: the engine {config.engine.type!r} does not compute "
            "with the trainer's own model: use rollout.transport=copy"
        )
    return LocalWeights(engine, config, lambda: None)


def _copy_sender(
    model: nn.Module, engine: UpdatableEngine, config: RunConfig, note: Callable[[str], None]
) -> LocalWeights:
    """The engine serves the copy while the next step changes the trainer's weights."""
    if shares(engine, model):
        raise ConfigError(
            "rollout.transport=copy: the engine computes with the trainer's own model, so a "
            "copy would change nothing: use rollout.transport=shared"
        )
    return LocalWeights(engine, config, partial(trained_weights, model))


def shares(engine: UpdatableEngine, model: nn.Module) -> bool:
    """Whether the engine computes with this model object."""
    return isinstance(engine, EmbeddedEngine) and engine.model is model


def _folder_sender(
    model: nn.Module, engine: UpdatableEngine, config: RunConfig, note: Callable[[str], None]
) -> Publication:
    return Publication(_folder_source(config), model, keep=config.rollout.keep_versions, note=note)


def _folder_source(config: RunConfig) -> WeightsFolder:
    return WeightsFolder(config.run_dir / "weights", full_every=_full_every(config))


def _object_store_sender(
    model: nn.Module, engine: UpdatableEngine, config: RunConfig, note: Callable[[str], None]
) -> Publication:
    store = _object_store(config, id_file=config.run_dir / ID_FILE, config=to_yaml(config))
    return Publication(store, model, keep=config.rollout.keep_versions, note=note)


def _object_store_source(config: RunConfig) -> WeightSource:
    from agentevo.inference.weights.object_store import POLL_INTERVAL_S

    return _object_store(config, poll_interval_s=POLL_INTERVAL_S)


def _broadcast_sender(
    model: nn.Module, engine: UpdatableEngine, config: RunConfig, note: Callable[[str], None]
) -> WeightSender:
    from agentevo.inference.weights.broadcast_group import check_network
    from agentevo.inference.weights.broadcast_sender import BroadcastSender

    check_network()
    return BroadcastSender(config.run_dir / "weights", model, note=note)


def _broadcast_source(config: RunConfig) -> WeightSource:
    from agentevo.inference.weights.broadcast_group import check_network
    from agentevo.inference.weights.broadcast_source import BroadcastSource

    check_network()
    return BroadcastSource(config.run_dir / "weights", devices.find(config.model.device))


def _object_store(recipe: RunConfig, **options: Any) -> ObjectStoreWeights:
    from agentevo.inference.weights.object_store import ObjectStoreWeights

    url = recipe.rollout.weights.url
    if url is None:
        raise ConfigError(
            "rollout.transport=object_store needs an address: set rollout.weights.url, such as "
            "s3://BUCKET/FOLDER"
        )

    return ObjectStoreWeights(url, full_every=_full_every(recipe), **options)


def _full_every(config: RunConfig) -> int:
    weights = config.rollout.weights
    return weights.full_every if weights.delta else 1


transports.register("shared")(
    WeightTransport("the engine computes with the trainer's own weights", _shared_sender)
)
transports.register("copy")(
    WeightTransport("the engine of this process has weights of its own", _copy_sender)
)
transports.register("folder")(
    WeightTransport(
        "files in RUN/weights, for engines in other processes", _folder_sender, _folder_source
    )
)
transports.register("object_store")(
    WeightTransport(
        "files under rollout.weights.url (S3 and others), for engines that share no folder",
        _object_store_sender,
        _object_store_source,
    )
)
transports.register("broadcast")(
    WeightTransport(
        "a process group (NCCL or gloo) that engines in other processes join for each version",
        _broadcast_sender,
        _broadcast_source,
    )
)


def local_transport(config: RunConfig, *, is_separate: bool) -> str:
    """The name of the transport to this process's engine. `is_separate`: engines in other processes
    sample for training, and this engine only evaluates."""
    if is_separate:
        return "shared"
    overlaps = config.rollout.staleness > 0 and config.rollout.sharing == "overlap"
    return config.rollout.transport or ("copy" if overlaps else "shared")


def open_local(
    name: str,
    model: nn.Module,
    engine: UpdatableEngine,
    config: RunConfig,
    note: Callable[[str], None],
) -> WeightSender:
    """Opens the transport `name` to this process's engine. If the engine does not compute with the
    trainer's model, `shared` becomes `copy`, unless the recipe sets `shared`."""
    if name == "shared" != config.rollout.transport and not shares(engine, model):
        name = "copy"
    return transports.get(name).sender(model, engine, config, note)


def remote_source(config: RunConfig) -> WeightSource:
    """Opens the source from which engines in other processes read the weights. Raises ConfigError,
    see `_remote_transport`."""
    return _remote_transport(config)[1](config)


def remote_sender(
    model: nn.Module, engine: UpdatableEngine, config: RunConfig, note: Callable[[str], None]
) -> WeightSender:
    """Opens the trainer's side of `remote_source`."""
    return _remote_transport(config)[0](model, engine, config, note)


def _remote_transport(config: RunConfig) -> tuple[SenderFactory, SourceFactory]:
    """The two sides of the recipe's transport to other processes. Raises ConfigError if the
    transport reaches only this process."""
    name = config.rollout.transport or ("object_store" if config.rollout.weights.url else "folder")
    transport = transports.get(name)
    if transport.source is None:
        raise ConfigError(
            f"rollout.transport={name} does not reach engines in other processes: leave it out, "
            "or set rollout.samplers=0 and use agentevo train"
        )

    return transport.sender, transport.source


def check_transport(config: RunConfig, *, is_separate: bool) -> None:
    """Raises ConfigError if the transport is unknown or does not fit the run."""
    if is_separate:
        _, source = _remote_transport(config)
        if source is _object_store_source:
            source(config)  # checks the store's address and package before anything is created

        if source is _broadcast_source and not (
            distributed.is_available() and distributed.is_gloo_available()
        ):
            raise ConfigError(
                "rollout.transport=broadcast needs gloo, and this PyTorch was built without it: "
                "install another build, or leave rollout.transport out"
            )

        return

    name = local_transport(config, is_separate=False)
    if transports.get(name).source is not None:
        raise ConfigError(
            f"rollout.transport={name} is for engines in other processes, and this run has none: "
            "leave it out, or set rollout.samplers"
        )

    if name == "shared" and config.rollout.staleness and config.rollout.sharing == "overlap":
        raise ConfigError(
            "rollout.sharing=overlap trains while the engine serves, so the engine needs weights "
            "of its own: leave rollout.transport out, or set rollout.sharing=turns"
        )
