"""Engines in other processes, as one engine.

A conversation stays with the engine that holds its cache; a new one goes to the engine with the least to do. When an engine dies, hangs or
refuses, the same request (same ids, same seed) goes to another one within the same deadline: whatever the first has computed of it is lost,
and nothing else, since engines keep no state that an answer depends on. Only when none is left until the deadline is the request given up
(EngineUnavailableError). An engine is taken for dead when it has not answered for `max_age_s`; then requests that it holds are moved.

`version` and `stats` are as of the last look, every `poll_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from agentevo.errors import DeadlineExceededError, EngineError, EngineUnavailableError, MissingExtraError, RequestTooLongError
from agentevo.inference.directory import EngineDirectory
from agentevo.inference.messages import EngineState, GenerateRequest, ReleaseRequest, raised
from agentevo.types import Completion, SamplingParams

if TYPE_CHECKING:
    import httpx
    import torch

CONNECT_S = 2.0
KEEP_ALIVE_S = 30.0
"""Less than the server's."""
RELEASE_S = 5.0
GAUGES = ("engine/running", "engine/waiting", "engine/kv_tokens")
"""Statistics that say how things stand; the others count up, and an engine's count stays in the sum when the engine is gone."""


class _LostError(Exception):
    """The engine did not answer; another one may."""


@dataclass(eq=False)
class _Known:
    """One engine, from when it is first heard of until it is gone."""

    url: str
    heard: float
    """When it last answered, by the monotonic clock."""
    gone: asyncio.Future[None]
    """Done when it is taken for dead."""
    state: EngineState | None = None
    open: int = 0
    """Requests of this client that it holds."""
    open_then: int = 0
    """The same when `state` was asked for."""
    suspect: bool = False
    """A connection has just failed: nothing new until it answers again."""
    look: asyncio.Task[None] | None = None
    """Asking for its state, which a busy or hanging engine does not answer at once."""
    homes: set[str] = field(default_factory=set)
    """Conversations whose cache it holds."""

    @property
    def usable(self) -> bool:
        return self.state is not None and not self.suspect

    def load(self) -> int:
        """Requests that it has to do with: those that others had there at the last look, and ours."""
        stats = self.state.stats if self.state is not None else {}
        there = int(stats.get("engine/running", 0) + stats.get("engine/waiting", 0))
        return max(there - self.open_then, 0) + self.open


