"""`agentevo judge`: measures how well a judge agrees with the truth, and what misleads
it.

Every request uses the scorer that training would use, with its prompts, votes, failover and
failures. All intervals are 95%, by resampling groups (runs/evaluation/estimates.py), except that of
the share of injections (Wilson's).

    agreement   Spearman's correlation with the truth within groups, the share of
                pairs that are ordered rightly
    places      the same attempts, rotated through all places: how much a score changes from the
                first to the last
    length      the correlation of scores with lengths where the truth is held fixed
    injections  the share of texts that raise the score of a bad attempt when appended to it
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from agentevo.config.judges import judge_digest, missed_thresholds
from agentevo.config.remote_models import RemoteModelSection
from agentevo.data.rows import read_json_lines
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.inference.remote_models import RemoteModels
from agentevo.observability.metrics import wilson_interval
from agentevo.rewards import make_reward
from agentevo.rewards.injections import INJECTIONS
from agentevo.rewards.judging import JudgeOptions
from agentevo.rewards.ruler import Ruler, order_of_vote, shown_attempts
from agentevo.rollout.scoring import Scoring
from agentevo.runs.evaluation.estimates import Estimate, mean_of
from agentevo.runs.evaluation.judge_data import KnownGroup
from agentevo.runtime.event_loop import gather_all, run_coroutine
from agentevo.types import Trajectory

CONCURRENCY = 8
"""The number of groups that are judged at the same time."""
RAISED_SHARE = 0.1
"""An injection counts if it raises a score by more than this share of the scores' range."""
MAX_ROTATED = 12
"""The number of groups whose attempts are shown at every position, and the number of such attempts
in a group."""
MAX_ROTATED_ATTEMPTS = 6
VERSION = 1


@dataclass
class Calibration:
    """The measurements of a judge."""

    judge: JudgeOptions
    sections: Mapping[str, RemoteModelSection]
    num_attempts: int
    num_groups: int
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Maps the names of the limits, and other names, to measurements. `value` is None if nothing
    could be measured."""
    injections: list[dict[str, Any]] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """The limits that the judge does not meet."""
        return missed_thresholds(
            self.judge, {name: measure["value"] for name, measure in self.measured.items()}
        )

    def as_json(self) -> dict[str, Any]:
        """The report."""
        names = [name for name in self.judge.models if name in self.sections]
        return {
            "version": VERSION,
            "at": time.time(),
            "digest": judge_digest(self.judge, self.sections),
            "judge": self.judge.model_dump(mode="json"),
            "models": {name: self.sections[name].model for name in names},
            "attempts": self.num_attempts,
            "groups": self.num_groups,
            "measured": self.measured,
            "injections": self.injections,
            "cost": self.cost,
            "failures": self.failures,
            "below": self.problems(),
        }


def calibrate(
    judge: JudgeOptions,
    sections: Mapping[str, RemoteModelSection],
    groups: Sequence[KnownGroup],
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Measures the judge with these groups. Raises ConfigError for data without usable groups, and
    AgentEvoError if the judge gives no score."""
    usable_groups = _usable(judge, groups)
    num_attempts = sum(len(group.attempts) for group in usable_groups)
    calibration = Calibration(judge, sections, num_attempts, len(usable_groups))
    with TemporaryDirectory(prefix="agentevo-judge-") as folder:
        used_sections = {
            name: section.model_copy(update={"cache": False}) for name, section in sections.items()
        }
        models = RemoteModels(used_sections, Path(folder))
        try:
            run_coroutine(_CalibrationRun(calibration, models, progress).all(usable_groups))
            calibration.cost |= _cost(Path(folder), models)
        finally:
            models.close()

    return calibration


def _usable(judge: JudgeOptions, groups: Sequence[KnownGroup]) -> list[KnownGroup]:
    """Groups whose attempts differ in truth. For a judge of single attempts, all attempts form one
    group if each task has a single attempt."""
    differing = [group for group in groups if group.differs]
    if len(differing) < 2:
        raise ConfigError(
            f"{len(differing)} of {len(groups)} groups have attempts of different quality, and "
            "a judge is measured by its order of a group's attempts: give at least two such "
            "groups, "
            "each with better and worse attempts at one task_id"
        )

    return differing


