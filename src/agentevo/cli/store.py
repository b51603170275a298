"""The commands `agentevo store ...`, which count, move and tidy up what a store holds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from agentevo.cli.arguments import Overwrite, Wait, check_new_file, path_word
from agentevo.cli.table import print_table
from agentevo.credentials import refuse_password
from agentevo.errors import ConfigError
from agentevo.progress import bar

if TYPE_CHECKING:
    from agentevo.store import Store

T = TypeVar("T")

stores = typer.Typer(no_args_is_help=True, help="Inspect, move and clean up a store.")

StoreOf = Annotated[
    str,
    typer.Argument(
        metavar="URL|RUN_DIR",
        help="A store such as sqlite:///PATH or postgresql://..., or the folder of a run.",
    ),
]
STORE_TIMEOUT_S = 3600.0
"""Deadline of one call that reads, moves or tidies up a whole store. No call waits so long for
a database that is away: see `use_store`."""


def _with_store(
    target: str,
    work: Callable[[Store], Awaitable[T]],
    wait_s: float | None,
    *,
    create: bool = False,
    read_only: bool = False,
) -> T:
    from agentevo.runs.folder import run_store_url, use_store

    url = refuse_password(target) if "://" in target else run_store_url(Path(target))
    return use_store(
        url,
        work,
        create=create,
        timeout_s=STORE_TIMEOUT_S,
        wait_s=wait_s,
        read_only=read_only,
    )


@stores.command("stats")
def store_stats(target: StoreOf, wait: Wait = None) -> None:
    """Count tasks, trajectories, turns and steps by state."""

    async def work(store: Store) -> tuple[dict[str, int], int]:
        counts = await store.counts() | {"calls": await store.num_calls()}
        return counts, await store.size_bytes()

    counts, size = _with_store(target, work, wait, read_only=True)
    print_table((name, f"{count:,}") for name, count in counts.items() if count or "/" not in name)
    print_table([("size", f"{size / 1e6:,.1f} MB")])


@stores.command("migrate")
def store_migrate(target: StoreOf, wait: Wait = None) -> None:
    """Upgrade a store to this version's schema, atomically. Training upgrades automatically;
    commands that only read, such as `agentevo ui`, do not."""

    async def work(store: Store) -> int:
        return (await store.counts())["steps"]

    steps = _with_store(target, work, wait)
    print(f"the store has this version's schema: {steps:,} step{'s' * (steps != 1)}")


@stores.command("gc")
def store_gc(
    target: StoreOf,
    dropped: Annotated[
        bool,
        typer.Option(
            "--dropped",
            help="Also delete the turns of dropped trajectories that no resume needs; their "
            "records stay.",
        ),
    ] = False,
    wait: Wait = None,
) -> None:
    """Queue tasks whose lease expired an hour ago, delete orphaned rows, and free disk space."""
    with bar("store gc"):
        done = _with_store(target, lambda store: store.gc(dropped=dropped), wait)

    print_table(
        [
            ("leases queued again", f"{done['leases']:,}"),
            ("orphans deleted", f"{done['orphans']:,}"),
            ("dropped trajectories emptied", f"{done['tokens']:,}"),
            ("calls deleted", f"{done['calls']:,}"),
            ("given back", f"{done['bytes'] / 1e6:,.1f} MB"),
        ]
    )


@stores.command("retry")
def store_retry(target: StoreOf, wait: Wait = None) -> None:
    """Queue failed and poison tasks again, after you fixed their cause."""
    count = _with_store(target, lambda store: store.queue_again(), wait)
    print(f"{count:,} task{'s' * (count != 1)} queued again")


@stores.command("export")
def store_export(
    target: StoreOf,
    out: Annotated[
        Path,
        typer.Argument(
            parser=path_word, metavar="OUT.jsonl[.gz]", help="The file to write, one row per line."
        ),
    ],
    overwrite: Overwrite = False,
    wait: Wait = None,
) -> None:
    """Export a store to a file: tasks, trajectories, steps, and their states."""
    from agentevo.store import export_store

    check_new_file(out, overwrite=overwrite)
    count = _with_store(target, lambda store: export_store(store, out), wait, read_only=True)
    print(f"{count:,} row{'s' * (count != 1)} written to {out}")


@stores.command("import")
def store_import(
    target: StoreOf,
    source: Annotated[
        Path,
        typer.Argument(
            parser=path_word,
            metavar="IN.jsonl[.gz]",
            help="A file of `agentevo store export`.",
        ),
    ],
    wait: Wait = None,
) -> None:
    """Import such a file into a store of any kind. Existing rows do not change."""
    from agentevo.store import check_export, import_store

    if not source.is_file():
        raise ConfigError(f"{source}: no such file: give a file that `agentevo store export` wrote")
    check_export(source)  # before a store is made
    count = _with_store(target, lambda store: import_store(store, source), wait, create=True)
    print(f"{count:,} new rows in {target}")