class RemoteEngine:
    """See the module. `engines`: where they announce themselves, or their URLs. Belongs to one event loop; `close` it there."""

    def __init__(self, engines: EngineDirectory | Sequence[str], *, poll_s: float = 0.1, max_age_s: float = 15.0) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise MissingExtraError(f"engines in other processes need the package {error.name!r}: pip install 'agentevo[serve]'") from error
        self._engines, self._poll_s, self._max_age_s = engines, poll_s, max_age_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S)
        self._http = httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None, connect=CONNECT_S), trust_env=False)
        self._transport_error = httpx.TransportError
        self._known: dict[str, _Known] = {}
        self._homes: dict[str, _Known] = {}
        self._counts: dict[tuple[str, int], dict[str, float]] = {}
        """(URL, process) -> what it has counted, also of those that are gone."""
        self._watcher: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """The smallest among the living engines; -1 when none is known."""
        return min((one.state.version for one in self._known.values() if one.state is not None and one.usable), default=-1)

    async def generate(
        self, prompt_ids: list[int], sampling: SamplingParams, *, session: str | None = None, deadline_s: float
    ) -> Completion:
        """See Engine.generate. Raises EngineUnavailableError if no engine has answered until the deadline."""
        self._watch()
        deadline = time.monotonic() + deadline_s
        refused: dict[str, EngineError] = {}
        trouble = "none was found"
        while (left := deadline - time.monotonic()) > 0:
            engine = self._choose(session, refused)
            if engine is None:
                if refused:
                    raise list(refused.values())[-1]  # by every engine that there is
                await asyncio.sleep(min(self._poll_s, left))
                self._watch()
                continue
            if session is not None:
                self._move_home(session, engine)
            try:
                return await self._ask(engine, prompt_ids, sampling, session, left)
            except (_LostError, EngineUnavailableError) as error:
                engine.suspect, trouble = True, str(error)
            except (RequestTooLongError, DeadlineExceededError):
                raise
            except EngineError as error:
                refused[engine.url] = error
        raise EngineUnavailableError(
            f"no engine answered within {deadline_s:g} s ({len(self._known)} known; {trouble}): are processes of `agentevo serve` running "
            f"and announced in {self._place()}?"
        )

    async def release(self, session: str) -> None:
        """See Engine.release. An engine that does not answer has nothing to be told: it gives up idle conversations by itself."""
        engine = self._homes.pop(session, None)
        if engine is None:
            return
        engine.homes.discard(session)
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._http.post(f"{engine.url}/release", content=msgspec.json.encode(ReleaseRequest(session=session)))
        except (self._transport_error, TimeoutError):
            engine.suspect = True

    async def publish(self, version: int, weights: Mapping[str, torch.Tensor] | None, *, deadline_s: float) -> None:
        """Not this way: engines in other processes take the weights from the run's folder."""
        raise EngineError("weights do not go to other processes through RemoteEngine: write them with WeightsFolder, engines follow it")

    def stats(self) -> dict[str, float]:
        """See Engine.stats: sums over the engines, and `engine/engines`, how many of them are living."""
        living = [one.state.stats for one in self._known.values() if one.state is not None and one.usable]
        gauges = [{key: stats.get(key, 0.0) for key in GAUGES} for stats in living]
        found = {"engine/engines": float(len(living))}
        for counts in (*self._counts.values(), *gauges):
            for key, value in counts.items():
                found[key] = found.get(key, 0.0) + value
        return found

    async def refresh(self) -> None:
        """Looks at every engine now: who lives, at which version, with how much to do. Goes on looking in the background."""
        self._watch()
        await self._look(CONNECT_S)

    async def _look(self, within_s: float) -> None:
        """Who answers later than `within_s` is heard later."""
        if isinstance(self._engines, EngineDirectory):
            urls = [one.url for one in await asyncio.to_thread(self._engines.living, self._max_age_s)]
        else:
            urls = list(self._engines)
        for url in urls:
            if url not in self._known:
                self._known[url] = _Known(url, time.monotonic(), asyncio.get_running_loop().create_future())
        for one in self._known.values():
            if one.look is None or one.look.done():
                one.look = asyncio.ensure_future(self._look_at(one))
        looks = [one.look for one in self._known.values() if one.look is not None]
        if looks:
            done, _ = await asyncio.wait(looks, timeout=within_s)
            for look in done:
                look.result()
        for one in list(self._known.values()):
            if time.monotonic() - one.heard > self._max_age_s or (one.url not in urls and one.suspect):
                self._forget(one)

    async def close(self) -> None:
        """Ends the connections; requests under way fail."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        for one in list(self._known.values()):
            self._forget(one)
        await self._http.aclose()

    def _watch(self) -> None:
        """Keeps looking in the background; what went wrong there is raised here."""
        if self._watcher is not None and self._watcher.done():
            self._watcher.result()
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._look_for_ever())

    async def _look_for_ever(self) -> None:
        while True:
            await self._look(self._poll_s)
            await asyncio.sleep(self._poll_s)

    async def _look_at(self, engine: _Known) -> None:
        """Asks for its state."""
        open_then = engine.open
        try:
            async with asyncio.timeout(CONNECT_S):
                answer = await self._http.get(f"{engine.url}/state")
            state = msgspec.json.decode(answer.content, type=EngineState)
        except (self._transport_error, msgspec.MsgspecError):
            engine.suspect = True
        except TimeoutError:
            return  # a long step, or it hangs: `heard` tells
        else:
            engine.state, engine.open_then, engine.suspect, engine.heard = state, open_then, False, time.monotonic()
            self._counts[engine.url, state.pid] = {key: value for key, value in state.stats.items() if key not in GAUGES}

    def _choose(self, session: str | None, refused: Mapping[str, EngineError]) -> _Known | None:
        """The conversation's engine if it can be asked, else the one with the least to do."""
        home = self._homes.get(session) if session is not None else None
        if home is not None and home.usable and not home.gone.done() and home.url not in refused:
            return home
        able = [one for one in self._known.values() if one.usable and one.url not in refused]
        return min(able, key=lambda one: (one.load(), len(one.homes), one.url), default=None)

    def _move_home(self, session: str, engine: _Known) -> None:
        before = self._homes.get(session)
        if before is not None:
            before.homes.discard(session)
        self._homes[session] = engine
        engine.homes.add(session)

    async def _ask(self, engine: _Known, prompt_ids: list[int], sampling: SamplingParams, session: str | None, left_s: float) -> Completion:
        """One attempt on one engine. Raises _LostError if it does not answer and another may."""
        body = msgspec.json.encode(GenerateRequest(prompt_ids=prompt_ids, sampling=sampling, session=session, deadline_s=left_s))
        call = asyncio.ensure_future(self._http.post(f"{engine.url}/generate", content=body))
        ends: list[asyncio.Future[Any]] = [call, engine.gone]
        engine.open += 1
        try:
            await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return _completion(call.result())
            if engine.gone.done():
                raise _LostError(f"{engine.url} has not answered for {self._max_age_s:g} s")
            raise DeadlineExceededError(
                f"{engine.url}: no completion within {left_s:g} s: raise engine.timeout_s or lower sampling.max_new_tokens"
            )
        except self._transport_error as error:
            raise _LostError(f"{engine.url}: {type(error).__name__} {error}".rstrip()) from error
        finally:
            engine.open -= 1
            if not call.done():  # the connection is closed, by which the engine knows that nobody waits
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)

    def _forget(self, engine: _Known) -> None:
        """It is dead: its requests go to others, its conversations too when they go on."""
        self._known.pop(engine.url, None)
        for session in engine.homes:
            self._homes.pop(session, None)
        if engine.look is not None:
            engine.look.cancel()
        if not engine.gone.done():
            engine.gone.set_result(None)

    def _place(self) -> str:
        return str(self._engines.folder) if isinstance(self._engines, EngineDirectory) else ", ".join(self._engines)


def _completion(answer: httpx.Response) -> Completion:
    if answer.status_code != 200:
        raise raised(answer.content, answer.status_code)
    try:
        return msgspec.json.decode(answer.content, type=Completion)
    except msgspec.MsgspecError as error:
        raise _LostError(f"{answer.url}: what it answered is no completion ({error})") from error
