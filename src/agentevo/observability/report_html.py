"""The sections of `report.html`: pure functions from a run's records to HTML text.

Everything that comes from a run (texts of models and environments above all) passes through
`html.escape`; the page's content security policy allows no scripts and no requests, so a hostile
completion can neither run nor phone home.
"""

from __future__ import annotations

import base64
import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from agentevo.console import format_duration
from agentevo.credentials import without_passwords
from agentevo.observability.curves import held_out, wilson_interval
from agentevo.observability.metrics import (
    Evaluation,
    MetricsRow,
    not_comparable,
    read_evaluations,
)
from agentevo.observability.trajectory_view import (
    LEVELS,
    Decode,
    message_text,
    outcome,
    probability_level,
    prompt_texts,
    remote_facts,
    remote_heading,
    shown_logprobs,
    turn_facts,
    visible,
)
from agentevo.types import RemoteTurn, Trajectory, Turn

SHOWN_TOKENS = 3000
"""Tokens of one trajectory that the page shows; a browser slows down far beyond."""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
CSS = Path(__file__).with_name("report.css").read_text(encoding="utf-8")


def page(title: str, sections: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta '
        f'http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><title>{escape(title)}</title>\n'
        f"<style>\n{CSS}</style></head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body></html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are plain text; they are escaped here."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    rows_html = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{rows_html}</table></div>'


def _number(value: object, otherwise: float | None = None) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else otherwise


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def headline(rows: Sequence[MetricsRow], summary: Mapping[str, Any]) -> str:
    """The headline numbers: what changed, on how many tasks, against whom, at what cost. Numbers
    that the summary lacks are taken from the rows."""
    scores: Mapping[str, Any] = summary.get("eval") or {}
    evaluations = next(iter(held_out(rows).values()), [])
    first = evaluations[0][1] if evaluations else Evaluation(environment="")
    last = evaluations[-1][1] if evaluations else first
    before = _number(scores.get("before"), first.success)
    after = _number(scores.get("after"), last.success)
    cold, number = _number(scores.get("cold_start_before")), _number(scores.get("n"), last.n)
    about = " · ".join(
        escape(str(summary[key])) for key in ("environment", "model", "recipe") if summary.get(key)
    )
    parts = [
        f"<h1>{escape(str(summary.get('name', 'run')))}</h1>",
        f'<div class="soft">{about}</div>',
    ]
    if before is not None and after is not None:
        random = _number(scores.get("random"), last.random)
        optimal = _number(scores.get("optimal"), last.optimal)
        low, high = wilson_interval(after, number) if number else (after, after)
        tasks = f"{number:.0f} held-out tasks" if number else "held-out tasks"
        what = "supervised fine-tuning" if summary.get("command") == "sft" else "RL"
        words = [
            f"success on {tasks} before and after {what}"
            + (f" (95% interval of the latter: {low:.0%} to {high:.0%})" if number else "")
        ]
        words += [f"before the cold start it was {cold:.0%}"] if cold is not None else []
        words += [f"a random player reaches {random:.0%}"] if random is not None else []
        words += [f"an optimal player {optimal:.0%}"] if optimal is not None else []
        parts.append(f'<div class="big"><span class="from">{before:.0%} →</span> {after:.0%}</div>')
        parts.append(f'<div class="soft">{escape("; ".join(words))}.</div>')
        if caveat := not_comparable([first], [last]):
            parts.append(f'<div class="warning">{escape(caveat)}</div>')
        if random is not None and low <= random:
            parts.append('<div class="warning">The result can\'t be told from random play.</div>')
    tokens: Mapping[str, Any] = summary.get("tokens") or {}
    best: Mapping[str, Any] = summary.get("best") or {}
    wall, best_value = _number(summary.get("wall_s")), _number(best.get("value"))
    tiles = [
        (
            "optimizer steps" if summary.get("command") == "sft" else "RL steps",
            f"{summary['steps']}"
            if "steps" in summary
            else f"{max((row['step'] or 0 for row in rows), default=0)}",
        ),
        ("wall time", "" if wall is None else format_duration(wall)),
        ("tokens generated", f"{tokens['generated']:,}" if "generated" in tokens else ""),
        ("tokens trained on", f"{tokens['trained']:,}" if "trained" in tokens else ""),
        ("best evaluation", _best(best_value, best, summary)),
    ]
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span class="soft">{label}</span></div>'
        for label, value in tiles
        if value
    )
    return "\n".join([*parts, f'<div class="tiles">{shown}</div>'])


