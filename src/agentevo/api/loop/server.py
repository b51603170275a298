"""`agentevo serve --training`: trains models for programs on other machines. Each model has a
folder of its name, and a run with a thread of its own (service.py). A gateway listens, with the
routes of programs' loops (routes.py) and those for agents that use another API client. A client
with the key may train, but can neither run code nor read files: the keys of sections that a client
may set are listed (client_sections.py), and its chat templates are rendered within bounds.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agentevo.agents.gateway.gateway import Gateway
from agentevo.api.loop.client_sections import brings_template, check_sections, only_from_the_hub
from agentevo.api.loop.local import loop_config
from agentevo.api.loop.records import ModelNotOpenError
from agentevo.api.loop.routes import LoopRoutes
from agentevo.api.loop.service import LoopService
from agentevo.api.loop.wire import NAME, WAIT_S, ListedModel
from agentevo.config import RunConfig
from agentevo.config.gateway import GatewaySection
from agentevo.errors import ConfigError, EngineUnavailableError
from agentevo.inference.serving.address import EngineAddress
from agentevo.inference.serving.certificate import RunCertificate
from agentevo.runs.folder.run_folder import is_run_folder
from agentevo.runs.processes.endpoint import FOLDER, open_endpoint
from agentevo.runtime.console import to_stderr
from agentevo.runtime.paths import check_new_folder
from agentevo.runtime.signals import POLL_INTERVAL_S, catch_stop_signals

T = TypeVar("T")

KEPT_S = 60.0
"""How long a result is kept for a client that was asked to try again."""
LONGEST_REQUEST_S = 3600.0


class LoopServer:
    """The models that are open. Belongs to the gateway's event loop."""

    def __init__(
        self, folder: Path, gateway: Gateway, *, max_models: int, note: Callable[[str], None]
    ) -> None:
        """`gateway` serves the API clients of the models' attempts."""
        self.folder = folder
        self._gateway = gateway
        self._max_models = max_models
        self._note = note
        self._services: dict[str, LoopService] = {}
        self._jobs: dict[tuple[str, ...], asyncio.Task[Any]] = {}

    async def job(self, key: tuple[str, ...], work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of work that may take long. It begins once, and the client asks again until
        the result is ready. Raises TimeoutError if it is not ready yet."""
        task = self._jobs.get(key)
        if task is None:
            task = self._jobs[key] = asyncio.create_task(work())
            task.add_done_callback(partial(self._forget_later, key))

        done, _ = await asyncio.wait([task], timeout=WAIT_S)
        if not done:
            raise TimeoutError
        if task.cancelled():
            raise EngineUnavailableError("the server is stopping: try again after it has restarted")
        if self._jobs.get(key) is task:
            del self._jobs[key]

        return task.result()

    def _forget_later(self, key: tuple[str, ...], task: asyncio.Task[Any]) -> None:
        """Drops the result after a time: the client may never fetch it."""

        def forget() -> None:
            if self._jobs.get(key) is task:
                del self._jobs[key]
                if not task.cancelled():
                    task.exception()

        asyncio.get_running_loop().call_later(KEPT_S, forget)

    def service(self, name: str) -> LoopService:
        """The open model of that name. If it has failed, raises the reason: such a request does not
        open it again, because it would fail again."""
        service = self._services.get(name)
        if service is not None and service.is_ending and service.has_failed:
            raise service.error_of_end()
        if service is None or not service.is_open:
            raise ModelNotOpenError(f"the model {name!r} is not open on this server: open it first")
        return service

    async def open(self, name: str, sections: dict[str, Any]) -> None:
        """Opens a new or existing model; a model that is already open with the same settings is
        unchanged."""
        config = self._config(name, sections)
        await self._end(name)

        service = self._services.get(name)
        if service is not None:
            if service.config != config:
                raise ConfigError(
                    f"the model {name!r} is open with other settings: close it first, or open it "
                    "without sections"
                )
            await service.start()
            return

        is_open = [name for name, service in self._services.items() if not service.is_ending]
        if len(is_open) >= self._max_models:
            raise ConfigError(
                f"{len(is_open)} models are open ({', '.join(sorted(is_open))}), "
                "which is --max-models: close one, or start the server with more"
            )

        resume = is_run_folder(config.run_dir)
        service = LoopService(
            config,
            resume=resume,
            gateway=self._gateway,
            note=self._note,
            is_of_stranger=brings_template(config),
        )
        self._services[name] = service
        try:
            await service.start()
        except BaseException:
            self._services.pop(name, None)
            raise

        self._note(f"{name}: open at step {(await service.call(service.state())).step}")

    async def _end(self, name: str) -> None:
        """Waits for the end of a model that is closing, and forgets it."""
        service = self._services.get(name)
        if service is not None and service.is_ending:
            await self._forget_closed(name, service)

    async def _forget_closed(self, name: str, service: LoopService) -> None:
        try:
            await service.close()
        except Exception as error:
            if not service.is_over:
                raise
            self._note(f"{name}: it had failed: {error}")

        if self._services.get(name) is service:
            del self._services[name]

    def _config(self, name: str, sections: dict[str, Any]) -> RunConfig:
        if not re.fullmatch(NAME, name):
            raise ConfigError(
                f"{name!r} is not a valid model name: use letters, digits, `-`, `_` and `.`"
            )
        check_sections(sections)
        return loop_config(self.folder / name, only_from_the_hub(sections))

    async def close_model(self, name: str) -> None:
        """Ends a model's run with a checkpoint."""
        service = self._services.get(name)
        if service is not None:
            await self._forget_closed(name, service)
            self._note(f"{name}: closed")

    def models(self) -> list[ListedModel]:
        """The existing models, by name."""
        names = {path.parent.name for path in self.folder.glob("*/config.yaml")}
        services = dict(self._services)
        is_open = {name for name, service in services.items() if not service.is_ending}
        return [
            ListedModel(name=name, is_open=name in is_open) for name in sorted(names | {*services})
        ]

    async def close(self) -> None:
        """Ends all runs, each with a checkpoint."""
        for task in self._jobs.values():
            task.cancel()

        results = await asyncio.gather(
            *(service.close() for service in self._services.values()), return_exceptions=True
        )
        for error in results:
            if isinstance(error, BaseException):
                self._note(f"a model ended with an error: {error}")


def serve_loops(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: bool | None = None,
    max_models: int = 1,
    note: Callable[[str], None] = to_stderr,
) -> None:
    """Serves until it is asked to stop; blocks. `tls`: whether it encrypts; None encrypts if other
    machines can reach it. Raises ConfigError before anything is created."""
    if max_models < 1:
        raise ConfigError(f"--max-models {max_models}: give 1 or more")

    check_new_folder(folder, "folder")
    with catch_stop_signals() as stop, open_endpoint(folder, host, port, tls) as endpoint:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{folder} can't be created ({error.strerror}): give another folder"
            ) from error

        context = endpoint.server_context()
        fingerprint = RunCertificate(folder / FOLDER).fingerprint() if context else ""
        endpoint.secret.value()
        gateway = Gateway(
            GatewaySection(),
            model="policy",
            timeout_s=LONGEST_REQUEST_S,
            listener=endpoint.listener,
            tls=context,
        )
        server = LoopServer(folder, gateway, max_models=max_models, note=note)
        gateway.added = LoopRoutes(server, endpoint.secret)
        try:
            address = EngineAddress(gateway.base, fingerprint).pinned_url
            note(f"training for clients at {address}\n  the key is in {endpoint.secret.file}")
            while not stop():
                time.sleep(POLL_INTERVAL_S)
            note("stopping: a step in progress is finished first")
        finally:
            gateway.close()

        note("stopped")