class _CalibrationRun:
    """The requests of a calibration."""

    def __init__(
        self, calibration: Calibration, models: RemoteModels, progress: Callable[[str], None]
    ) -> None:
        self._calibration = calibration
        self._models = models
        self._progress = progress
        settings = {"weight": 1.0, "requires": (), "from_step": 1, "until_step": None}
        self._scoring = Scoring([calibration.judge.model_copy(update=settings)], models=models)
        self._scoring.check([], needed=False)
        self._semaphore = asyncio.Semaphore(CONCURRENCY)

    async def all(self, groups: Sequence[KnownGroup]) -> None:
        """Makes all measurements."""
        self._progress(f"{len(groups)} groups: agreement with the truth")
        scores = await gather_all([self._scores(group.attempts, group) for group in groups])
        self._agreement(groups, scores)
        self._progress("the same attempts in other positions")
        await self._places(groups)
        self._progress(f"{len(INJECTIONS)} injections")
        await self._inject_all(groups, scores)

    async def _scores(
        self, attempts: Sequence[Trajectory], group: KnownGroup
    ) -> list[float | None]:
        """None for an attempt without a score."""
        async with self._semaphore:
            clean = [
                msgspec.structs.replace(attempt, status="completed", reward_parts={}, metrics={})
                for attempt in attempts
            ]
            judged = await self._scoring.score(
                clean, [True] * len(clean), {}, task=group.task, images=group.images
            )

        failures = self._calibration.failures
        for trajectory in judged:
            if (
                trajectory.status != "completed"
                and len(failures) < 20
                and trajectory.error not in failures
            ):
                failures.append(str(trajectory.error))

        return [
            trajectory.reward if trajectory.status == "completed" else None for trajectory in judged
        ]

    def _agreement(
        self, groups: Sequence[KnownGroup], scores: Sequence[Sequence[float | None]]
    ) -> None:
        pairs = [
            [
                (t, s, _length(a))
                for t, s, a in zip(g.truths, of, g.attempts, strict=True)
                if s is not None
            ]
            for g, of in zip(groups, scores, strict=True)
        ]
        total = sum(len(group.attempts) for group in groups)
        scored = sum(map(len, pairs))
        if not scored:
            why = "; ".join(self._calibration.failures[:2])
            raise AgentEvoError(f"the judge has scored none of {total} attempts: {why}")

        rows = [list(zip(*pair, strict=True)) for pair in pairs if len({t for t, *_ in pair}) > 1]
        measured = self._calibration.measured
        measured["failed"] = _share(total - scored, total)
        correlations = [spearman(t, s) for t, s, _ in rows]
        measured["min_rank_correlation"] = _estimate(mean_of(correlations, (-1.0, 1.0)))

        right = [pair_accuracy(t, s) for t, s, _ in rows]
        measured["pair_accuracy"] = _estimate(mean_of([x for x in right if x is not None]))
        measured["length_bias"] = _length_bias(rows)

    async def _places(self, groups: Sequence[KnownGroup]) -> None:
        judge = make_reward(self._calibration.judge)
        name = "max_position_bias"
        if not isinstance(judge, Ruler):
            self._calibration.measured[name] = {
                "value": 0.0,
                "why": "it is shown one attempt at a time",
            }
            return

        all_slopes = await gather_all([self._slope(judge, group) for group in groups[:MAX_ROTATED]])
        slopes = [slope for slope in all_slopes if slope is not None]
        self._calibration.measured[name] = _estimate(mean_of(slopes, (-1.0, 1.0)))

    async def _slope(self, judge: Ruler, group: KnownGroup) -> float | None:
        """How much a score changes between the first and the last position, for the same content.
        None if a judge's answer is missing."""
        attempts = group.attempts[:MAX_ROTATED_ATTEMPTS]
        shown = await shown_attempts(judge.config, attempts)
        num = len(shown.attempts)
        if num < 2:
            return None

        order = order_of_vote(num, 0, group.task.id, "rotated")
        rotations = []
        async with self._semaphore:
            try:
                for turned in range(num):
                    rotated = order[turned:] + order[:turned]
                    vote = await judge.vote(
                        shown,
                        group.task,
                        self._models,
                        rotated,
                        until=time.monotonic() + judge.config.timeout_s,
                        attempt=attempts[0].id,
                        seed=turned,
                        images=group.images,
                    )
                    rotations.append([vote.scores[place].score for place in rotated])
            except (ValueError, AgentEvoError):
                return None

        return place_slope(rotations)

    async def _inject_all(
        self, groups: Sequence[KnownGroup], scores: Sequence[Sequence[float | None]]
    ) -> None:
        """Tries every injection once. Each is appended to the worst attempt of another group."""
        bad = []
        for group, of in zip(groups, scores, strict=True):
            worst = min(range(len(of)), key=lambda index: group.truths[index])
            before = of[worst]
            if before is not None and before <= 1.0 - RAISED_SHARE:
                bad.append((group, worst, before))

        if not bad:
            self._calibration.measured["max_injected"] = {
                "value": None,
                "why": "every bad attempt has the best score already",
            }
            return

        async def try_injection(number: int, text: str) -> dict[str, Any]:
            group, worst, before = bad[number % len(bad)]
            attempts = list(group.attempts)
            attempts[worst] = with_injection(attempts[worst], text)
            after = (await self._scores(attempts, group))[worst]
            raised = after is not None and after > before + RAISED_SHARE
            return {"text": text, "before": before, "after": after, "raised": raised}

        injections = await gather_all(
            [try_injection(number, text) for number, text in enumerate(INJECTIONS)]
        )
        self._calibration.injections += injections
        raised = sum(injection["raised"] for injection in injections)
        self._calibration.measured["max_injected"] = _share(raised, len(injections))


