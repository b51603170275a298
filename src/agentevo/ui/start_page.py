"""`/start`: a recipe, started as a process of its own, and what it prints."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from starlette.responses import Response

from agentevo.config.sources import recipe_names
from agentevo.errors import ConfigError
from agentevo.event_loop import in_thread
from agentevo.runs.folder import is_run_folder
from agentevo.ui import starting
from agentevo.ui.changes import WRITE_S, ask_again, changes, see
from agentevo.ui.context import NotFoundError, dashboard, page, visitor

router = APIRouter()


def _root(request: Request) -> Path | None:
    """The first shown folder that may hold runs."""
    folders = dashboard(request).sources.folders
    return next((folder for folder in folders if not is_run_folder(folder)), None)


@router.get("/start", response_class=HTMLResponse)
async def form(request: Request) -> HTMLResponse:
    """The form, and what was started before."""
    return await _page(request, {"command": "train", "recipe": "", "overrides": "", "name": ""}, "")


async def _page(request: Request, given: dict[str, str], refused: str) -> HTMLResponse:
    root = _root(request)
    async with asyncio.timeout(WRITE_S):
        # What was started is told, as what it printed is, to whoever may start something.
        may = visitor(request).may_change
        known = await in_thread(starting.started, root) if root is not None and may else []
        alive = await in_thread(lambda: [one for one in known if starting.is_alive(one)])

    return page(
        request,
        "start.html",
        given=given,
        refused=refused,
        status=422 if refused else 200,
        recipes=recipe_names(),
        commands=starting.COMMANDS,
        root=root,
        started=[] if root is None else [(starting.name_of(root, one), one) for one in known],
        alive={one.id for one in alive},
    )


@router.post("/start")
async def start(request: Request) -> Response:
    """Starts it, once it is known that the command would take it and that is confirmed."""
    change = changes(request)
    root = _root(request)
    given = {name: change.get(name) for name in ("command", "recipe", "overrides", "name")}
    given["recipe"] = change.get("file").strip() or given["recipe"]
    folders = dashboard(request).sources.folders
    try:
        before = None if root is None else await in_thread(starting.read_start, root, change.id)
        if before is not None:
            return see(f"/start/{change.id}")  # sent twice

        wanted = await in_thread(
            lambda: starting.wanted_from(
                folders, given["command"], given["recipe"], given["overrides"], given["name"]
            )
        )
        if not change.is_sure:
            config = await _checked(wanted)
            return ask_again(
                request,
                change,
                f"Start {given['name']}?",
                f"This starts `agentevo {shlex.join(wanted.words())}`.",
                back="/start",
                do="Start it",
                whole=("Its whole configuration", config),
                more={"config": starting.digest(config)},
            )

        async def begin() -> str:
            assert root is not None
            if starting.digest(await _checked(wanted)) != change.get("config"):
                raise ConfigError("the recipe is another one by now than was shown: check it again")

            who = change.visitor.who
            address = change.visitor.address
            async with asyncio.timeout(WRITE_S):
                return await dashboard(request).priority.ordinarily(
                    lambda: starting.start(root, wanted, id=change.id, who=who, address=address)
                )

        return see(f"/start/{await change.once(begin)}")
    except ConfigError as error:
        return await _page(request, given, str(error))


async def _checked(wanted: starting.Wanted) -> str:
    """The configuration. Raises ConfigError."""
    async with asyncio.timeout(starting.CHECK_S + 2 * starting.BUSY_S):
        return await in_thread(starting.check, wanted)


@router.get("/start/{id}", response_class=HTMLResponse)
async def started(request: Request, id: str) -> HTMLResponse:
    """What one of them prints."""
    root = _root(request)
    one = None if root is None else await in_thread(starting.read_start, root, id)
    if root is None or one is None:
        raise NotFoundError("Nothing of that name was started here.")
    if not visitor(request).may_change:
        raise NotFoundError("What a command printed is for whoever may start one.")

    runs = await in_thread(dashboard(request).sources.runs)
    key = next(
        (run.key for run in runs.values() if run.folder and str(run.folder) == one.wanted.run_dir),
        None,
    )
    return page(
        request,
        "started.html",
        one=one,
        name=starting.name_of(root, one),
        command=shlex.join(one.wanted.words()),
        key=key,
        is_alive=await in_thread(starting.is_alive, one),
        log=await in_thread(starting.log_of, root, id),
    )
