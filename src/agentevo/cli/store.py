"""`agentevo store`: counts, moves and tidies up what a store holds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from agentevo.cli.arguments import Overwrite, Wait, check_new_file, refuse_options
from agentevo.cli.printing import print_table
from agentevo.errors import ConfigError, UnknownNameError
from agentevo.runtime.credentials import refuse_password
from agentevo.runtime.progress import bar

if TYPE_CHECKING:
    from agentevo.store import Store

T = TypeVar("T")

STORE_TIMEOUT_S = 3600.0
"""Deadline of one call that reads, moves or tidies up a whole store. No call waits so long for
a database that is away: see `use_store`."""
ACTIONS = ("stats", "migrate", "gc", "retry", "export", "import")


def store(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="URL|RUN_DIR",
            help="A store such as sqlite:///PATH or postgresql://..., or the folder of a run.",
        ),
    ],
    action: Annotated[
        str,
        typer.Argument(
            metavar="[stats|migrate|gc|retry|export|import]",
            help="stats (the default) counts tasks, trajectories, turns and steps by state. "
            "migrate upgrades the store to this version's schema, atomically; training does so by "
            "itself, and commands that only read do not. gc queues tasks whose lease expired an "
            "hour ago, deletes orphaned rows, and frees disk space. retry queues failed and poison "
            "tasks again, after you fixed their cause. export writes tasks, trajectories, steps "
            "and their states to a file; import reads such a file into a store of any kind, whose "
            "existing rows do not change.",
        ),
    ] = "stats",
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE.jsonl[.gz]]",
            help="The file of export or import, one row per line.",
        ),
    ] = None,
    dropped: Annotated[
        bool,
        typer.Option(
            "--dropped",
            help="With gc: also delete the turns of dropped trajectories that no resume needs; "
            "their records stay.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    wait: Wait = None,
) -> None:
    """Count what a store holds, upgrade it, clean it up, or copy it to or from a file."""
    if action not in ACTIONS:
        order = ", after the store's URL or folder" if target in ACTIONS else ""
        raise UnknownNameError(f"store {action[:40]}: there are {', '.join(ACTIONS)}{order}")
    if (action in ("export", "import")) != (file is not None):
        raise ConfigError(
            f"store {target} {action}: "
            + ("name the file: FILE.jsonl[.gz]" if file is None else f"leave out {file}")
        )
    if action != "gc":
        refuse_options(context, "is for gc: leave it out", ("dropped",))
    if action != "export":
        refuse_options(context, "is for export: leave it out", ("overwrite",))

    if action == "stats":
        _print_stats(target, wait)
    elif action == "migrate":
        steps = _with_store(target, lambda store: store.counts(), wait)["steps"]
        print(f"the store has this version's schema: {steps:,} step{'s' * (steps != 1)}")
    elif action == "gc":
        _collect_garbage(target, wait, dropped=dropped)
    elif action == "retry":
        count = _with_store(target, lambda store: store.queue_again(), wait)
        print(f"{count:,} task{'s' * (count != 1)} queued again")
    elif file is not None and action == "export":
        _export(target, file, wait, overwrite=overwrite)
    elif file is not None:
        _import(target, file, wait)


def _with_store(
    target: str,
    work: Callable[[Store], Awaitable[T]],
    wait_s: float | None,
    *,
    create: bool = False,
    read_only: bool = False,
) -> T:
    from agentevo.runs.folder.run_folder import run_store_url, use_store

    url = refuse_password(target) if "://" in target else run_store_url(Path(target))
    return use_store(
        url,
        work,
        create=create,
        timeout_s=STORE_TIMEOUT_S,
        wait_s=wait_s,
        read_only=read_only,
    )


def _print_stats(target: str, wait: float | None) -> None:
    async def work(store: Store) -> tuple[dict[str, int], int]:
        counts = await store.counts() | {"calls": await store.num_calls()}
        counts["images"] = len(await store.image_digests())
        return counts, await store.size_bytes()

    counts, size = _with_store(target, work, wait, read_only=True)
    print_table((name, f"{count:,}") for name, count in counts.items() if count or "/" not in name)
    print_table([("size", f"{size / 1e6:,.1f} MB")])


def _collect_garbage(target: str, wait: float | None, *, dropped: bool) -> None:
    with bar("store gc"):
        done = _with_store(target, lambda store: store.gc(dropped=dropped), wait)

    print_table(
        [
            ("leases queued again", f"{done['leases']:,}"),
            ("orphans deleted", f"{done['orphans']:,}"),
            ("dropped trajectories emptied", f"{done['tokens']:,}"),
            ("calls deleted", f"{done['calls']:,}"),
            ("images deleted", f"{done['images']:,}"),
            ("given back", f"{done['bytes'] / 1e6:,.1f} MB"),
        ]
    )


def _export(target: str, out: Path, wait: float | None, *, overwrite: bool) -> None:
    from agentevo.store import export_store

    check_new_file(out, overwrite=overwrite)
    count = _with_store(target, lambda store: export_store(store, out), wait, read_only=True)
    print(f"{count:,} row{'s' * (count != 1)} written to {out}")


def _import(target: str, source: Path, wait: float | None) -> None:
    from agentevo.store import check_export, import_store

    if not source.is_file():
        raise ConfigError(
            f"{source}: no such file: give one that `agentevo store ... export` wrote"
        )
    check_export(source)  # before a store is made
    count = _with_store(target, lambda store: import_store(store, source), wait, create=True)
    print(f"{count:,} new rows in {target}")