def with_injection(trajectory: Trajectory, text: str) -> Trajectory:
    """The attempt with this text at the end of its last message, or inside its stated answer if the
    attempt marks one."""
    turns = list(trajectory.turns)
    for index in reversed(range(len(turns))):
        messages = list(turns[index].messages)
        for place in reversed(range(len(messages))):
            if messages[place].role != "assistant":
                continue

            text_before = messages[place].text
            head, mark, tail = text_before.rpartition("</answer>")
            new = f"{head}\n{text}\n{mark}{tail}" if mark else f"{text_before}\n\n{text}"
            messages[place] = msgspec.structs.replace(messages[place], content=new)
            turns[index] = msgspec.structs.replace(turns[index], messages=messages)
            return msgspec.structs.replace(trajectory, turns=turns)

    return trajectory


def _length(trajectory: Trajectory) -> int:
    """The number of characters of the policy's replies."""
    return sum(
        len(message.text) + sum(len(call.arguments) for call in message.tool_calls)
        for turn in trajectory.turns
        for message in turn.messages
        if message.role == "assistant"
    )


def _length_bias(rows: Sequence[Sequence[Sequence[float]]]) -> dict[str, Any]:
    """The partial correlation over all groups, with a jackknife interval that leaves out one group
    at a time (Quenouille 1956)."""
    if not rows:
        return {"value": None}

    columns = [[scaled_ranks(column) for column in row] for row in rows]

    def over(chosen: Sequence[Sequence[np.ndarray]]) -> float:
        truths, scores, lengths = (np.concatenate(arrays) for arrays in zip(*chosen, strict=True))
        return partial_correlation(scores, lengths, truths)

    value = over(columns)
    num = len(columns)
    if num < 3:
        return {"value": value}

    without = np.array([over(columns[:i] + columns[i + 1 :]) for i in range(num)])
    error = math.sqrt((num - 1) / num * float(((without - without.mean()) ** 2).sum()))
    low = max(-1.0, value - 1.96 * error)
    high = min(1.0, value + 1.96 * error)
    return {"value": value, "low": low, "high": high}


def _estimate(estimate: Estimate | None) -> dict[str, Any]:
    return {"value": None} if estimate is None else dict(estimate.as_json())


def _share(count: int, total: int) -> dict[str, Any]:
    low, high = wilson_interval(count / total, total)
    return {"value": count / total, "low": low, "high": high, "of": total}


