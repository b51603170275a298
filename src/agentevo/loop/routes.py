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
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from starlette.responses import FileResponse

from agentevo.errors import EngineUnavailableError
from agentevo.event_loop import in_thread
from agentevo.gateway.body import json_response, read_body
from agentevo.gateway.refusals import Refusal
from agentevo.gateway.routes import Caller, GatewayRoute, Routes
from agentevo.inference.secret import RunSecret
from agentevo.loop.encoding import decode, encode
from agentevo.loop.records import NewAttempt, ServiceRequest, Submitted
from agentevo.loop.service import CLOSE_S, LoopService
from agentevo.loop.wire import (
    ASK_AGAIN,
    PREFIX,
    WAIT_S,
    Named,
    NewGroup,
    OpenModel,
    failure_of,
)

if TYPE_CHECKING:
    from agentevo.loop.server import LoopServer

MAX_BODY = 16 * 2**20
"""Longest body, in bytes."""
MAX_GROUPS = 1024 * 2**20
"""Longest body of groups to train on, in bytes."""
GROUPS_S = 600.0
"""Longest time for a body of groups to train on to arrive."""
QUICK_S = 60.0
"""The time limit of requests that do not wait for the engine or the trainer."""


class LoopRoutes(Routes):
    """See the module and gateway/routes.py."""

    prefixes = (PREFIX,)
    close_s = CLOSE_S

    def __init__(self, server: LoopServer, secret: RunSecret) -> None:
        """`secret` is the server's key."""
        self._server = server
        self._secret = secret

    def table(self) -> Iterator[GatewayRoute]:
        model = PREFIX + "/{name}"
        attempt = model + "/attempts/{handle}"
        for method, path, handler in (
            ("GET", PREFIX, self._models),
            ("POST", model, self._open),
            ("GET", model, self._state),
            ("POST", f"{model}/close", self._close),
            ("POST", f"{model}/save", self._save),
            ("POST", f"{model}/groups", self._new_group),
            ("POST", f"{model}/attempts", self._begin),
            ("POST", f"{attempt}/generate", self._generate),
            ("POST", f"{attempt}/settle", self._settle),
            ("POST", f"{attempt}/end", self._end),
            ("POST", f"{model}/steps", self._submit),
            ("GET", f"{model}/steps/{{submission}}", self._wait_for_step),
            ("GET", f"{model}/checkpoints", self._checkpoints),
            ("GET", f"{model}/checkpoints/{{step}}/{{file:path}}", self._checkpoint_file),
        ):
            yield GatewayRoute(method, path, handler)

    async def find_caller(self, key: str, path: str) -> Caller | None:
        return Caller() if await in_thread(self._secret.is_in, f"Bearer {key}") else None

    def refuse_stranger(self) -> Refusal:
        message = "the key is missing or wrong: it is in the file that the server printed"
        return Refusal(message, status=401, kind="authentication_error")

    def failure_response(self, request: Request, error: Exception) -> Response:
        if type(error) is TimeoutError:
            return Response(status_code=ASK_AGAIN)
        status, failure = failure_of(error)
        return json_response(failure, status)

    async def close(self) -> None:
        await self._server.close()

    async def _models(self, request: Request) -> Response:
        return json_response(await in_thread(self._server.models))

    async def _open(self, request: Request) -> Response:
        server = self._server
        name = request.path_params["name"]
        opened = decode(await _body(request), OpenModel)
        digest = encode(opened).decode()
        await server.job((name, "open", digest), lambda: server.open(name, opened.sections))
        return await self._state(request)

    async def _state(self, request: Request) -> Response:
        service = self._service(request)
        return json_response(await _quick(service.call(service.state())))

    async def _close(self, request: Request) -> Response:
        server = self._server
        name = request.path_params["name"]
        await server.job((name, "close"), lambda: server.close_model(name))
        return json_response({})

    async def _save(self, request: Request) -> Response:
        service = self._service(request)
        key = (request.path_params["name"], "save")
        await self._server.job(key, lambda: service.call(service.save()))
        return json_response({})

    async def _new_group(self, request: Request) -> Response:
        new = decode(await _body(request), NewGroup)
        service = self._service(request)
        group = await _quick(service.call(service.group(new.task_id, greedy=new.greedy)))
        return json_response(Named(id=group))

    async def _begin(self, request: Request) -> Response:
        service = self._service(request)
        new = decode(await _body(request), NewAttempt)
        opening = service.attempts.open(new, has_session=True, within_s=WAIT_S)
        return json_response(await service.call(opening))

    async def _generate(self, request: Request) -> Response:
        service = self._service(request)
        ask = decode(await _body(request), ServiceRequest)
        handle = request.path_params["handle"]
        async with asyncio.timeout(WAIT_S):
            return json_response(await service.call(service.attempts.generate(handle, ask)))

    async def _settle(self, request: Request) -> Response:
        service = self._service(request)
        settling = service.attempts.settle(request.path_params["handle"])
        return json_response(await _quick(service.call(settling)))

    async def _end(self, request: Request) -> Response:
        service = self._service(request)
        ending = service.attempts.end(request.path_params["handle"])
        return json_response(await _quick(service.call(ending)))

    async def _submit(self, request: Request) -> Response:
        service = self._service(request)
        content = await read_body(request, MAX_GROUPS, of="of a submission", within_s=GROUPS_S)
        submitted = await in_thread(decode, content, Submitted)
        return json_response(Named(id=await service.call(service.submit(submitted.groups))))

    async def _wait_for_step(self, request: Request) -> Response:
        service = self._service(request)
        submission = request.path_params["submission"]
        async with asyncio.timeout(WAIT_S):
            return json_response(await service.call(service.wait_for_training(submission)))

    async def _checkpoints(self, request: Request) -> Response:
        service = self._service(request)
        return json_response(await _quick(service.call(service.checkpoints())))

    async def _checkpoint_file(self, request: Request) -> Response:
        service = self._service(request)
        step = request.path_params["step"]
        number = int(step) if step.isdecimal() and len(step) < 10 else -1
        file = request.path_params["file"]
        return FileResponse(await in_thread(service.checkpoint_file, number, file))

    def _service(self, request: Request) -> LoopService:
        return self._server.service(request.path_params["name"])


async def _quick(work: Awaitable[Any]) -> Any:
    """Work that the run does at once, unless it hangs."""
    try:
        async with asyncio.timeout(QUICK_S):
            return await work
    except TimeoutError as error:
        raise EngineUnavailableError(f"the run did not answer within {QUICK_S:g} s") from error


async def _body(request: Request) -> bytes:
    return await read_body(request, MAX_BODY, of="of a request")
