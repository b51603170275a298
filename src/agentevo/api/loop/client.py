"""`agentevo.Client`: a training loop on one machine, the model on another (server.py). It has the
methods of a loop in one process, imports no torch, and shares no folder with the server.

Requests are repeated for `patience_s` while the server is unreachable; repeating any of them is
safe. After a restart of the server, the client opens the model again, and it continues from its
newest committed step.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec
import pydantic

from agentevo.agents.policy import AttemptSession
from agentevo.api.loop import records, wire
from agentevo.api.loop.encoding import decode, encode
from agentevo.api.loop.group import Group
from agentevo.api.loop.model import TrainableModel
from agentevo.api.loop.tunnel import Tunnel, pinned_context
from agentevo.config.remote_models import RemoteModelSection, name_problems
from agentevo.config.rewards import Reward, read_rewards, reward_entry
from agentevo.config.sources import plain_option
from agentevo.data.message_images import ImageCollector
from agentevo.errors import ConfigError, EngineUnavailableError, shown
from agentevo.inference.remote_models import RemoteConversations, RemoteModels
from agentevo.inference.serving.address import EngineAddress
from agentevo.rewards import RewardConfig
from agentevo.runtime.console import to_stderr
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.seeds import derive_seed


@dataclass(frozen=True)
class ProgramParts:
    """The parts that stay with a program when its model is on a server: its rewards, the remote
    models that it calls, with their keys, and the agents that those play."""

    rewards: tuple[RewardConfig, ...]
    remote_models: RemoteModels
    remote_agents: dict[str, str]
    """The agents that a remote model plays, and which."""
    agents: dict[str, Any]
    """All other sections, as the server reads them."""

    @classmethod
    def read(
        cls,
        rewards: Sequence[Reward],
        remote_models: Mapping[str, Any],
        agents: Mapping[str, Any],
    ) -> ProgramParts:
        """Separates the parts from the sections of a recipe. Raises ConfigError with a line for
        each problem."""
        configs, problems = read_rewards([reward_entry(reward) for reward in rewards])
        sections: dict[str, RemoteModelSection] = {}
        for name, declared in remote_models.items():
            try:
                options = plain_option(declared, named=False)
                sections[name] = RemoteModelSection.model_validate(options)
            except pydantic.ValidationError as error:
                problems += [
                    f"remote_models.{name}.{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
                    for wrong in error.errors()
                ]

        problems += name_problems(list(remote_models), "policy")
        problems += [
            f"remote_models.{name}.cache: answers are kept in a run's folder, which is on the "
            "server: leave it out"
            for name, section in sections.items()
            if section.cache
        ]
        plain = {name: plain_option(agent, named=False) for name, agent in agents.items()}
        problems += [
            f"agents: {name!r} is also the name of a remote model, so clients could not "
            f"distinguish them: rename one of them"
            for name, config in plain.items()
            if name in remote_models and not (_is_remote(config) and config["remote"] == name)
        ]
        played = {name: config["remote"] for name, config in plain.items() if _is_remote(config)}
        problems += [
            f"agents.{name}.remote: {model!r} is not in remote_models "
            f"({', '.join(remote_models) or 'none'})"
            for name, model in played.items()
            if model not in remote_models
        ]
        problems += [
            f"agents.{name}.remote: a remote model's agent has no other keys"
            for name in played
            if len(plain[name]) > 1
        ]
        if problems:
            raise ConfigError("\n".join(f"Client.open_model: {line}" for line in problems))

        own_agents = {name: config for name, config in plain.items() if name not in played}
        return cls(configs, RemoteModels(sections), played, own_agents)

    def close(self) -> None:
        """Ends the remote models, and returns a report of their cost."""
        for line in self.remote_models.account():
            to_stderr(line)
        self.remote_models.close()


def _is_remote(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("remote") is not None


T = TypeVar("T")

PATIENCE_S = 60.0
"""How long to wait for an unreachable server."""
ANSWER_S = 120.0
"""The time limit of one answer. The server always sends one in time, at least that the result is
not ready yet."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
NAMED_SECTIONS = ("model", "algorithm")


