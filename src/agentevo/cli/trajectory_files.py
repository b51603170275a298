"""`agentevo trajectories html`: attempts of a run as pages that are files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import RunDir, Wait, path_word
from agentevo.errors import ConfigError
from agentevo.progress import bar

if TYPE_CHECKING:
    from agentevo.store import Store

MOST = 1_000_000_000
"""A number that every store can hold."""


def html(
    run_dir: RunDir,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=-MOST, max=MOST, help="The attempts of this step alone."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path_word,
            metavar="FOLDER",
            help="Where the pages go. Default: trajectories_html in the run's folder.",
        ),
    ] = None,
    every: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=MOST, help="Every so many steps; the last one always."
        ),
    ] = 4,
    per_step: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST, help="Most attempts of a step.")
    ] = 32,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into a folder that has other things, too.")
    ] = False,
    wait: Wait = None,
) -> None:
    """Write a page for each of some attempts, FOLDER/step_N/trajectory_ID.html, and an index: files
    that need no server."""
    from agentevo.observability.trajectory_pages import INDEX, check_folder, choose, write_pages
    from agentevo.runs.folder import check_run_folder, read_store, token_texts

    check_run_folder(run_dir)
    folder = out if out is not None else run_dir / "trajectories_html"
    check_folder(folder, overwrite=overwrite)
    decode = token_texts(run_dir)

    async def work(store: Store) -> int:
        chosen = await choose(store, step=step, every=every, per_step=per_step)
        if not chosen:
            of = "" if step is None else f" of step {step}"
            raise ConfigError(f"{run_dir}: the store holds no trajectory{of} yet")

        total = sum(len(one.attempts) for one in chosen)
        with bar("trajectories html", total, "pages") as progress:
            return await write_pages(
                store, chosen, folder, run=run_dir.name, decode=decode, advance=progress.advance
            )

    count = read_store(run_dir, work, wait_s=wait)
    print(f"{count} pages written: {folder / INDEX}")
