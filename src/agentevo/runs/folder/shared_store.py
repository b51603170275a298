"""A store outside of the run's folder (`store.url`) holds a single run, as the folder does."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

from agentevo.config import RunConfig
from agentevo.errors import ConfigError, NoStoreError
from agentevo.runs.folder.chain import is_given_up
from agentevo.runs.folder.run_folder import is_run_folder, run_store_url
from agentevo.runs.folder.store_opening import open_run_store
from agentevo.runtime.credentials import is_same_place
from agentevo.store.store import Store

CLEAR_TIMEOUT_S = 600.0


def check_store(config: RunConfig, *, may_create: bool = True) -> None:
    """Raises ConfigError for a store with the data of another run that may not be cleared. Without
    `may_create`, the database stays as it is, and need not exist."""
    with nullcontext() if may_create else suppress(NoStoreError):
        _prepare(config, clear=False, read_only=not may_create)


def prepare_store(config: RunConfig) -> None:
    """Ensures an empty store for a new run. With run.overwrite, and if the run in the folder was
    abandoned, also deletes that run's data in the store. Raises the errors of `check_store`, and
    then changes nothing."""
    _prepare(config, clear=True)


def _prepare(config: RunConfig, *, clear: bool, read_only: bool = False) -> None:
    url = config.store.url
    if url is None:  # the store is in the folder, and is deleted with it
        return

    overwritten = (
        (config.run.overwrite or is_given_up(config.run_dir))
        and is_run_folder(config.run_dir)
        and is_same_place(run_store_url(config.run_dir), url)
    )

    async def work() -> None:
        async with await open_run_store(
            url, timeout_s=CLEAR_TIMEOUT_S, read_only=read_only
        ) as store:
            content = await content_of(store)
            if content and not overwritten:
                raise ConfigError(
                    f"store.url: the store holds {content} of another run: give another file, "
                    "?schema=NAME or database, resume that run with "
                    "--resume, or delete it by run.overwrite=true with its own run.dir"
                )

            if content and clear:
                await store.clear()

    # a thread also works while a loop is running, as in a notebook
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(asyncio.run, work()).result()


async def content_of(store: Store) -> str:
    """Describes the data of a run in the store. Empty for an empty store."""
    counts = await store.counts()
    rows = {
        kind: sum(n for name, n in counts.items() if name.startswith(kind))
        for kind in ("tasks", "trajectories", "steps")
    }
    return ", ".join(f"{count} {kind}" for kind, count in rows.items() if count)
