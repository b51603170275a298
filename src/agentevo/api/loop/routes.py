"""The routes of a server for programs' loops (wire.py), at the port of its gateway.

    GET  /loop/v1/models                               the models
    POST /loop/v1/models/NAME                          open or resume
    GET  /loop/v1/models/NAME                          its state
    POST /loop/v1/models/NAME/close | save
    POST /loop/v1/models/NAME/groups                   the id of a new group
    POST /loop/v1/models/NAME/attempts                 begin one
    POST /loop/v1/models/NAME/attempts/H/generate | settle | end
    POST /loop/v1/models/NAME/steps                    groups for a step; its submission's id
    GET  /loop/v1/models/NAME/steps/ID                 its result
    GET  /loop/v1/models/NAME/checkpoints              the existing ones
    GET  /loop/v1/models/NAME/checkpoints/STEP/FILE    one file of one

They are open to the server's key. Work that takes long is answered with 202 in time, and the client
asks again. Every request may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fastapi import Request, Response
from starlette.responses import FileResponse

from agentevo.agents.gateway.body import json_response, read_body
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.routes import Caller, GatewayRoute, Routes
from agentevo.api.loop import wire
from agentevo.api.loop.encoding import decode, encode
from agentevo.api.loop.records import NewAttempt, ServiceRequest, Submitted
from agentevo.api.loop.service import CLOSE_S, LoopService
from agentevo.data.images import LIMITS
from agentevo.errors import EngineUnavailableError
from agentevo.inference.serving.secret import RunSecret
from agentevo.runtime.event_loop import in_thread

if TYPE_CHECKING:
    from agentevo.api.loop.server import LoopServer

T = TypeVar("T")

MAX_BODY = 16 * 2**20 + 4 * LIMITS.max_bytes
"""Longest body, in bytes: three of the largest images in base64, which makes them a third longer,
and 16 MiB of messages. A client sends each image of an attempt once."""
MAX_GROUPS = 1024 * 2**20
"""Longest body of groups to train on, in bytes."""
GROUPS_S = 600.0
"""Longest time for a body of groups to train on to arrive."""
QUICK_S = 60.0
"""The time limit of requests that do not wait for the engine or the trainer."""


class _Call(NamedTuple):
    """A route whose answer comes from a model's run."""

    method: str
    path: str
    """Below the model's."""
    work: Callable[[LoopService, Mapping[str, str], Any], Awaitable[Any]]
    """From the run, the names in the path and the body to the answer."""
    body: type[Any] | None = None
    is_long: bool = False
    """Whether it waits for the engine, the trainer or other attempts; then the client may have to
    ask again."""


async def _new_group(
    service: LoopService, names: Mapping[str, str], new: wire.NewGroup
) -> wire.CreatedId:
    return wire.CreatedId(id=await service.group(new.task_id, greedy=new.greedy))


_CALLS = (
    _Call("GET", "", lambda run, names, body: run.state()),
    _Call("POST", "/groups", _new_group, wire.NewGroup),
    _Call(
        "POST",
        "/attempts",
        lambda run, names, new: run.attempts.open(new, has_session=True, within_s=wire.WAIT_S),
        NewAttempt,
        is_long=True,
    ),
    _Call(
        "POST",
        "/attempts/{handle}/generate",
        lambda run, names, ask: run.attempts.generate(names["handle"], ask),
        ServiceRequest,
        is_long=True,
    ),
    _Call(
        "POST",
        "/attempts/{handle}/settle",
        lambda run, names, body: run.attempts.settle(names["handle"]),
    ),
    _Call(
        "POST", "/attempts/{handle}/end", lambda run, names, body: run.attempts.end(names["handle"])
    ),
    _Call(
        "GET",
        "/steps/{submission}",
        lambda run, names, body: run.wait_for_training(names["submission"]),
        is_long=True,
    ),
    _Call("GET", "/checkpoints", lambda run, names, body: run.checkpoints()),
)


class LoopRoutes(Routes):
    """See the module and agents/gateway/routes.py."""

    prefixes = (wire.PREFIX,)
    close_s = CLOSE_S

    def __init__(self, server: LoopServer, secret: RunSecret) -> None:
        """`secret` is the server's key."""
        self._server = server
        self._secret = secret

    def table(self) -> Iterator[GatewayRoute]:
        model = wire.PREFIX + "/{name}"
        yield GatewayRoute("GET", wire.PREFIX, self._models)
        yield GatewayRoute("POST", model, self._open)
        yield GatewayRoute("POST", f"{model}/close", self._close)
        yield GatewayRoute("POST", f"{model}/save", self._save)
        yield GatewayRoute("POST", f"{model}/steps", self._submit)
        yield GatewayRoute("GET", f"{model}/checkpoints/{{step}}/{{file:path}}", self._file)
        for call in _CALLS:
            yield GatewayRoute(call.method, model + call.path, partial(self._call, call))

    async def find_caller(self, key: str, path: str) -> Caller | None:
        return Caller() if await in_thread(self._secret.matches_header, f"Bearer {key}") else None

    def refuse_stranger(self) -> Refusal:
        message = "the key is missing or wrong: it is in the file that the server printed"
        return Refusal(message, status=401, kind="authentication_error")

    def failure_response(self, request: Request, error: Exception) -> Response:
        if type(error) is TimeoutError:
            return Response(status_code=wire.NOT_READY_STATUS)
        status, failure = wire.failure_of(error)
        return json_response(failure, status)

    async def close(self) -> None:
        await self._server.close()

    async def _models(self, request: Request) -> Response:
        return json_response(await in_thread(self._server.models))

    async def _open(self, request: Request) -> Response:
        server = self._server
        name = request.path_params["name"]
        opened = await _read(request, wire.OpenModel)
        digest = encode(opened).decode()
        await server.job((name, "open", digest), lambda: server.open(name, opened.sections))
        return await self._call(_CALLS[0], request)

    async def _close(self, request: Request) -> Response:
        server = self._server
        name = request.path_params["name"]
        await server.job((name, "close"), lambda: server.close_model(name))
        return json_response({})

    async def _save(self, request: Request) -> Response:
        run = self._run(request)
        key = (request.path_params["name"], "save")
        await self._server.job(key, lambda: run.call(run.save()))
        return json_response({})

    async def _submit(self, request: Request) -> Response:
        run = self._run(request)
        content = await read_body(request, MAX_GROUPS, of="of a submission", within_s=GROUPS_S)
        submitted = await in_thread(decode, content, Submitted)
        return json_response(wire.CreatedId(id=await run.call(run.submit(submitted.groups))))

    async def _file(self, request: Request) -> Response:
        run = self._run(request)
        step = request.path_params["step"]
        number = int(step) if step.isdecimal() and len(step) < 10 else -1
        file = request.path_params["file"]
        return FileResponse(await in_thread(run.checkpoint_file, number, file))

    async def _call(self, call: _Call, request: Request) -> Response:
        run = self._run(request)
        body = None if call.body is None else await _read(request, call.body)

        async def work() -> Any:
            return await call.work(run, request.path_params, body)

        if call.is_long:
            async with asyncio.timeout(wire.WAIT_S):
                return json_response(await run.call(work()))

        try:
            async with asyncio.timeout(QUICK_S):
                return json_response(await run.call(work()))
        except TimeoutError as error:
            raise EngineUnavailableError(f"the run did not answer within {QUICK_S:g} s") from error

    def _run(self, request: Request) -> LoopService:
        return self._server.service(request.path_params["name"])


async def _read(request: Request, kind: type[T]) -> T:
    """The body as such a record."""
    return decode(await read_body(request, MAX_BODY, of="of a request"), kind)
