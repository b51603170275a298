"""Engines that compute nothing, behind real sockets, and what tests ask of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

from agentevo.inference.serving.directory import Announcement, EngineDirectory
from agentevo.inference.serving.http_server import open_socket, url_of
from agentevo.inference.serving.remote import RemoteEngine
from agentevo.inference.serving.secret import RunSecret
from agentevo.inference.serving.server import EngineApp, listening
from agentevo.types import Completion, SamplingParams

PARAMS = SamplingParams(temperature=0.7, max_new_tokens=5, stop_strings=("x",), seed=2**60 + 3)


class FakeEngine:
    """Answers with its number. An entry of `says` decides the next answer: an exception is raised,
    a float is the seconds that it takes."""

    def __init__(self, number: int, version: int = 3) -> None:
        self.number = number
        self.version = version
        self.says: list[BaseException | float] = []
        self.asked: list[tuple[list[int], SamplingParams, str | None, float]] = []
        self.released: list[str] = []
        self.running = self.cancelled = 0

    async def generate(self, prompt_ids, sampling, *, session=None, deadline_s, listen=None):
        self.asked.append((prompt_ids, sampling, session, deadline_s))
        said = self.says.pop(0) if self.says else 0.0
        if isinstance(said, BaseException):
            raise said

        self.running += 1
        try:
            await asyncio.sleep(said)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

        return Completion(
            ids=[self.number], logprobs=[-0.1 - 1e-9], versions=[self.version], finish_reason="stop"
        )

    async def release(self, session):
        self.released.append(session)

    def stats(self):
        return {
            "engine/running": self.running,
            "engine/generated_tokens": 10 * self.number + len(self.asked),
        }


class SleepyEngine(FakeEngine):
    """Can be told to sleep, and answers all the same."""

    asleep = False
    slept_s = 0.0

    async def sleep(self, *, in_flight, deadline_s):
        self.asleep = True

    async def wake(self):
        self.asleep = False


class Engines:
    """Fake engines on real ports, announced in a directory."""

    def __init__(self, folder, stack: AsyncExitStack) -> None:
        self.directory = EngineDirectory(folder)
        self._stack = stack
        self.by_name: dict[str, FakeEngine] = {}
        self.leave: dict[str, AsyncExitStack] = {}

    async def start(
        self, number: int, version: int = 3, *, port: int = 0, kind: type[FakeEngine] = FakeEngine
    ) -> FakeEngine:
        engine = kind(number, version)
        name = f"e{number}"
        door = EngineApp(engine, name=name, secret=RunSecret(self.directory.folder))
        listener = open_socket("127.0.0.1", port)
        announcement = Announcement(url=url_of(listener), name=name, pid=number, started_at=1.0)
        own = self.leave[name] = await self._stack.enter_async_context(AsyncExitStack())
        await own.enter_async_context(listening(door, listener))
        await own.enter_async_context(self.directory.keep_announced(announcement, every_s=0.05))
        self.by_name[name] = engine
        return engine


@asynccontextmanager
async def some(folder, *numbers: int, max_age_s: float = 15.0, kind: type[FakeEngine] = FakeEngine):
    """(engines, client): engines of these numbers, and a client that knows all of them."""
    async with AsyncExitStack() as stack:
        engines = Engines(folder, stack)
        for number in numbers:
            await engines.start(number, kind=kind)
        client = RemoteEngine(EngineDirectory(folder), poll_s=0.02, max_age_s=max_age_s)
        stack.push_async_callback(client.close)
        await client.refresh()
        yield engines, client


async def ask(client: RemoteEngine, session: str | None = None, deadline_s: float = 300.0) -> int:
    return (await client.generate([1, 2, 3], PARAMS, session=session, deadline_s=deadline_s)).ids[0]


async def until(condition) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.005)
