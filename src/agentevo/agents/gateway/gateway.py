"""The gateway of one process: a thread with an event loop of its own, so that no step of an engine,
which holds the sampler's loop, keeps a client waiting.

It begins to listen when the first session is opened, only on this machine unless it gets a socket,
and ends with `close`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from agentevo.agents.gateway.bridge import Bridge
from agentevo.agents.gateway.session import GatewaySession
from agentevo.config.gateway import GatewaySection
from agentevo.errors import EngineError, MissingExtraError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.remote_models import RemoteConversations

if TYPE_CHECKING:
    from agentevo.agents.gateway.routes import Routes

S = TypeVar("S", bound=GatewaySession)

START_S = 60.0
"""The time limit for the thread to listen, in seconds; importing its packages takes most of the
time."""
CLOSE_S = 5.0
MAX_CONNECTIONS = 4096
IDLE_S = 120.0
"""How long the connection of an idle client is kept, in seconds."""


class Gateway:
    """See the module. `model`: the name under which clients find the policy; `timeout_s`: the
    engine's deadline of a request, in seconds; `note` is called with messages for the user."""

    def __init__(
        self,
        section: GatewaySection,
        *,
        model: str,
        timeout_s: float,
        note: Callable[[str], None] = lambda text: None,
        listener: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`listener` is where it listens, and `tls` how it encrypts; without a listener the section
        names the place."""
        self._listener = listener
        self._tls = tls
        self.added: Routes | None = None
        """The routes of the command that serves; set before it listens."""
        self._section = section
        self._model = model
        self._timeout_s = timeout_s
        self._note = note
        self._noted = False
        self._sessions: dict[str, GatewaySession] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._bridges: dict[asyncio.AbstractEventLoop, Bridge] = {}
        self._base = ""

    @property
    def base(self) -> str:
        """Its URL without a path; it listens from now on. Raises ConfigError or EngineError if it
        can't listen."""
        if self._thread is None:
            self._start()
        return self._base

    def open(
        self,
        conversations: Mapping[str, Conversation],
        remote: RemoteConversations | None = None,
        remote_agents: Mapping[str, str] = MappingProxyType({}),
    ) -> GatewaySession:
        """A session of the current attempt. `remote`: its remote models."""
        follows_client = self._section.distribution == "client"
        return self.add(
            GatewaySession(
                conversations,
                self.base,
                follows_client=follows_client,
                whole_calls=self._section.whole_calls,
                max_image_bytes=int(self._section.max_attempt_images_mb * 2**20),
                remote=remote,
                remote_agents=remote_agents,
            )
        )

    def add(self, session: S) -> S:
        """Opens the session: from now on its key is accepted, and its requests are answered on the
        loop of the caller."""
        session.bridge = self.bridge_to_current_loop()
        self._sessions[session.key] = session
        return session

    def bridge_to_current_loop(self) -> Bridge:
        """The bridge to the loop that this is called on."""
        assert self._loop is not None
        loop = asyncio.get_running_loop()
        bridge = self._bridges.get(loop)
        if bridge is None:
            bridge = Bridge(self._loop)
            is_open = {own: made for own, made in self._bridges.items() if not own.is_closed()}
            self._bridges = is_open | {loop: bridge}
        return bridge

    def end(self, session: GatewaySession) -> None:
        """Closes the session: its key is not valid from now on."""
        self._sessions.pop(session.key, None)
        if session.ignored and not self._noted:
            self._noted = True
            ignored = ", ".join(f"{name}={value:g}" for name, value in session.ignored.items())
            self._note(
                f"gateway: the agent's client asks for {ignored}: the recipe's sampling is used "
                "instead, because only that can be trained (gateway.distribution=client uses the "
                "client's)"
            )

    def close(self) -> None:
        """Ends the thread. Sessions that are still open are over."""
        self._sessions.clear()
        if self._thread is None or self._loop is None or self._stop is None:
            return
        with suppress(RuntimeError):  # its loop has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_S + (0.0 if self.added is None else self.added.close_s))
        self._thread = None
        self._bridges = {}

    def _start(self) -> None:
        started: Future[str] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="agentevo-gateway", daemon=True
        )
        self._thread.start()

        try:
            self._base = started.result(START_S)
        except BaseException as error:
            self._thread = None
            if isinstance(error, TimeoutError):
                raise EngineError(f"the gateway did not start within {START_S:g} s") from error
            raise

    async def _serve(self, started: Future[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with AsyncExitStack() as stack:
            try:
                started.set_result(await self._listen(stack))
            except BaseException as error:  # noqa: BLE001 (handed to who waits for the start)
                started.set_exception(error)
                return
            await self._stop.wait()

    async def _listen(self, stack: AsyncExitStack) -> str:
        """Returns the URL."""
        try:
            from agentevo.agents.gateway.app import GatewayApp
            from agentevo.inference.serving.admission import AdmissionLimits
            from agentevo.inference.serving.http_server import open_socket, serving, url_of
        except ModuleNotFoundError as missing:
            raise MissingExtraError(
                f"agents with their own client need the package {missing.name!r}: pip install "
                "'agentevo[serve]'"
            ) from missing

        app = GatewayApp(
            self._sessions,
            model=self._model,
            timeout_s=self._timeout_s,
            max_body=int(self._section.max_body_mb * 2**20),
            max_image_body=int(self._section.max_image_body_mb * 2**20),
            requests_per_s=self._section.requests_per_s,
            added=self.added,
        )

        listener = self._listener
        if listener is None:
            listener = open_socket(self._section.host, self._section.port)

        limits = AdmissionLimits(strangers=MAX_CONNECTIONS, clients=MAX_CONNECTIONS, idle_s=IDLE_S)
        await stack.enter_async_context(
            serving(
                app,
                listener,
                close=self._close_routes,
                tls=self._tls,
                limits=limits,
            )
        )

        return url_of(listener, encrypted=self._tls is not None)

    async def _close_routes(self) -> None:
        if self.added is not None:
            await self.added.close()