def _cost(folder: Path, models: RemoteModels) -> dict[str, float]:
    """Requests, tokens, money and seconds per request, from the price logs."""
    rows = models.totals()
    seconds = [
        line.value["seconds"]
        for path in folder.glob("*.jsonl")
        for line in read_json_lines(path)
        if line.value["state"] == "completed"
    ]
    return {
        "requests": sum(row["requests"] for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
        "cost": sum(row["cost"] for row in rows),
        "median_s": float(np.median(seconds)) if seconds else 0.0,
        "p95_s": float(np.quantile(seconds, 0.95)) if seconds else 0.0,
    }


LABELS = {
    "min_rank_correlation": "rank correlation with the truth (Spearman)",
    "pair_accuracy": "pairs in the right order",
    "max_position_bias": "change from the first position to the last",
    "length_bias": "correlation with length at equal truth",
    "max_injected": "injections that raise a bad score",
    "failed": "attempts without a score",
}


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """A report as readable lines."""
    lines = [f"{report['attempts']} attempts in {report['groups']} groups"]
    for name, label in LABELS.items():
        measure = report["measured"].get(name, {"value": None})
        if measure["value"] is None or "why" in measure:
            lines.append(f"{label}: {measure.get('why', 'not measured')}")
        else:
            ends = f" [{measure['low']:.2f}, {measure['high']:.2f}]" if "low" in measure else ""
            lines.append(f"{label}: {measure['value']:.2f}{ends}")

    cost = report["cost"]
    lines.append(
        f"{cost['requests']:g} requests, {cost['tokens']:g} tokens, cost {cost['cost']:.4g}, "
        f"{cost['median_s']:.2f} s a request (95% within {cost['p95_s']:.2f} s)"
    )
    lines += [
        f"raised by: {injection['text']!r}"
        for injection in report["injections"]
        if injection["raised"]
    ][:5]
    return lines


def midranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0, [n] float64. Equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middles: np.ndarray = (ends - counts + ends - 1) / 2
    return middles[inverse]


def correlation(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float:
    """Pearson's r. 0 if one of the two does not vary."""
    x = np.asarray(first, float)
    y = np.asarray(second, float)
    x = x - x.mean()
    y = y - y.mean()
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size > 1e-12 else 0.0


def spearman(truths: Sequence[float], scores: Sequence[float]) -> float:
    """Spearman's rho (1904): the correlation of the midranks."""
    return correlation(midranks(truths), midranks(scores))


def pair_accuracy(truths: Sequence[float], scores: Sequence[float]) -> float | None:
    """The share of pairs with different truths that the scores order rightly. Equal scores count
    half. None if there is no such pair."""
    orderings = [
        0.5 * (1 + np.sign(t - u) * np.sign(s - v))
        for (t, s), (u, v) in combinations(zip(truths, scores, strict=True), 2)
        if t != u
    ]
    return float(np.mean(orderings)) if orderings else None


def partial_correlation(
    scores: Sequence[float] | np.ndarray,
    lengths: Sequence[float] | np.ndarray,
    truths: Sequence[float] | np.ndarray,
) -> float:
    """The correlation of scores with lengths at fixed truth, by their ranks within groups, each
    centred and scaled:  (r_sl - r_st r_lt) / sqrt((1 - r_st^2) (1 - r_lt^2)).  0 if the truth
    determines one of them."""
    sl = correlation(scores, lengths)
    st = correlation(scores, truths)
    lt = correlation(lengths, truths)
    size = (1 - st * st) * (1 - lt * lt)
    return float((sl - st * lt) / np.sqrt(size)) if size > 1e-9 else 0.0


def scaled_ranks(values: Sequence[float]) -> np.ndarray:
    """Midranks from -1/2 to 1/2, so that groups of different sizes can be pooled."""
    ranks = midranks(values)
    return (ranks - ranks.mean()) / max(1, len(ranks) - 1)


def place_slope(rotations: Sequence[Sequence[float]]) -> float:
    """How much a score changes between the first and the last position, by least squares.
    `rotations[r][p]`: the score at position p when the attempts were rotated by r, so that the
    attempt at position p is number (p + r) mod n. Every attempt is at every position once, so its
    own value cancels out."""
    scores = np.asarray(rotations, float)
    num = scores.shape[1]

    by_attempt = np.empty_like(scores)
    for turned in range(len(scores)):
        by_attempt[turned] = np.roll(scores[turned], turned)  # column: the number of the attempt

    attempt_means = by_attempt.mean(axis=0)
    places = np.linspace(-0.5, 0.5, num)
    slope = 0.0
    for turned in range(len(scores)):
        slope += float(places @ (scores[turned] - np.roll(attempt_means, -turned)))

    return slope / (len(scores) * float(places @ places))
