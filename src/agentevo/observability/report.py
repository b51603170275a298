"""`report.html`: one self-contained page about a run, for people who weren't there.

It is made from the run folder's files alone (config.yaml, metrics.jsonl, summary.json, store), so
it can be made again at any time, also of a run that was interrupted and has no summary yet.
Pictures are inside the page; opening it makes no request. The file is replaced in one rename.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentevo.errors import ConfigError
from agentevo.event_loop import in_thread
from agentevo.files import must_write, write_atomic
from agentevo.observability import report_html as html
from agentevo.observability.metrics import MetricsRow, read_metrics
from agentevo.observability.plots import write_plots
from agentevo.observability.profile_table import PROFILE_TABLE
from agentevo.observability.summary import read_summary
from agentevo.observability.trajectory_view import Decode
from agentevo.parsing import ParseError, parse_yaml, read_text
from agentevo.paths import short
from agentevo.types import Trajectory

if TYPE_CHECKING:
    from agentevo.observability.live import LiveView
    from agentevo.store import Store, TrajectorySummary

DEADLINE_S = 300.0
"""How long the end of a run waits for its report."""
AGAIN = "make room there, or make it writable, and make it again with `agentevo report`"


def write_report(
    run_dir: Path | str,
    metrics_rows: Sequence[MetricsRow],
    summary: Mapping[str, Any],
    config_yaml: str,
    trajectories: Sequence[tuple[str, Trajectory]],
    decode: Decode | None = None,
) -> Path:
    """Draws `plots/*.png`, writes `report.html` around them and returns its path.

    `trajectories` are (caption, trajectory) pairs, as `sample_trajectories` picks them. Without
    `decode` tokens are shown as ids.
    """
    run_dir = Path(run_dir)
    with must_write(run_dir / "plots", AGAIN):
        plots = write_plots(metrics_rows, summary, run_dir / "plots")
    curve = [path for path in plots if path.stem in ("learning_curve", "supervised")]
    sections = [
        html.headline(metrics_rows, summary),
        html.pictures("Learning curve", curve),
        html.evaluations(metrics_rows),
        html.rows_of_data(summary),
        html.warnings(summary),
        html.trajectories(trajectories, decode),
        html.pictures(
            "Optimisation, lengths and speed", [path for path in plots if path not in curve]
        ),
        html.rollouts(metrics_rows),
        html.remote_models(summary),
        html.timings(metrics_rows),
        html.profile(run_dir / PROFILE_TABLE),
        html.config(config_yaml),
    ]
    path = run_dir / "report.html"
    title = f"{summary.get('name', run_dir.name)}: AgentEvo report"
    with must_write(path, AGAIN):
        write_atomic(path, html.page(title, sections))
    return path


def report_from_run(run_dir: Path | str, decode: Decode | None = None) -> Path:
    """Makes the report of a finished, running or interrupted run from its folder. Raises
    `ConfigError` if that is no run folder.

    The store is read in an event loop of its own, on another thread, so this may also be called
    where a loop is running (which then waits).
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
        read_summary(summary_path) if summary_path.is_file() else {"name": run_dir.name}
    )
    with ThreadPoolExecutor(1) as thread:
        trajectories = thread.submit(
            asyncio.run, _read_samples(run_dir, (config.get("store") or {}).get("url"))
        ).result()
    return write_report(
        run_dir, read_metrics(run_dir / "metrics.jsonl"), summary, config_yaml, trajectories, decode
    )


async def report_at_end(run_dir: Path, decode: Decode, view: LiveView) -> None:
    """Makes the report of a run that has ended, beside its event loop, and says where it is."""
    view.phase("reporting")
    try:
        async with asyncio.timeout(DEADLINE_S):
            path = await in_thread(report_from_run, run_dir, decode)
    except TimeoutError:
        view.warn(
            f"report.html is not made within {DEADLINE_S:g} s: `agentevo report {short(run_dir)}` "
            "makes it"
        )
    else:
        view.note(f"report: {short(path)}")


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """The text, and what it says. Raises ConfigError."""
    text = read_text(path)
    try:
        config = parse_yaml(text)
    except ParseError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("store") or {}, dict):
        raise ConfigError(f"{path}: is no mapping of sections: restore it")
    url = (config.get("store") or {}).get("url")
    if url is not None and not isinstance(url, str):
        raise ConfigError(f"{path}: store.url: {str(url)[:100]} is not a text: restore the file")
    return text, config


async def _read_samples(run_dir: Path, url: str | None) -> list[tuple[str, Trajectory]]:
    from agentevo.store import open_store

    if url is None and not (run_dir / "store.sqlite").is_file():
        return []
    async with await open_store(
        url or f"sqlite:///{run_dir / 'store.sqlite'}", create=False
    ) as store:
        return await sample_trajectories(store)


async def sample_trajectories(store: Store) -> list[tuple[str, Trajectory]]:
    """A few (caption, trajectory) pairs that show what was learned: a typical first attempt, the
    best, a typical and the worst of the last step, and the newest that broke. Held-out attempts are
    preferred to training ones; the same store gives the same choice."""
    summaries = [summary for summary in await store.summaries() if summary.split != "doctor"]
    finished = [summary for summary in summaries if summary.status == "completed"]
    if any(summary.split == "eval" for summary in finished):
        finished = [summary for summary in finished if summary.split == "eval"]
    chosen: dict[str, str] = {}
    if finished:
        steps = sorted({summary.step for summary in finished})
        last = sorted(
            (summary for summary in finished if summary.step == steps[-1]), key=_by_reward
        )
        if len(steps) > 1:
            first = sorted(
                (summary for summary in finished if summary.step == steps[0]), key=_by_reward
            )
            chosen[first[len(first) // 2].id] = f"A typical attempt at step {steps[0]}"
        for place, which in ((-1, "Best"), (len(last) // 2, "A typical"), (0, "Worst")):
            chosen.setdefault(last[place].id, f"{which} attempt at step {steps[-1]}")
    broken = [summary for summary in summaries if summary.status == "failed"]
    if broken:
        chosen[broken[-1].id] = f"Newest failed attempt (step {broken[-1].step})"
    return [
        (caption, await store.trajectory(trajectory_id))
        for trajectory_id, caption in chosen.items()
    ]


def _by_reward(summary: TrajectorySummary) -> tuple[float, str]:
    return summary.reward, summary.id