def _best(value: float | None, best: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """A success rate; of a run without an environment the held-out loss, below 0 so that the best
    is the highest."""
    if value is None:
        return ""
    loss = summary.get("command") == "sft" and not summary.get("environment")
    return f"{f'loss {-value:.3f}' if loss else f'{value:.0%}'} at step {best.get('step')}"


def rows_of_data(summary: Mapping[str, Any]) -> str:
    """The table of what became of the rows of `agentevo sft`, and how well the held-out
    conversations are foretold."""
    kinds: Mapping[str, Any] = summary.get("data") or {}
    if not kinds:
        return ""
    body = [[kind, "used", str(counts["used"]), ""] for kind, counts in kinds.items()]
    body += [
        [kind, reason.replace("_", " "), str(left_out["count"]), ", ".join(left_out["first"])]
        for kind, counts in kinds.items()
        for reason, left_out in counts["left_out"].items()
    ]
    text = "<h2>Rows of data</h2>" + table(
        ["data", "what became of them", "rows", "the first"], body
    )
    held: Mapping[str, Any] = summary.get("held_out") or {}
    if held.get("after"):
        measured = [
            [when, *(f"{held[when][key]:.4g}" for key in held[when])]
            for when in ("before", "after")
            if held.get(when)
        ]
        header = [
            f"{held['conversations']} held-out conversations",
            *(key.replace("_", " ") for key in held["after"]),
        ]
        text += table(header, measured)
    return text


def pictures(heading: str, paths: Sequence[Path]) -> str:
    """The PNG files inside the page itself."""
    if not paths:
        return ""
    images = [
        (path.stem.replace("_", " "), base64.b64encode(path.read_bytes()).decode("ascii"))
        for path in paths
    ]
    return f"<h2>{escape(heading)}</h2>" + "".join(
        f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">' for name, data in images
    )


def evaluations(rows: Sequence[MetricsRow]) -> str:
    """One table per environment: each evaluation of the agent, with the players that give its
    numbers a meaning in the last two columns."""
    parts = []
    for environment, points in held_out(rows).items():
        measured = [
            (row["step"] or 0, result)
            for row in rows
            for result in read_evaluations(row)
            if result.environment == environment
        ]
        some_failed = any(result.failed_greedy or result.failed_sampled for _, result in measured)
        when = [
            f"{step:.0f}" if (step, result) in points else "before the cold start"
            for step, result in measured
        ]
        body = [
            [
                step,
                _percent(result.success_greedy),
                _percent(result.success_sampled),
                "" if result.reward_greedy is None else f"{result.reward_greedy:.3f}",
                "" if result.reward_sampled is None else f"{result.reward_sampled:.3f}",
                _percent(result.random),
                _percent(result.optimal),
                _percent(max(result.failed_greedy or 0.0, result.failed_sampled or 0.0)),
            ][: 8 if some_failed else 7]
            for step, (_, result) in zip(when, measured, strict=True)
        ]
        header = [
            "step",
            "agent greedy",
            "agent sampled",
            "reward greedy",
            "reward sampled",
            "random player",
            "optimal player",
            "failed attempts",
        ][: 8 if some_failed else 7]
        parts.append(f'<p class="soft">{escape(environment)}</p>{table(header, body)}')
    return "<h2>Held-out evaluations</h2>" + "".join(parts) if parts else ""


def warnings(summary: Mapping[str, Any]) -> str:
    boxes = []
    for warning in summary.get("warnings") or []:
        fields = warning if isinstance(warning, dict) else {"message": str(warning)}
        where = f"<b>step {escape(str(fields['step']))}</b> " if "step" in fields else ""
        boxes.append(f'<div class="warning">{where}{escape(str(fields.get("message", "")))}</div>')
    return "<h2>Warnings</h2>" + (
        "".join(boxes) or '<p class="soft">None: no sign of collapse was seen.</p>'
    )


def timings(rows: Sequence[MetricsRow]) -> str:
    """Seconds per part of the step: mean and longest over the steps that had it, and its share of
    the time of all parts."""
    spent: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("timing_s/") and value:
                spent.setdefault(key.removeprefix("timing_s/"), []).append(value)
    if not spent:
        return ""
    whole = sum(sum(values) for name, values in spent.items() if name != "step") or 1.0
    body = []
    for name, values in sorted(spent.items(), key=lambda item: -sum(item[1])):
        share = "" if name == "step" else f"{sum(values) / whole:.1%}"
        body.append(
            [
                name,
                str(len(values)),
                f"{statistics.fmean(values):.3f}",
                f"{max(values):.3f}",
                format_duration(sum(values)),
                share,
            ]
        )
    return "<h2>Step timings</h2>" + table(
        ["part", "times", "mean [s]", "longest [s]", "total", "share"], body
    )


def profile(table_file: Path) -> str:
    """The table of the profile, if there is one."""
    if not table_file.is_file():
        return ""
    return f"<h2>Profile</h2><pre>{escape(table_file.read_text(encoding='utf-8'))}</pre>"


def remote_models(summary: Mapping[str, Any]) -> str:
    """What each role has asked of each remote model, and what is left of the budgets."""
    asked: Sequence[Mapping[str, Any]] = (summary.get("remote_models") or {}).get("asked") or ()
    if not asked:
        return ""
    body = [
        [
            row["model"],
            row["role"],
            f"{row['answers']:,}",
            f"{row['from_cache']:,}",
            f"{row['failed_requests']:,}",
            f"{row['tokens']:,}",
            f"{row['cost']:.4g}",
        ]
        for row in asked
    ]
    text = "<h2>Remote models</h2>" + table(
        ["model", "asked by", "answers", "from the cache", "failed requests", "tokens", "cost"],
        body,
    )
    left = [
        f"{name}: " + ", ".join(f"{value:,.4g} {what}" for what, value in budget.items())
        for name, budget in summary["remote_models"]["budget_left"].items()
    ]
    return text + (f"<p>Left of the budgets: {escape('; '.join(left))}.</p>" if left else "")


def rollouts(rows: Sequence[MetricsRow]) -> str:
    """How many trajectories came in over the whole run, and why some were not trained on."""
    total = sum(row.get("rollout/in") or 0.0 for row in rows)
    if not total:
        return ""
    reasons: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("rollout/dropped/"):
                reasons[key.removeprefix("rollout/dropped/")] = reasons.get(
                    key.removeprefix("rollout/dropped/"), 0.0
                ) + (value or 0.0)
    dropped = sorted(((count, reason) for reason, count in reasons.items() if count), reverse=True)
    body = [
        [
            "trained on",
            f"{total - sum(count for count, _ in dropped):,.0f}",
            f"{1 - sum(count for count, _ in dropped) / total:.1%}",
        ]
    ]
    body += [
        [f"dropped: {reason.replace('_', '-')}", f"{count:,.0f}", f"{count / total:.1%}"]
        for count, reason in dropped
    ]
    return f"<h2>Trajectories</h2><p>{total:,.0f} came in.</p>" + table(
        ["what became of them", "number", "share"], body
    )


def trajectories(shown: Sequence[tuple[str, Trajectory]], decode: Decode | None) -> str:
    """(caption, trajectory) pairs, turn by turn; the first one is open."""
    if not shown:
        return ""
    key = "".join(
        f'<span class="t p{level}">{name} (from {lowest:g})</span>'
        for level, (lowest, name) in enumerate(LEVELS)
    )
    how = "Hover over a token for its id, log-prob and policy version."
    if decode is None:
        how += " Tokens are shown as ids: no tokenizer was at hand."
    parts = [
        '<h2>Sample trajectories</h2><p class="soft key">Probability of each sampled token: '
        f"{key}<br>{how}</p>"
    ]
    for index, (caption, trajectory) in enumerate(shown):
        turns, left = [], SHOWN_TOKENS
        for turn in trajectory.turns:
            turns.append(_turn(turn, decode, max(left, 0)))
            left -= len(turn.completion_ids)
        turns += map(_remote_turn, trajectory.remote_turns)
        parts.append(
            f"<details{' open' if index == 0 else ''}><summary><b>{escape(caption)}</b> "
            f"<span class='soft'>{escape(outcome(trajectory))}</span></summary>"
            f"<div class='soft'>trajectory {escape(trajectory.id)}, task "
            f"{escape(trajectory.task_id)}, attempt {trajectory.attempt}</div>"
            f"{''.join(turns)}</details>"
        )
    return "".join(parts)


def _turn(turn: Turn, decode: Decode | None, limit: int) -> str:
    text = decode or (lambda token: f"[{token}]")
    prompts = "".join(
        f'<div class="role">{escape(role)}</div><div class="text">{escape(content.strip())}</div>'
        for role, content in prompt_texts(turn, text)
    )
    nothing: list[float | None] = [None] * len(turn.completion_ids)
    drawn = shown_logprobs(turn) or nothing
    spans = [
        _token(token, text(token), logprob, version)
        for token, logprob, version in list(
            zip(turn.completion_ids, drawn, turn.versions, strict=True)
        )[:limit]
    ]
    rest = len(turn.completion_ids) - len(spans)
    more = f'<span class="soft"> … and {rest} more tokens</span>' if rest else ""
    return (
        f'<div class="turn">{prompts}<div class="role">policy</div><div class="text '
        f'said">{"".join(spans)}{more}</div>'
        f'<div class="soft">turn {turn.index}: {escape(turn_facts(turn))}</div></div>'
    )


def _remote_turn(turn: RemoteTurn) -> str:
    said = "".join(
        f'<div class="role">{escape(message.role)}</div>'
        f'<div class="text">{escape(message_text(message).strip())}</div>'
        for message in turn.messages
    )
    return (
        f'<div class="turn">{said}<div class="soft">{escape(remote_heading(turn))}: '
        f"{escape(remote_facts(turn))}</div></div>"
    )


def _token(token: int, text: str, logprob: float | None, version: int) -> str:
    """Without a log-prob: a greedy token."""
    level, drawn = "", "greedy"
    if logprob is not None:
        level = f" p{probability_level(logprob)}"
        drawn = f"logprob {logprob:.4f} (probability {math.exp(min(logprob, 0.0)):.3g})"
    hover = f"id {token} · {drawn} · version {version}"
    shown = escape(visible(text)).replace("↵", "↵<br>")
    return f'<span class="t{level}" title="{hover}">{shown}</span>'


def config(config_yaml: str) -> str:
    return (
        "<h2>Configuration</h2><details><summary>config.yaml, as resolved for this "
        f"run</summary><pre>{escape(without_passwords(config_yaml))}</pre></details>"
    )
