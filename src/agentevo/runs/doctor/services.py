"""Checks of the servers that a recipe needs in addition to the policy: its tools, its remote
models, and the database that a run would write its attempts to (`store.url`).

The checks open each entry of `agent.tools` for the first task, as an attempt does, and list its
tools without calling them. They ask the server of each remote model for its list of models.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress

from agentevo.agents.tools.toolbox import Toolbox
from agentevo.config import RunConfig
from agentevo.config.remote_models import RemoteModelSection
from agentevo.config.tools import ToolSection
from agentevo.errors import AgentEvoError, ConfigError, NoStoreError
from agentevo.inference.remote_models.served import check_served, served_models
from agentevo.models.files.resolve import missing_model
from agentevo.rollout.given_tasks import read_tasks
from agentevo.runs.doctor.checks import Check
from agentevo.runs.folder.run_folder import is_run_folder, run_store_url
from agentevo.runs.folder.shared_store import content_of
from agentevo.runs.folder.store_opening import open_run_store
from agentevo.runtime.credentials import is_same_place, without_password
from agentevo.runtime.event_loop import in_thread, run_coroutine
from agentevo.types import Task

MAX_NAMES = 8
"""The maximum number of names in a finding."""
OPENING_S = 600.0
"""The time limit of one entry in seconds, regardless of its own limits."""
ANSWER_S = 30.0
"""The time limit in seconds for a server that should already be running."""


def check_services(config: RunConfig) -> list[Check]:
    """Checks all entries of `agent.tools` and all remote models concurrently."""
    sections = getattr(config.agent, "tools", ())
    if not sections and not config.remote_models:
        return []
    return run_coroutine(_check_all(config, sections))


def has_problem(checks: list[Check]) -> bool:
    """Whether a check failed, so that no attempt could succeed."""
    return any(check.status == "wrong" for check in checks)


async def _check_all(config: RunConfig, sections: tuple[ToolSection, ...]) -> list[Check]:
    task = _first_task(config)
    model_checks = [_check_model(name, section) for name, section in config.remote_models.items()]
    opened, models = await asyncio.gather(
        asyncio.gather(*(_open_toolset(_limit_start(section), task) for section in sections)),
        asyncio.gather(*model_checks),
    )
    return [
        *(check for check, _ in opened),
        *_collisions([names for _, names in opened]),
        *models,
    ]


def _limit_start(section: ToolSection) -> ToolSection:
    """The entry, with at most ANSWER_S to start if a server already runs at its URL. An entry with
    an `image` may start its server, so it keeps its own limit."""
    limit_s = getattr(section, "start_timeout_s", None)
    if limit_s is None or not getattr(section, "url", None) or getattr(section, "image", None):
        return section
    return section.model_copy(update={"start_timeout_s": min(limit_s, ANSWER_S)})


def _first_task(config: RunConfig) -> Task:
    """The task for which tools are opened. Another check reports unreadable tasks."""
    with suppress(AgentEvoError):
        if config.tasks.train and (tasks := read_tasks(config.tasks, config.agent).train):
            return tasks[0]
    return Task(id="doctor")


def _title(section: ToolSection) -> str:
    name = getattr(section, "name", None) or getattr(section, "file", None) or ""
    return f"tools {name}".strip()


async def _open_toolset(section: ToolSection, task: Task) -> tuple[Check, list[str]]:
    """The check of one entry, and the names of its tools."""
    title = _title(section)
    started = time.monotonic()
    try:
        toolbox = Toolbox([section])
        try:
            async with asyncio.timeout(OPENING_S), toolbox.open(task, seed=0) as tools:
                names = [schema["function"]["name"] for schema in tools.schemas]
        finally:
            await toolbox.close()
    except TimeoutError:
        return Check(title, "wrong", f"not opened within {OPENING_S:g} s"), []
    except ConfigError as error:
        return Check(title, "wrong", str(error)), []
    except Exception as error:  # noqa: BLE001 (a tool class may raise anything)
        finding = str(error) if isinstance(error, AgentEvoError) else repr(error)
        advice = "start the server, and inspect it with `agentevo tools inspect`"
        is_server = section.type != "function"  # type: ignore[attr-defined]
        return Check(title, "wrong", finding, advice if is_server else ""), []

    duration_s = time.monotonic() - started
    finding = f"{len(names)} tools in {duration_s:.1f} s: {_list_names(names)}"
    return Check(title, "good", finding), names


def _collisions(names_by_entry: list[list[str]]) -> list[Check]:
    counts = Counter(name for names in names_by_entry for name in names)
    repeated = [name for name, count in counts.items() if count > 1]
    if not repeated:
        return []

    return [
        Check(
            "names of tools",
            "warning",
            f"several entries have {_list_names(repeated)}: the policy sees each as ENTRY__NAME",
            "exclude the tools that the policy does not need, with `exclude`",
        )
    ]


async def _check_model(name: str, section: RemoteModelSection) -> Check:
    title = f"remote model {name}"
    if section.api == "engine":
        missing = missing_model(section.model)
        return Check(title, "wrong" if missing else "good", missing or "computed in each process")

    try:
        served = await in_thread(served_models, name, section)
        await in_thread(check_served, name, section)
    except ConfigError as error:
        return Check(title, "wrong", str(error))

    if served is None:
        finding = f"the server at {section.url} answers, but does not list its models"
        return Check(title, "warning", finding)

    return Check(title, "good", f"{section.url} serves {section.model}")


def _list_names(names: list[str]) -> str:
    omitted = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return (", ".join(names[:MAX_NAMES]) or "none") + omitted


def check_store_server(config: RunConfig) -> list[Check]:
    """A check of the recipe's database; none if the store is a file. Creates nothing, but a store
    of an older version gets the schema of this version, as in a run."""
    url = config.store.url
    if url is None or url.startswith("sqlite:"):
        return []
    return [run_coroutine(_check_store(config, url))]


async def _check_store(config: RunConfig, url: str) -> Check:
    started_at = time.monotonic()
    where = without_password(url)
    try:
        async with await open_run_store(
            url, timeout_s=ANSWER_S, within_s=ANSWER_S, create=False, notify=lambda message: None
        ) as store:
            content = await content_of(store)
    except NoStoreError:
        content = ""
    except AgentEvoError as error:
        return Check("store", "wrong", f"{where}: {error}")

    took = time.monotonic() - started_at
    if not content:
        return Check("store", "good", f"{where} answers in {took:.1f} s, and holds no run yet")
    if is_run_folder(config.run_dir) and is_same_place(run_store_url(config.run_dir), url):
        return Check("store", "good", f"{where} answers in {took:.1f} s: {content} of this run")

    return Check(
        "store",
        "warning",
        f"{where} holds {content} of another run, so a new run is refused",
        "give another ?schema=NAME or database, or resume that run with --resume",
    )
