"""`report.html`: a self-contained page about a run, for readers who did not watch the run.

It needs only the files of the run's folder (config.yaml, metrics.jsonl, summary.json, store). So it
can be written again at any time, even for an interrupted run without a summary. Style, scripts and
charts are inside the page (observability/pages/static_page.py), and opening it makes no request.
The file is replaced in one rename. Only a few attempts are read from the store, however many it
has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from agentevo.errors import ConfigError
from agentevo.observability.metrics import MetricsRow, read_metrics
from agentevo.observability.plots import write_plots
from agentevo.observability.profile_table import PROFILE_TABLE
from agentevo.observability.run_warnings import read_warnings
from agentevo.observability.summary import read_summary
from agentevo.observability.trajectory_view import Decode
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.files import must_write, write_atomic
from agentevo.runtime.parsing import ParseError, parse_yaml, read_text
from agentevo.runtime.paths import short
from agentevo.types import Task, Trajectory

if TYPE_CHECKING:
    from agentevo.observability.live import LiveView
    from agentevo.store import Split, Store, StoredCall, TrajectorySummary

DEADLINE_S = 300.0
"""The deadline of the report at the end of a run, in seconds."""
MAX_ATTEMPTS_OF_STEP = 1_000
NO_CALLS: Mapping[str, Sequence[StoredCall]] = MappingProxyType({})
NO_IMAGES: Mapping[str, Mapping[str, str]] = MappingProxyType({})
NO_TASKS: Mapping[str, Task] = MappingProxyType({})
REMEDY = "make room there, or make it writable, and write it again with `agentevo report`"


def write_report(
    run_dir: Path | str,
    metrics_rows: Sequence[MetricsRow],
    summary: Mapping[str, Any],
    config_yaml: str,
    trajectories: Sequence[tuple[str, Trajectory]],
    decode: Decode | None = None,
    calls: Mapping[str, Sequence[StoredCall]] = NO_CALLS,
    images: Mapping[str, Mapping[str, str]] = NO_IMAGES,
    *,
    tasks: Mapping[str, Task] = NO_TASKS,
) -> Path:
    """Writes `report.html`, draws `plots/*.png` next to it, and returns the page's path.

    `trajectories` are (caption, trajectory) pairs from `sample_trajectories`. `calls` and `images`
    are the calls and the images (see `read_images`) of each by its id, and `tasks` are their tasks
    by id. Without `decode`, tokens are shown as ids.
    """
    from agentevo.observability.report_page import report_html
    from agentevo.observability.static_attempt import still_attempt

    run_dir = Path(run_dir)
    attempts = [
        still_attempt(
            trajectory,
            calls.get(trajectory.id, ()),
            decode,
            caption=caption,
            anchor=f"a{number}-",
            images=images.get(trajectory.id, {}),
            task=tasks.get(trajectory.task_id),
        )
        for number, (caption, trajectory) in enumerate(trajectories)
    ]
    table_file = run_dir / PROFILE_TABLE

    path = run_dir / "report.html"
    page = report_html(
        metrics_rows,
        summary,
        config_yaml,
        attempts,
        profile=read_text(table_file) if table_file.is_file() else "",
        name=run_dir.name,
    )
    with must_write(path, REMEDY):
        write_atomic(path, page)
    with must_write(run_dir / "plots", REMEDY):
        write_plots(metrics_rows, summary, run_dir / "plots")

    return path


def report_from_run(run_dir: Path | str, decode: Decode | None = None) -> Path:
    """Makes the report of a finished, running or interrupted run from its folder. Raises
    `ConfigError` if the folder is not a run's folder.

    The store is read in a separate event loop on another thread. So this can also be called while a
    loop is running, which then waits.
    """
    run_dir = Path(run_dir)
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(
            f"{run_dir} is not the folder of a run (it has no config.yaml): give the one that "
            "`agentevo train` printed, such as runs/NAME"
        )

    config_yaml, config = _read_config(run_dir / "config.yaml")
    summary_path = run_dir / "summary.json"
    summary: dict[str, Any] = (
        read_summary(summary_path)
        if summary_path.is_file()
        else {"name": run_dir.name, "warnings": read_warnings(run_dir)}
    )

    with ThreadPoolExecutor(1) as thread:
        samples = thread.submit(
            asyncio.run, _read_samples(run_dir, (config.get("store") or {}).get("url"))
        ).result()

    rows = read_metrics(run_dir / "metrics.jsonl")
    return write_report(
        run_dir,
        rows,
        summary,
        config_yaml,
        samples.attempts,
        decode,
        samples.calls,
        samples.images,
        tasks=samples.tasks,
    )


async def report_at_end(run_dir: Path, decode: Decode, view: LiveView) -> None:
    """Makes the report of a run that has ended, on a thread, and notes the report's path."""
    view.phase("reporting")
    try:
        async with asyncio.timeout(DEADLINE_S):
            path = await in_thread(report_from_run, run_dir, decode)
    except TimeoutError:
        view.warn(
            f"report.html is not ready within {DEADLINE_S:g} s: `agentevo report {short(run_dir)}` "
            "writes it"
        )
    else:
        view.note(f"report: {short(path)}")


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of config.yaml, and its content. Raises ConfigError."""
    text = read_text(path)
    try:
        config = parse_yaml(text)
    except ParseError as error:
        raise ConfigError(f"{path}: {error}") from error

    if not isinstance(config, dict) or not isinstance(config.get("store") or {}, dict):
        raise ConfigError(f"{path}: is not a mapping of sections: restore it")

    url = (config.get("store") or {}).get("url")
    if url is not None and not isinstance(url, str):
        raise ConfigError(f"{path}: store.url: {str(url)[:100]} is not a text: restore the file")

    return text, config


class _Samples(NamedTuple):
    """The choice of `sample_trajectories`, the calls and the images of each by its id, and their
    tasks by id."""

    attempts: list[tuple[str, Trajectory]]
    calls: dict[str, list[StoredCall]]
    images: dict[str, dict[str, str]]
    tasks: dict[str, Task]


async def _read_samples(run_dir: Path, url: str | None) -> _Samples:
    from agentevo.observability.attempt_view import MAX_CALLS
    from agentevo.observability.static_attempt import read_images, read_task
    from agentevo.store import open_store

    if url is None and not (run_dir / "store.sqlite").is_file():
        return _Samples([], {}, {}, {})

    async with await open_store(
        url or f"sqlite:///{run_dir / 'store.sqlite'}", read_only=True
    ) as store:
        chosen = await sample_trajectories(store)
        calls = {
            trajectory.id: [
                call async for call in store.calls(trajectory_id=trajectory.id, limit=MAX_CALLS)
            ]
            for _, trajectory in chosen
        }
        images = {trajectory.id: await read_images(store, trajectory) for _, trajectory in chosen}
        tasks = [await read_task(store, trajectory) for _, trajectory in chosen]
        return _Samples(chosen, calls, images, {task.id: task for task in tasks if task})


async def sample_trajectories(store: Store) -> list[tuple[str, Trajectory]]:
    """A few (caption, trajectory) pairs that show the progress: a typical first attempt, the best,
    a typical and the worst attempt of the last step, and the newest failed one. Held-out attempts
    are preferred to training ones, and the same store gives the same choice. Only
    MAX_ATTEMPTS_OF_STEP attempts of a step are read, so the cost does not grow with the store."""
    chosen: dict[str, str] = {}
    ends = await _ends(store, "eval") or await _ends(store, "train")
    if ends:
        (first_step, first), (last_step, last) = ends
        if first_step != last_step:
            chosen[first[len(first) // 2].id] = f"A typical attempt at step {first_step}"
        for place, which in ((-1, "Best"), (len(last) // 2, "A typical"), (0, "Worst")):
            chosen.setdefault(last[place].id, f"{which} attempt at step {last_step}")

    for broken in await store.summaries(
        status="failed", newest_first=True, limit=MAX_ATTEMPTS_OF_STEP
    ):
        if broken.split != "doctor":
            chosen[broken.id] = f"Newest failed attempt (step {broken.step})"
            break

    return [
        (caption, await store.trajectory(trajectory_id))
        for trajectory_id, caption in chosen.items()
    ]


async def _ends(store: Store, split: Split) -> list[tuple[int, list[TrajectorySummary]]] | None:
    """The steps of the oldest and of the newest completed attempt of the split, each with its
    attempts by reward. None if there are none."""
    ends = []
    for newest in (False, True):
        end = await store.summaries(split=split, status="completed", limit=1, newest_first=newest)
        if not end:
            return None

        step = end[0].step
        those = await store.summaries(
            split=split, status="completed", step=step, limit=MAX_ATTEMPTS_OF_STEP
        )
        ends.append((step, sorted(those or end, key=_by_reward)))

    return ends


def _by_reward(summary: TrajectorySummary) -> tuple[float, str]:
    return summary.reward, summary.id
