"""The command that shows runs in a terminal."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentevo.cli.arguments import path_word, seconds
from agentevo.cli.attempt_ids import matching_names, only_match, shorten_list
from agentevo.errors import AgentEvoError, ConfigError

if TYPE_CHECKING:
    from agentevo.observability.top_view import RunLine
    from agentevo.runs.folder.run_state import RunReader, RunView
    from agentevo.store import Store

MIN_POLL_INTERVAL_S = 0.2
MOST_STORES = 20
"""Runs under way whose store is asked at each look."""
KEYS = {"j": 1, "\x1b[B": 1, "k": -1, "\x1b[A": -1}
"""Key -> how far the choice moves."""
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)


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
    attempt: Annotated[
        str,
        typer.Option(
            "--attempt",
            metavar="ID",
            help="Instead, watch the calls of this attempt of one run, until it ends: its id or a "
            "prefix of it.",
        ),
    ] = "",
) -> None:
    """Watch runs in the terminal: state, step, reward, success, speed, failures. Press j and k to
    choose a run, Enter for its attempts."""
    if attempt:
        if len(runs or []) != 1:
            raise ConfigError("--attempt is an attempt of one run: give one folder of a run")
        _watch_attempt(
            path_word((runs or [""])[0]), attempt, max(every_s, MIN_POLL_INTERVAL_S), once
        )
        return

    look = _Looks(runs or [])
    every_s = max(every_s, MIN_POLL_INTERVAL_S)
    if once:
        _print(look())
        return

    from agentevo.runtime.console import open_console

    console = open_console(sys.stdout, None)
    with suppress(KeyboardInterrupt):
        if console is None or not sys.stdin.isatty():
            _follow_plainly(look, every_s)
        else:
            _follow(look, every_s, console)


def _watch_attempt(run_dir: Path, trajectory_id: str, every_s: float, once: bool) -> None:
    from agentevo.runs.folder.run_folder import read_store

    async def look(store: Store) -> tuple[list[str], bool]:
        return await _attempt_picture(store, trajectory_id, run_dir)

    shown: list[str] = []
    with suppress(KeyboardInterrupt):
        while True:
            lines, goes_on = read_store(run_dir, look)
            if lines != shown:
                if sys.stdout.isatty():
                    print("\x1b[2J\x1b[H", end="")
                print(time.strftime("%H:%M:%S"))
                print("\n".join(lines), flush=True)
                shown = lines
            if once or not goes_on:
                return
            time.sleep(every_s)


async def _attempt_picture(
    store: Store, trajectory_id: str, run_dir: Path
) -> tuple[list[str], bool]:
    """The tree of calls, and whether it may still grow."""
    from agentevo.observability.call_view import tree_lines

    calls = [stored async for stored in store.calls(trajectory_id=trajectory_id)]
    if not calls:
        running = {stored.call.trajectory_id async for stored in store.calls(state="running")}
        names = running | {summary.id for summary in await store.summaries()}
        matches = matching_names(
            sorted(names, key=lambda name: (name not in running, name)), trajectory_id
        )
        if len(matches) > 1:
            title = f"{len(matches)} attempts begin with {trajectory_id!r}, those that run first:"
            return [title, *shorten_list(matches)], False

        trajectory_id = only_match(names, trajectory_id, run_dir)
        calls = [stored async for stored in store.calls(trajectory_id=trajectory_id)]

    lines = tree_lines(calls, time.time()) or ["no calls were recorded of this attempt"]
    goes_on = any(stored.state == "running" for stored in calls)
    return [trajectory_id, *lines], goes_on


class _Looks:
    """Reads the runs again at every call, newest first, those under way before all others."""

    def __init__(self, words: Sequence[str]) -> None:
        from agentevo.runs.folder.sources import Sources

        self._sources = Sources(words, stores=False)
        self._sources.check()
        self._readers: dict[str, RunReader] = {}

    def __call__(self) -> list[RunLine]:
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
        return [_line_of(view, ask=view.key in queried_keys) for view in views]


def _line_of(view: RunView, *, ask: bool) -> RunLine:
    from agentevo.observability.top_view import RunLine

    table = view.table
    failed = [table.latest(name) for name in table.columns if name.startswith("rollout/failed/")]
    calls, warnings = (None, ()) if not ask else _of_store(view)
    speed = next(
        (
            value
            for name in ("perf/throughput", "perf/tokens_per_s_logical", "engine/tokens_per_s")
            if (value := table.latest(name)) is not None
        ),
        None,
    )

    return RunLine(
        name=view.label,
        state=view.badge,
        step=view.step,
        planned=view.planned,
        reward=table.latest("critic/score/mean"),
        success=table.latest("train/success"),
        tokens_per_s=speed,
        staleness=table.latest("staleness/mean"),
        playing=None if calls is None else len(calls),
        failed=sum(value or 0.0 for value in failed) if failed else None,
        rewards=tuple(table.series("critic/score/mean")[1][-20:]),
        warnings=tuple(map(str, view.summary.get("warnings") or warnings)),
        problem=view.problem,
        doing=view.doing.words() if view.doing is not None and not view.is_silent else "",
        reason=view.reason,
        calls=tuple(calls or ()),
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


def _print(lines: Sequence[RunLine]) -> None:
    from agentevo.observability.top_view import plain_lines

    print("\n".join(plain_lines(lines, calls=True)) if lines else "no run yet", flush=True)


def _follow_plainly(look: Callable[[], list[RunLine]], every_s: float) -> None:
    shown: list[RunLine] | None = None
    while True:
        lines = look()
        if lines != shown:
            print(time.strftime("%H:%M:%S"))
            _print(lines)
            shown = lines
        time.sleep(every_s)


def _follow(look: Callable[[], list[RunLine]], every_s: float, console: Any) -> None:
    from rich.live import Live

    from agentevo.observability.top_view import draw

    chosen = 0
    calls = False
    lines = look()
    with _keys() as next_key, Live(console=console, screen=True, auto_refresh=False) as live:
        looked = time.monotonic()
        while True:
            chosen = max(0, min(chosen, len(lines) - 1))
            size = {"height": console.height, "width": console.width}
            live.update(draw(lines, chosen, calls=calls, **size), refresh=True)

            key = next_key(max(looked + every_s - time.monotonic(), 0.0))
            if key in ("q", "\x03", "\x04"):
                return

            if key in ("\n", "\r"):
                calls = not calls
            elif key == "\x1b":
                calls = False

            chosen += KEYS.get(key, 0)
            if time.monotonic() - looked >= every_s:
                name = lines[chosen].name if 0 <= chosen < len(lines) else ""
                lines = look()
                looked = time.monotonic()
                names = [line.name for line in lines]
                chosen = names.index(name) if name in names else chosen


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for a key, so many seconds at most; "" where none came. The terminal is
    left as it was."""
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    waiting: list[str] = []

    def next_key(within_s: float) -> str:
        if not waiting and select.select([number], [], [], within_s)[0]:
            read = os.read(number, 64).decode("utf-8", "replace")
            waiting.extend(_KEY.findall(read) or ["q"])  # nothing: the terminal is gone
        return waiting.pop(0) if waiting else ""

    try:
        tty.setcbreak(number)
        yield next_key
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
