"""The results of a search as readable text: a table for the terminal, and report.md."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from agentevo_evolve.prompts.search import Judged

MAX_ROWS = 30


def verdict_of(summary: Mapping[str, Any]) -> str:
    """The result in a sentence."""
    difference = summary["held_out"]["difference"]
    if summary["winner"] == summary["own"]:
        return "the search found nothing better than the agent's own texts, which stay"
    if difference is None:
        return "no held-out task could be compared; the agent's own texts stay"

    interval = f"[{difference['low']:+.3f}, {difference['high']:+.3f}]"
    what = f"{difference['value']:+.3f} {interval} on {difference['tasks']} held-out tasks"
    if summary["better"]:
        return f"better: {what}"
    if difference["low"] > 0:
        return f"not taken: {what}, but more attempts fail with it"

    return f"not shown to be better: {what}; the agent's own texts stay"


def lines_of(summary: Mapping[str, Any]) -> list[str]:
    """The results as lines for the terminal."""
    held_out = summary["held_out"]
    budget = summary["budget"]

    rows = [("own texts", "before", "success_before"), ("found", "after", "success_after")]
    lines = ["held out     reward                   success"]
    for title, reward, success in rows:
        lines.append(
            f"{title:<12} {_estimate(held_out[reward]):<24} {_estimate(held_out[success])}"
        )

    lines.append(verdict_of(summary))
    lines.append(
        f"{summary['method']}: {summary['search']['tried']} texts tried, {budget['attempts']} of "
        f"{budget['of']} attempts, {budget['seconds']:.0f} s; {summary['search']['ended']}"
    )
    if summary["problem"]:
        lines.append(summary["problem"])

    return lines


def report_of(summary: Mapping[str, Any], pool: Sequence[Judged]) -> str:
    """The text of report.md."""
    ranked = sorted(pool, key=lambda judged: judged.rank)
    parts = ["# Texts\n", "```", *lines_of(summary), "```\n", "## What was judged\n"]
    parts += ["| text | reward in the search | from | how |", "|---|---|---|---|"]
    parts += [
        f"| {judged.candidate.id} | {judged.mean:.3f} | {judged.candidate.parent} | "
        f"{_cell(judged.candidate.how)} |"
        for judged in ranked[:MAX_ROWS]
    ]
    if len(ranked) > MAX_ROWS:
        parts.append(f"\n{len(ranked) - MAX_ROWS} more are in log.jsonl.")

    for failure in summary["search"]["writer_failures"]:
        parts.append(f"\nThe writer: {_cell(failure)}")

    for name, text in summary["texts"].items():
        own_text = summary["own_texts"][name]
        diff = "\n".join(
            difflib.unified_diff(
                own_text.split("\n"), text.split("\n"), "own", "found", lineterm=""
            )
        )
        fence = _fence(diff)
        parts += [f"\n## {name}\n", f"{fence}diff", diff or "unchanged", fence]

    return "\n".join(parts) + "\n"


def _fence(content: str) -> str:
    """A fence that is longer than any run of backticks in the content."""
    fence = "```"
    while fence in content:
        fence += "`"
    return fence


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:200]


def _estimate(estimate: Mapping[str, float] | None) -> str:
    return (
        "-"
        if estimate is None
        else f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"
    )
