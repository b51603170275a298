"""The commands that show what a run's agent did, turn by turn, and what it does now."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import RunDir, Wait, path_word, seconds
from agentevo.cli.trajectory_export import export
from agentevo.errors import ConfigError, UnknownNameError
from agentevo.progress import bar

if TYPE_CHECKING:
    from agentevo.store import Store, TrajectorySummary
    from agentevo.types import Trajectory

MAX_LISTED = 40
"""The most ids that a list of ids with the same beginning names."""

SHORTEST_LOOK_S = 0.1
MOST = 1_000_000_000
"""A number that every store can hold."""

trajectories = typer.Typer(
    no_args_is_help=True, help="Show, watch and export the attempts of a run."
)


@trajectories.command("html")
def html(
    run_dir: RunDir,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=-MOST, max=MOST, help="Only the attempts of this step."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path_word,
            metavar="FOLDER",
            help="The folder for the pages. Default: trajectories_html in the run's folder.",
        ),
    ] = None,
    every: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=MOST, help="Only every Nth step, and the last one."),
    ] = 4,
    per_step: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST, help="The most attempts of a step.")
    ] = 32,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Allow a folder that is not empty.")
    ] = False,
    wait: Wait = None,
) -> None:
    """Write attempts as HTML files with an index: FOLDER/step_N/trajectory_ID.html."""
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

        total = sum(len(chosen_step.attempts) for chosen_step in chosen)
        with bar("trajectories html", total, "pages") as progress:
            return await write_pages(
                store, chosen, folder, run=run_dir.name, decode=decode, advance=progress.advance
            )

    count = read_store(run_dir, work, wait_s=wait)
    print(f"{count} pages written: {folder / INDEX}")


trajectories.command("export")(export)


@trajectories.command("show")
def show(
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
    """Print one trajectory turn by turn: each token with its log-prob, and the agent's files."""
    if files is not None and files.exists():
        raise ConfigError(f"--files {files}: is there already: give a new folder")
    if sum([bool(trajectory_id), best, worst, last]) > 1:
        raise ConfigError("trajectories show: give an ID or one of --best, --worst, --last")

    from rich.console import Console

    from agentevo.observability import render_trajectory
    from agentevo.runs.folder import read_store, token_texts

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
        return _only_match([summary.id for summary in summaries], trajectory_id, run_dir)

    finished = [summary for summary in summaries if summary.status == "completed"] or list(
        summaries
    )
    if not finished:
        raise ConfigError(f"{run_dir}: the store holds no trajectory yet")

    sign = {"best": 1.0, "worst": -1.0, "last": 0.0}[which]
    return max(enumerate(finished), key=lambda pair: (sign * pair[1].reward, pair[0]))[1].id


def _only_match(names: Iterable[str], prefix: str, run_dir: Path) -> str:
    """The name that equals `prefix`, or the only one that begins with it."""
    matches = _matches(names, prefix)
    if len(matches) == 1:
        return matches[0]

    if matches:
        shown = "\n".join(_some(matches))
        raise UnknownNameError(
            f"{run_dir}: {len(matches)} ids begin with {prefix!r}: give more of one:\n{shown}"
        )

    raise UnknownNameError(
        f"{run_dir}: no trajectory is called {prefix!r}: `agentevo trajectories show {run_dir}` "
        "shows the newest"
    )


def _matches(names: Iterable[str], prefix: str) -> list[str]:
    """The name that equals `prefix`, or all names that begin with it."""
    names = list(names)
    return [prefix] if prefix in names else [name for name in names if name.startswith(prefix)]


def _some(names: Sequence[str]) -> list[str]:
    rest = len(names) - MAX_LISTED
    return [*names[:MAX_LISTED], *([f"and {rest} more"] if rest > 0 else [])]


@trajectories.command("watch")
def watch(
    run_dir: RunDir,
    trajectory_id: Annotated[
        str,
        typer.Argument(
            metavar="[ID]", help="Show the calls of this attempt: its id or a prefix of it."
        ),
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    every_s: Annotated[
        float,
        typer.Option(
            "--every",
            metavar="SECONDS",
            parser=seconds,
            help="Seconds between updates, at least 0.1.",
        ),
    ] = 1.0,
    wait: Wait = None,
) -> None:
    """Watch the running attempts: their duration and their current call. With an ID, watch the call
    tree of one attempt."""
    from agentevo.runs.folder import read_store

    async def look(store: Store) -> tuple[list[str], bool]:
        if trajectory_id:
            return await _attempt_picture(store, trajectory_id, run_dir)
        return await _running_picture(store)

    shown: list[str] = []
    with suppress(KeyboardInterrupt):
        while True:
            lines, goes_on = read_store(run_dir, look, wait_s=wait)
            if lines != shown:
                _print_picture(lines)
                shown = lines
            if once or not goes_on:
                return
            time.sleep(max(every_s, SHORTEST_LOOK_S))


async def _running_picture(store: Store) -> tuple[list[str], bool]:
    from agentevo.observability.call_view import running_lines

    calls = [stored async for stored in store.calls(state="running")]
    lines = running_lines(calls, time.time())
    return lines or ["nothing is running"], True


async def _attempt_picture(
    store: Store, trajectory_id: str, run_dir: Path
) -> tuple[list[str], bool]:
    """The tree of calls, and whether it may still grow."""
    from agentevo.observability.call_view import tree_lines

    calls = [stored async for stored in store.calls(trajectory_id=trajectory_id)]
    if not calls:
        running = {stored.call.trajectory_id async for stored in store.calls(state="running")}
        names = running | {summary.id for summary in await store.summaries()}
        matches = _matches(
            sorted(names, key=lambda name: (name not in running, name)), trajectory_id
        )
        if len(matches) > 1:
            title = f"{len(matches)} attempts begin with {trajectory_id!r}, those that run first:"
            return [title, *_some(matches)], False

        trajectory_id = _only_match(names, trajectory_id, run_dir)
        calls = [stored async for stored in store.calls(trajectory_id=trajectory_id)]

    lines = tree_lines(calls, time.time()) or ["no calls were recorded of this attempt"]
    goes_on = any(stored.state == "running" for stored in calls)
    return [trajectory_id, *lines], goes_on


def _print_picture(lines: Sequence[str]) -> None:
    """Prints the picture: on a terminal in place of the one before, elsewhere below it, with the
    time."""
    if sys.stdout.isatty():
        print("\x1b[2J\x1b[H", end="")
    print(time.strftime("%H:%M:%S"))
    print("\n".join(lines), flush=True)
