"""The commands that show what a run's agent did, turn by turn, and export it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import Overwrite, RunDir, Wait, path_word, refuse_options
from agentevo.cli.trajectory_export import export
from agentevo.errors import ConfigError, UnknownNameError
from agentevo.runtime.progress import bar

if TYPE_CHECKING:
    from agentevo.store import Store, TrajectorySummary
    from agentevo.types import Trajectory

PAGE_OPTIONS = ("step", "every", "per_step", "out", "overwrite")
MOST = 1_000_000_000
"""A number that every store can hold."""
MAX_LISTED = 40
"""The most ids with the same beginning that an error names."""

trajectories = typer.Typer(no_args_is_help=True, help="Show and export the attempts of a run.")


trajectories.command("export")(export)


@trajectories.command("show")
def show(
    context: typer.Context,
    run_dir: RunDir,
    trajectory_id: Annotated[
        str, typer.Argument(metavar="[ID]", help="The id or a prefix of it.")
    ] = "",
    best: Annotated[
        bool,
        typer.Option("--best", help="Choose the highest reward (the newest of equals)."),
    ] = False,
    worst: Annotated[
        bool,
        typer.Option("--worst", help="Choose the lowest reward (the newest of equals)."),
    ] = False,
    last: Annotated[
        bool,
        typer.Option("--last", help="Choose the newest (the default)."),
    ] = False,
    html: Annotated[
        bool,
        typer.Option(
            "--html",
            help="Instead, write attempts as HTML files with an index: "
            "FOLDER/step_N/trajectory_ID.html.",
        ),
    ] = False,
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=-MOST, max=MOST, help="With --html: only the attempts of this step."
        ),
    ] = None,
    every: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=MOST, help="With --html: only every Nth step, and the last one."
        ),
    ] = 4,
    per_step: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=MOST, help="With --html: the most attempts of a step."
        ),
    ] = 32,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path_word,
            metavar="FOLDER",
            help="With --html: the folder for the pages. Default: trajectories_html in the run's "
            "folder.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    files: Annotated[
        Path | None,
        typer.Option(
            "--files",
            parser=path_word,
            metavar="FOLDER",
            help="Also write the attempt's files into this new folder.",
        ),
    ] = None,
    wait: Wait = None,
) -> None:
    """Print one trajectory turn by turn: each token with its log-prob, and the agent's files. Or
    write many as HTML pages (--html)."""
    if html:
        if trajectory_id:
            raise ConfigError(f"{trajectory_id}: --html writes many attempts: leave the ID out")
        reason = "chooses one attempt, and --html writes many: leave it out"
        refuse_options(context, reason, ("best", "worst", "last", "files"))
        _write_pages(run_dir, step, every, per_step, out, wait, overwrite=overwrite)
        return

    refuse_options(context, "is for HTML pages: add --html", PAGE_OPTIONS)
    if files is not None and files.exists():
        raise ConfigError(f"--files {files}: is there already: give a new folder")
    if sum([bool(trajectory_id), best, worst, last]) > 1:
        raise ConfigError("trajectories show: give an ID or one of --best, --worst, --last")

    from rich.console import Console

    from agentevo.observability import render_trajectory
    from agentevo.runs.folder.run_folder import read_store, token_texts

    async def work(store: Store) -> tuple[Trajectory, str]:
        summaries = await store.summaries()
        which = "best" if best else "worst" if worst else "last"
        name = _choose(summaries, trajectory_id, which, run_dir)
        step = next(summary.trained_step for summary in summaries if summary.id == name)
        return await store.trajectory(name), await _credit_of(store, step)

    trajectory, credit = read_store(run_dir, work, wait_s=wait)
    decode = token_texts(run_dir) or (lambda token: f"<{token}>")
    Console().print(render_trajectory(trajectory, decode, credit))

    if files is not None:
        _write_files(trajectory, files)


def _write_pages(
    run_dir: Path,
    step: int | None,
    every: int,
    per_step: int,
    out: Path | None,
    wait: float | None,
    *,
    overwrite: bool,
) -> None:
    from agentevo.observability.trajectory_pages import INDEX, check_folder, choose, write_pages
    from agentevo.runs.folder.run_folder import check_run_folder, read_store, token_texts

    check_run_folder(run_dir)
    folder = out if out is not None else run_dir / "trajectories_html"
    check_folder(folder, overwrite=overwrite)
    decode = token_texts(run_dir)

    async def work(store: Store) -> int:
        chosen = await choose(store, step=step, every=every, per_step=per_step)
        if not chosen:
            of = "" if step is None else f" of step {step}"
            raise ConfigError(f"{run_dir}: the store holds no trajectory{of} yet")

        total = sum(len(chosen_step.attempts) for chosen_step in chosen)
        with bar("trajectories show --html", total, "pages") as progress:
            return await write_pages(
                store, chosen, folder, run=run_dir.name, decode=decode, advance=progress.advance
            )

    count = read_store(run_dir, work, wait_s=wait)
    print(f"{count} pages written: {folder / INDEX}")


def _write_files(trajectory: Trajectory, folder: Path) -> None:
    from agentevo.store.files import write_files

    try:
        write_files(trajectory.files, folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--files {folder}: can't be written: {error}") from error
    print(f"{len(trajectory.files)} files written to {folder}")


async def _credit_of(store: Store, step: int | None) -> str:
    """What decided how much its turns were worth when it was trained on, in words; empty if it was
    not."""
    from agentevo.training.batching.step_plan import KEY

    records = await store.steps(after=step - 1) if step else []
    rules = [record.record.get(KEY, {}).get("credit") for record in records if record.step == step]
    return f"trained in step {step}, credit: {rules[0]}" if rules and rules[0] else ""


def _choose(
    summaries: Sequence[TrajectorySummary], trajectory_id: str, which: str, run_dir: Path
) -> str:
    if trajectory_id:
        names = [summary.id for summary in summaries]
        matches = [name for name in names if name.startswith(trajectory_id)]
        if trajectory_id in names or len(matches) == 1:
            return trajectory_id if trajectory_id in names else matches[0]
        raise UnknownNameError(
            f"{run_dir}: {len(matches)} ids begin with {trajectory_id!r}: give more of one:\n"
            + "\n".join(matches[:MAX_LISTED])
            if matches
            else f"{run_dir}: no trajectory is called {trajectory_id!r}: `agentevo trajectories "
            f"show {run_dir}` shows the newest"
        )

    finished = [summary for summary in summaries if summary.status == "completed"] or list(
        summaries
    )
    if not finished:
        raise ConfigError(f"{run_dir}: the store holds no trajectory yet")

    sign = {"best": 1.0, "worst": -1.0, "last": 0.0}[which]
    return max(enumerate(finished), key=lambda pair: (sign * pair[1].reward, pair[0]))[1].id
