"""The command that shows runs in a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentevo.cli.arguments import seconds
from agentevo.errors import AgentEvoError

if TYPE_CHECKING:
    from agentevo.runs.folder.run_state import RunReader, RunView
    from agentevo.store import Store

MIN_POLL_INTERVAL_S = 0.2
MOST_STORES = 20
"""Runs under way whose store is asked at each look."""
HEAD = ("run", "state", "step", "reward", "success", "tok/s", "stale", "playing", "failed", "warns")
SHOWN_WARNINGS = 3
MAX_NAME_CHARS = 40
SPEEDS = ("perf/throughput", "perf/tokens_per_s_logical", "engine/tokens_per_s")
"""Metrics of the speed, the first that a run has."""


def top(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUNS]...",
            help="Folders of runs or sweeps, or their parent folders. Default: runs.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    every_s: Annotated[
        float,
        typer.Option(
            "--every",
            metavar="SECONDS",
            parser=seconds,
            help="Seconds between updates, at least 0.2.",
        ),
    ] = 2.0,
) -> None:
    """Watch runs in the terminal: state, step, reward, success, speed, failures, and what each
    running attempt waits for. Ctrl-C ends it."""
    runs_now = _Looks(runs or [])
    is_terminal = sys.stdout.isatty() and not once
    shown: list[ShownRun] | None = None
    with suppress(KeyboardInterrupt):
        while True:
            lines = runs_now()
            if is_terminal or lines != shown:
                text = _table(lines) if lines else ["no run yet"]
                if is_terminal:
                    print("\x1b[2J\x1b[H", end="")
                    text = text[: shutil.get_terminal_size().lines - 2]
                if not once:
                    print(time.strftime("%H:%M:%S"))
                print("\n".join(text), flush=True)
                shown = lines

            if once:
                return
            time.sleep(max(every_s, MIN_POLL_INTERVAL_S))


@dataclass(frozen=True)
class ShownRun:
    """What is shown of a run: its row of the table, and lines about it."""

    cells: tuple[str, ...]
    problems: list[str]
    activity: list[str] = field(compare=False)
    """What the run's process does, and its running attempts."""


class _Looks:
    """Reads the runs again at every call, newest first, those under way before all others."""

    def __init__(self, words: Sequence[str]) -> None:
        from agentevo.runs.folder.sources import Sources

        self._sources = Sources(words, stores=False)
        self._sources.check()
        self._readers: dict[str, RunReader] = {}

    def __call__(self) -> list[ShownRun]:
        from agentevo.runs.folder.run_state import RunReader

        sources = {key: run for key, run in self._sources.runs().items() if run.folder is not None}
        for key, source in sources.items():
            reader = self._readers.setdefault(key, RunReader(source))
            reader.read()

        views = [self._readers[key].view for key in sources]
        views.sort(key=lambda view: (view.state != "running", -(view.changed_at or 0.0), view.name))
        is_only_run = len(views) == 1  # its samplers may play while its trainer is stopped
        queried_keys = {
            view.key for view in views[:MOST_STORES] if is_only_run or view.state == "running"
        }
        return [_shown_run(view, ask=view.key in queried_keys) for view in views]


def _shown_run(view: RunView, *, ask: bool) -> ShownRun:
    from agentevo.observability.trajectory_view import visible

    table = view.table
    failed = [table.latest(name) for name in table.columns if name.startswith("rollout/failed/")]
    speeds = [speed for name in SPEEDS if (speed := table.latest(name)) is not None]
    calls, warnings = _of_store(view) if ask else (None, ())
    warnings = tuple(map(str, view.summary.get("warnings") or warnings))
    name = visible(view.label)[:MAX_NAME_CHARS]
    cells = (
        name,
        view.badge,
        str(view.step) if view.planned is None else f"{view.step}/{view.planned}",
        _number(table.latest("critic/score/mean"), "{:.3f}"),
        _number(table.latest("train/success"), "{:.0%}"),
        _number(speeds[0] if speeds else None, "{:,.0f}"),
        _number(table.latest("staleness/mean"), "{:.1f}"),
        _number(None if calls is None else len(calls), "{:d}"),
        _number(sum(value or 0.0 for value in failed) if failed else None, "{:.0f}"),
        str(len(warnings)) if warnings else "-",
    )
    problems = [text for text in (view.reason, view.problem) if text]
    doing = None if view.is_silent else view.doing
    activity = [] if doing is None else [visible(doing.words())]
    return ShownRun(
        cells,
        [f"{name}: ! {visible(text)}" for text in [*problems, *warnings[-SHOWN_WARNINGS:]]],
        [f"{name}: {line}" for line in [*activity, *(calls or [])]],
    )


def _of_store(view: RunView) -> tuple[list[str] | None, tuple[str, ...]]:
    """What the run plays, and the warnings of its newest step; (None, ()) if its store is away."""
    from agentevo.observability.call_view import running_lines
    from agentevo.runs.folder.run_folder import read_store

    async def read(store: Store) -> tuple[list[str], tuple[str, ...]]:
        calls = [stored async for stored in store.calls(state="running")]
        newest = await store.last_step()
        progress: Any = newest.record.get("progress") if newest is not None else None
        warnings = progress.get("warnings") if isinstance(progress, dict) else ()
        return running_lines(calls, time.time()), tuple(warnings or ())

    try:
        assert view.source.folder is not None
        return read_store(view.source.folder, read, wait_s=0.0)
    except (AgentEvoError, OSError):
        return None, ()


def _table(runs: Sequence[ShownRun]) -> list[str]:
    """The table, and below it the problems and the activity of each run."""
    rows = [HEAD, *(run.cells for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return lines + [line for run in runs for line in [*run.activity, *run.problems]]


def _number(value: float | int | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
