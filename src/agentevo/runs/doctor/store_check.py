"""Checks the database that a run would write its attempts to (`store.url`).

A store in a file is not checked. The check creates nothing, but a store of an older version gets
the schema of this version, as in a run.
"""

from __future__ import annotations

import time

from agentevo.config import RunConfig
from agentevo.errors import AgentEvoError, NoStoreError
from agentevo.runs.doctor.checks import Check
from agentevo.runs.folder.run_folder import is_run_folder, run_store_url
from agentevo.runs.folder.shared_store import content_of
from agentevo.runs.folder.store_opening import open_run_store
from agentevo.runtime.credentials import is_same_place, without_password
from agentevo.runtime.event_loop import run_coroutine

ANSWER_S = 30.0
"""The time limit in seconds for a database, which should already be running."""
TITLE = "store"


def check_store_server(config: RunConfig) -> list[Check]:
    """A check of the recipe's database; none if the store is a file."""
    url = config.store.url
    if url is None or url.startswith("sqlite:"):
        return []
    return [run_coroutine(_check(config, url))]


async def _check(config: RunConfig, url: str) -> Check:
    started_at = time.monotonic()
    where = without_password(url)
    try:
        async with await open_run_store(
            url, timeout_s=ANSWER_S, within_s=ANSWER_S, create=False, notify=_nobody
        ) as store:
            content = await content_of(store)
    except NoStoreError:
        content = ""
    except AgentEvoError as error:
        return Check(TITLE, "wrong", f"{where}: {error}")

    took = time.monotonic() - started_at
    if not content:
        return Check(TITLE, "good", f"{where} answers in {took:.1f} s, and holds no run yet")
    if is_run_folder(config.run_dir) and is_same_place(run_store_url(config.run_dir), url):
        return Check(TITLE, "good", f"{where} answers in {took:.1f} s: {content} of this run")

    return Check(
        TITLE,
        "warning",
        f"{where} holds {content} of another run, so a new run is refused",
        "give another ?schema=NAME or database, or resume that run with --resume",
    )


def _nobody(message: str) -> None:
    """A failed check with the error as its finding."""