class Client:
    """Connects your training loop to the models that `agentevo serve --training` serves:
    `async with agentevo.Client(url, key) as client`. A client belongs to one event loop."""

    def __init__(self, url: str, key: str, *, patience_s: float = PATIENCE_S) -> None:
        """`url` is the address that `agentevo serve --training` printed, `key` the content of the
        key file that it named. Raises ConfigError if one of them is invalid."""
        self._address = EngineAddress.read(url, what="a server", printed_by="serve --training")
        if not isinstance(key, str) or not re.fullmatch("[0-9a-f]{64}", key.strip()):
            raise ConfigError(
                "this is not a key: give the content of the file that `agentevo serve --training` "
                "named"
            )

        self._headers = {"Authorization": f"Bearer {key.strip()}"}
        self._patience_s = patience_s
        self._http: httpx.AsyncClient | None = None
        self._tunnel: Tunnel | None = None

    async def __aenter__(self) -> Self:
        verify: Any = True
        if self._address.certificate:
            verify = await in_thread(pinned_context, self._address)
            self._tunnel = Tunnel(self._address, verify)

        self._http = httpx.AsyncClient(
            base_url=self._address.url,
            headers=self._headers,
            verify=verify,
            trust_env=False,
            timeout=httpx.Timeout(ANSWER_S, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=32),
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._tunnel is not None:
            self._tunnel.close()
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def models(self) -> list[wire.ListedModel]:
        """The server's models, in order of their names."""
        return await self.request("GET", "", kind=list[wire.ListedModel])

    @asynccontextmanager
    async def open_model(
        self,
        name: str,
        *,
        rewards: Sequence[Reward] = (),
        remote_models: Mapping[str, Any] = MappingProxyType({}),
        agents: Mapping[str, Any] | None = None,
        **sections: Any,
    ) -> AsyncIterator[TrainableModel]:
        """Opens the model `name` on the server. It is new, continues from its newest committed
        step, or is shared with other clients that have it open. `sections` are the sections of a
        recipe, as in `agentevo.open_model`; a resumed run keeps every setting that you do not pass.
        After the block the model stays open on the server until `close_model`.

        `rewards`, `remote_models` and the agents that they play belong to this program. It calls
        them itself. The server does not know them, so every program passes them again."""
        if not re.fullmatch(wire.NAME, name):
            raise ConfigError(
                f"{shown(name)} is not a valid model name: use letters, digits, `-`, `_` and `.`"
            )

        options = {
            key: plain_option(value, named=key in NAMED_SECTIONS)
            for key, value in sections.items()
            if value is not None
        }
        program = ProgramParts.read(rewards, remote_models, agents or {})
        if agents is not None:
            options["agents"] = program.agents

        connection = _ServedModel(self, name, options, program)
        try:
            yield TrainableModel(connection, await connection.open_model(), program.rewards)
        finally:
            program.close()

    async def close_model(self, name: str) -> None:
        """Ends the model's run on the server and writes a checkpoint. You can open it again."""
        await self.request("POST", f"/{quote(name, safe='')}/close", kind=dict)

    def base(self) -> str:
        """The base URL of the server's gateway, for other API clients. Blocks briefly."""
        return self._address.url if self._tunnel is None else self._tunnel.base

    async def request(self, method: str, path: str, body: Any = None, *, kind: type[T]) -> T:
        """Sends a request and returns the answer, without a time limit. Raises the server's error,
        or EngineUnavailableError if the server is unreachable."""
        content = None if body is None else await in_thread(encode, body)
        ends = time.monotonic() + self._patience_s
        pause = FIRST_PAUSE_S
        while True:
            try:
                answer = await self.http.request(method, wire.PREFIX + path, content=content)
                if answer.status_code == wire.NOT_READY_STATUS:
                    ends = time.monotonic() + self._patience_s
                    pause = FIRST_PAUSE_S
                    continue

                if answer.is_success:
                    return await in_thread(decode, answer.content, kind)

                raise _failure(answer)
            except httpx.TransportError as error:
                if time.monotonic() + pause >= ends:
                    raise EngineUnavailableError(
                        f"{self._address.url} does not answer ({type(error).__name__} {error}): "
                        "is `agentevo serve --training` running there?"
                    ) from error

            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    @property
    def http(self) -> httpx.AsyncClient:
        """The HTTP connections. Raises ConfigError if the client is closed."""
        if self._http is None:
            raise ConfigError("the client is closed: use it in `async with agentevo.Client(...)`")
        return self._http


def _failure(answer: httpx.Response) -> Exception:
    try:
        return wire.error_of(decode(answer.content, wire.WireFailure))
    except Exception:  # noqa: BLE001 (it is no server of ours)
        return EngineUnavailableError(
            f"{answer.request.url} answers {answer.status_code}: it is not a server that "
            "`agentevo serve --training` started"
        )


class _ServedModel:
    """A Connection to a model at a server."""

    def __init__(
        self, client: Client, name: str, sections: Mapping[str, Any], program: ProgramParts
    ) -> None:
        self._client = client
        self._path = f"/{quote(name, safe='')}"
        self._sections = dict(sections)
        self._program = program
        self._seed = 0

    async def open_model(self) -> records.ModelState:
        body = wire.OpenModel(sections=self._sections)
        state = await self._client.request("POST", self._path, body, kind=records.ModelState)
        self._seed = state.seed
        return state

    async def _ask(self, method: str, path: str, body: Any = None, *, kind: type[T]) -> T:
        """Sends a request to the model, and opens it again if the server was restarted."""
        try:
            return await self._client.request(method, self._path + path, body, kind=kind)
        except records.ModelNotOpenError:
            await self.open_model()
            return await self._client.request(method, self._path + path, body, kind=kind)

    async def state(self) -> records.ModelState:
        return await self._ask("GET", "", kind=records.ModelState)

    async def group(self, task_id: str, *, greedy: bool) -> str:
        body = wire.NewGroup(task_id=task_id, greedy=greedy)
        return (await self._ask("POST", "/groups", body, kind=wire.CreatedId)).id

    async def open(self, attempt: records.NewAttempt) -> records.OpenedService:
        new = msgspec.structs.replace(attempt, elsewhere=list(self._program.remote_models))
        return await self._ask("POST", "/attempts", new, kind=records.OpenedService)

    async def generate(
        self, attempt: records.OpenedService, ask: records.ServiceRequest
    ) -> records.Answers:
        return await self._of_attempt(attempt, "generate", ask, kind=records.Answers)

    def session(self, attempt: records.OpenedService, agent: str = "") -> AttemptSession:
        return AttemptSession(self._client.base(), attempt.keys[agent])

    async def remote(
        self, attempt: records.OpenedService, images: ImageCollector
    ) -> RemoteConversations | None:
        if not self._program.remote_models:
            return None
        name = next(iter(attempt.names.values()))
        seed = derive_seed(self._seed, name)
        return RemoteConversations(self._program.remote_models, name=name, seed=seed, images=images)

    @property
    def remote_agents(self) -> Mapping[str, str]:
        return self._program.remote_agents

    async def settle(self, attempt: records.OpenedService) -> records.Settled:
        return await self._of_attempt(attempt, "settle", {}, kind=records.Settled)

    async def end(self, attempt: records.OpenedService) -> records.EndedAttempts:
        return await self._of_attempt(attempt, "end", {}, kind=records.EndedAttempts)

    async def _of_attempt(
        self, attempt: records.OpenedService, what: str, body: Any, *, kind: type[T]
    ) -> T:
        path = f"{self._path}/attempts/{attempt.handle}/{what}"
        try:
            return await self._client.request("POST", path, body, kind=kind)
        except (
            records.ModelNotOpenError
        ) as error:  # its server was restarted, so the attempt is gone
            raise records.UnknownAttemptError(str(error)) from error

    async def train(self, groups: Sequence[Group]) -> records.TrainedSubmission:
        submitted = records.Submitted(groups=list(groups))
        while True:
            named = await self._ask("POST", "/steps", submitted, kind=wire.CreatedId)
            try:
                path = f"{self._path}/steps/{named.id}"
                return await self._client.request("GET", path, kind=records.TrainedSubmission)
            except records.ModelNotOpenError:
                continue  # its server was restarted, and may not have trained on it

    async def save(self) -> None:
        await self._ask("POST", "/save", {}, kind=dict)

    async def checkpoints(self) -> list[records.Checkpoint]:
        return await self._ask("GET", "/checkpoints", kind=list[records.Checkpoint])

    async def fetch(self, checkpoint: records.Checkpoint, name: str, to: Path) -> None:
        url = f"{wire.PREFIX}{self._path}/checkpoints/{checkpoint.step}/{quote(name)}"
        try:
            async with self._client.http.stream("GET", url) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise _failure(answer)
                with to.open("wb") as file:
                    async for piece in answer.aiter_raw():
                        await in_thread(file.write, piece)
        except httpx.TransportError as error:
            raise EngineUnavailableError(
                f"{name} of the checkpoint of step {checkpoint.step} was not received completely "
                f"({type(error).__name__}): fetch it again"
            ) from error
