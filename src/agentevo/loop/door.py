"""The routes of a server for programs' loops (wire.py), which take precedence over the gateway's.

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

Every request has the server's key as `Authorization: Bearer KEY`. Work that takes long is answered
with 202 in time, and the client asks again. Every request may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from agentevo.errors import BadRequestError, EngineUnavailableError
from agentevo.event_loop import in_thread
from agentevo.gateway.app import Routes
from agentevo.inference.admission import AdmittedConnection
from agentevo.inference.secret import RunSecret
from agentevo.loop.encoding import decode, encode
from agentevo.loop.records import NewAttempt, ServiceRequest, Submitted
from agentevo.loop.wire import (
    ASK_AGAIN,
    PREFIX,
    WAIT_S,
    Named,
    NewGroup,
    OpenModel,
    WireFailure,
    failure_of,
)

if TYPE_CHECKING:
    from agentevo.loop.server import LoopServer

MAX_BODY = 16 * 2**20
"""Longest body, in bytes."""
MAX_GROUPS = 1024 * 2**20
"""Longest body of groups to train on, in bytes."""
BODY_S = 30.0
"""Longest time for a body to arrive."""
GROUPS_S = 600.0
"""Longest time for a body of groups to train on to arrive."""
QUICK_S = 60.0
"""The time limit of requests that do not wait for the engine or the trainer."""
_JSON = "application/json"


class LoopDoor:
    """See the module."""

    def __init__(self, server: LoopServer, folder: Path, gateway: Routes) -> None:
        """`folder` holds the key."""
        self._server = server
        self.secret = RunSecret(folder)
        self._gateway = gateway

    async def guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application behind the admission of connections (inference/admission.py)."""
        if scope["type"] != "http":
            return

        if not (scope["path"] + "/").startswith(PREFIX + "/"):
            await self._gateway.guard(scope, receive, send)
            return

        connection: AdmittedConnection = scope["state"]["connection"]
        request = Request(scope, receive)
        if not await in_thread(self.secret.matches_header, request.headers.get("authorization")):
            message = "the key is missing or wrong: it is in the file that the server printed"
            response = _failure_response(401, WireFailure(type="ConfigError", message=message))
            await response(scope, receive, send)
            return

        if not connection.admit():
            busy = WireFailure(type="EngineUnavailableError", message="too many connections")
            await _failure_response(503, busy)(scope, receive, send)
            return

        try:
            response = await self._respond(request)
            await response(scope, receive, send)
        except ClientDisconnect:
            return
        finally:
            connection.leave()

    async def _respond(self, request: Request) -> Response:
        """Turns failures into answers; no other code does."""
        path = request.url.path.removeprefix(PREFIX).strip("/")
        parts = path.split("/", 4) if path else []
        try:
            return await self._route(request, request.method, parts)
        except ClientDisconnect:
            raise
        except TimeoutError as error:
            if type(error) is TimeoutError:
                return Response(status_code=ASK_AGAIN)
            return _failure_response(*failure_of(error))
        except Exception as error:  # noqa: BLE001 (whatever it is, the server continues)
            return _failure_response(*failure_of(error))

    async def _route(  # noqa: PLR0911 (a table of routes)
        self, request: Request, method: str, parts: list[str]
    ) -> Response:
        server = self._server
        match (method, *parts):
            case ("GET",):
                return _json(await in_thread(server.models))
            case ("POST", name):
                opened = decode(await _body(request), OpenModel)
                digest = encode(opened).decode()
                await server.job((name, "open", digest), lambda: server.open(name, opened.sections))
                return await self._state(name)
            case ("GET", name):
                return await self._state(name)
            case ("POST", name, "close"):
                await server.job((name, "close"), lambda: server.close_model(name))
                return _json({})
            case ("POST", name, "save"):
                service = server.service(name)
                await server.job((name, "save"), lambda: service.call(service.save()))
                return _json({})
            case ("POST", name, "groups"):
                new = decode(await _body(request), NewGroup)
                service = server.service(name)
                group = await _quick(service.call(service.group(new.task_id, greedy=new.greedy)))
                return _json(Named(id=group))
            case ("POST", name, "attempts", *rest):
                return await self._attempt(request, name, rest)
            case ("POST", name, "steps"):
                service = server.service(name)
                content = await _body(request, MAX_GROUPS, GROUPS_S)
                submitted = await in_thread(decode, content, Submitted)
                return _json(Named(id=await service.call(service.submit(submitted.groups))))
            case ("GET", name, "steps", submission):
                service = server.service(name)
                async with asyncio.timeout(WAIT_S):
                    return _json(await service.call(service.wait_for_training(submission)))
            case ("GET", name, "checkpoints"):
                service = server.service(name)
                return _json(await _quick(service.call(service.checkpoints())))
            case ("GET", name, "checkpoints", step, *rest):
                service = server.service(name)
                file = "/".join(rest)
                number = int(step) if step.isdecimal() and len(step) < 10 else -1
                return FileResponse(await in_thread(service.checkpoint_file, number, file))

        raise BadRequestError(f"nothing is at {method} {request.url.path}")

    async def _state(self, name: str) -> Response:
        service = self._server.service(name)
        return _json(await _quick(service.call(service.state())))

    async def _attempt(self, request: Request, name: str, rest: list[str]) -> Response:
        service = self._server.service(name)
        content = await _body(request)
        match rest:
            case []:
                new = decode(content, NewAttempt)
                opening = service.attempts.open(new, has_session=True, within_s=WAIT_S)
                return _json(await service.call(opening))
            case [handle, "generate"]:
                ask = decode(content, ServiceRequest)
                async with asyncio.timeout(WAIT_S):
                    return _json(await service.call(service.attempts.generate(handle, ask)))
            case [handle, "settle"]:
                return _json(await _quick(service.call(service.attempts.settle(handle))))
            case [handle, "end"]:
                return _json(await _quick(service.call(service.attempts.end(handle))))

        raise BadRequestError(f"nothing is at {request.url.path}")


async def _quick(work: Awaitable[Any]) -> Any:
    """Work that the run does at once, unless it hangs."""
    try:
        async with asyncio.timeout(QUICK_S):
            return await work
    except TimeoutError as error:
        raise EngineUnavailableError(f"the run did not answer within {QUICK_S:g} s") from error


async def _body(request: Request, longest: int = MAX_BODY, within_s: float = BODY_S) -> bytes:
    """The complete body. Raises BadRequestError for one that is too long or too slow."""
    pieces = []
    size = 0
    try:
        async with asyncio.timeout(within_s):
            async for piece in request.stream():
                size += len(piece)
                if size > longest:
                    raise BadRequestError(
                        f"the body is longer than {longest // 2**20} MiB: train on fewer groups "
                        "at once"
                    )
                pieces.append(piece)
    except TimeoutError as error:
        raise BadRequestError(f"the body did not arrive within {within_s:g} s") from error

    return b"".join(pieces)


def _json(record: Any) -> Response:
    return Response(encode(record), media_type=_JSON)


def _failure_response(status: int, failure: WireFailure) -> Response:
    return Response(encode(failure), status, media_type=_JSON)
