"""A run in one line: its state, its steps and its held-out results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentevo.errors import AgentEvoError
from agentevo.observability.current_activity import LATE_HEARTBEAT_S, NOW, Moment, read_moment
from agentevo.observability.summary import read_summary
from agentevo.runs.folder.run_folder import finished_summary, is_run_folder


def run_words(folder: Path) -> str:
    """For example `finished, 40 of 40 steps, held-out success 12.5% before, 78.1% after (64 tasks),
    best at step 30`. Never raises an error: the text says what can't be read."""
    if not is_run_folder(folder):
        return "not begun"

    try:
        moment = read_moment(folder / NOW)
        path = folder / "summary.json"
        summary = read_summary(path) if path.is_file() else {}
        state = _state(folder, moment, summary)
    except (AgentEvoError, OSError) as error:
        return f"can't be read ({error})"

    return ", ".join([state, *_steps(moment, summary), *_results(summary)])


def _state(folder: Path, moment: Moment | None, summary: Mapping[str, Any]) -> str:
    if moment is not None and not moment.ended and moment.silent_s() <= LATE_HEARTBEAT_S:
        return f"running ({moment.words()})"
    if finished_summary(folder) is not None:
        early = summary.get("stopped_early")
        return f"finished early ({early})" if early else "finished"
    if moment is not None and moment.ended == "failed":
        return f"failed ({moment.reason})"
    return "stopped" if moment is not None and moment.ended else "interrupted"


def _steps(moment: Moment | None, summary: Mapping[str, Any]) -> list[str]:
    done = max(summary.get("steps", 0), 0 if moment is None else moment.step)
    planned = summary.get("planned_steps") or (None if moment is None else moment.planned)
    return [f"{done} of {planned} steps" if planned else f"{done} steps"]


def _results(summary: Mapping[str, Any]) -> list[str]:
    """Success on held-out tasks, else the loss on held-out conversations."""
    evaluation = summary.get("eval", {})
    words = _before_and_after("success", evaluation, "{:.1%}")
    if words and evaluation.get("n"):
        num = evaluation["n"]
        words = [f"{words[0]} ({num} task{'s' * (num != 1)})"]
    if not words:
        held_out = summary.get("held_out", {})
        losses = {when: held_out.get(when, {}).get("loss") for when in ("before", "after")}
        words = _before_and_after("loss", losses, "{:.4g}")

    if kept := summary.get("kept"):
        gap = f"pass@{kept['attempts']} is {100 * kept['gap']:.1f} points above pass@1"
        return [*words, f"kept step {kept['step']}, where {gap}"]

    best = summary.get("best", {}).get("step")
    return words if best is None else [*words, f"best at step {best:g}"]


def _before_and_after(name: str, values: Mapping[str, Any], pattern: str) -> list[str]:
    shown = [
        f"{pattern.format(values[when])} {when}"
        for when in ("before", "after")
        if values.get(when) is not None
    ]
    return [f"held-out {name} {', '.join(shown)}"] if shown else []
