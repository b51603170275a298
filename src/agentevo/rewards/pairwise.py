"""The reward `pairwise`: a remote model compares the attempts of a group in pairs, each pair in
both orders.

    score = mean over its comparisons of  1 (better both times), 0.5 (equal, or the two orders
            contradict each other), 0 (worse both times)

It costs n (n - 1) requests for n different attempts, or 2 `opponents` for each attempt. `ruler`
costs `votes` requests for all attempts together. A judge that can't rank many attempts may still be
able to compare two. If the two orders of a pair contradict each other, the judge decided by
position. An attempt with a larger share of such pairs than `max_contradicted` has no score.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from agentevo.errors import storable
from agentevo.rewards.group_judge import (
    MAX_EXPLANATION,
    GroupJudgeOptions,
    equal_group,
    records_of,
    shown_attempts,
)
from agentevo.rewards.judging import all_or_first_error, ask_in_order
from agentevo.rewards.reward import Score, ScorerModel, Unscored, reward
from agentevo.rewards.transcripts import ShownGroup
from agentevo.rewards.verdicts import UnusableError, find_agreement, objects_in, whole_object
from agentevo.seeds import derive_seed
from agentevo.types import Task, Trajectory

_QUESTION = """You compare two attempts at one task, and say which one is better.

What is good:
{rubric}

{rules}

{records}

That was the last record. Which attempt is better, as said at the beginning? Answer with one JSON \
object, and with nothing behind it:
{{"explanation": "one sentence", "better": 1}}
where better is 1 or 2, or 0 if neither is."""
_CORRECTION = (
    'That can\'t be used: {problem}. Answer again with one JSON object: {{"explanation": "one '
    'sentence", "better": 1}}, where better is 1, 2, or 0, and with nothing else.'
)
_SCHEMA = whole_object(
    {"explanation": {"type": "string"}, "better": {"type": "integer", "enum": [0, 1, 2]}}
)
_NO_VERDICT = 'there is no JSON object in which "better" is 1, 2 or 0, or another one beside it'


class PairwiseConfig(GroupJudgeOptions):
    """A reward for which a remote model compares attempts in pairs."""

    opponents: int | None = Field(default=None, ge=1)
    """The minimum number of other attempts that each attempt is compared with. Default: all other
    attempts of its group."""
    max_contradicted: float = Field(default=0.5, ge=0, le=1)
    """The largest share of an attempt's comparisons whose two orders may contradict each other. An
    attempt with a larger share has no score and is recorded as failed."""


@dataclass(frozen=True, slots=True)
class PairwiseComparison:
    """Two attempts, by their index in `ShownGroup.attempts`, in both orders."""

    first: int
    second: int
    results: tuple[float, float]
    """The result of the first attempt in each order: 1, 0.5 or 0."""
    words: str

    @property
    def is_contradicted(self) -> bool:
        return abs(self.results[0] - self.results[1]) == 1.0

    @property
    def place_slope(self) -> float:
        """The advantage of the second position over the first."""
        return self.results[1] - self.results[0]

    def of(self, place: int) -> float:
        """The result of an attempt."""
        won = math.fsum(self.results) / 2
        return won if place == self.first else 1 - won


def pairs_of(num: int, opponents: int | None, seed: int) -> list[tuple[int, int]]:
    """The pairs to compare. They are all pairs, or those at a distance of up to half of `opponents`
    in a ring, so that every attempt has the same number of comparisons."""
    if opponents is None or opponents >= num - 1:
        return [(i, j) for i in range(num) for j in range(i + 1, num)]

    ring = list(range(num))
    random.Random(seed).shuffle(ring)
    pairs = {
        frozenset((ring[i], ring[(i + distance) % num]))
        for distance in range(1, (opponents + 1) // 2 + 1)
        for i in range(num)
    }
    return sorted((min(pair), max(pair)) for pair in pairs)


@reward("pairwise")
class Pairwise:
    """The share, from 0 to 1, of an attempt's comparisons with others of its group that it wins, as
    judged by remote models."""

    Config = PairwiseConfig
    keeps_own_reward = True

    def __init__(self, config: PairwiseConfig) -> None:
        self.config = config
        self.models_asked = config.models

    async def score_group(
        self, trajectories: Sequence[Trajectory], task: Task, models: Mapping[str, ScorerModel]
    ) -> list[Score | Unscored]:
        """See GroupScorer.score_group. Raises ValueError with the problem of each model if a
        comparison is missing."""
        config = self.config
        shown = await shown_attempts(config, trajectories)
        num = len(shown.attempts)
        if num == 1:
            return equal_group(config, len(trajectories))

        pairs = pairs_of(
            num,
            config.opponents,
            derive_seed("pairs", config.seed, task.id, trajectories[0].group_id),
        )
        until = time.monotonic() + config.timeout_s
        about = trajectories[0].id
        comparisons = await all_or_first_error(
            [self.compare(shown, task, models, pair, until=until, attempt=about) for pair in pairs]
        )
        return [self._score(comparisons, place) for place in shown.of]

    async def compare(
        self,
        shown: ShownGroup,
        task: Task,
        models: Mapping[str, ScorerModel],
        pair: tuple[int, int],
        *,
        until: float,
        attempt: str,
    ) -> PairwiseComparison:
        """Compares two attempts in both orders. Raises ValueError with the problem of each
        model."""
        first, second = pair
        requests = [
            ask_in_order(
                models,
                self.config.models,
                question(self.config, shown, task, order),
                _better_in,
                until=until,
                attempt=attempt,
                seed=derive_seed("pair", *order, self.config.seed, task.id),
                correction=lambda problem: _CORRECTION.format(problem=problem),
                schema=_SCHEMA,
            )
            for order in ((first, second), (second, first))
        ]
        answers = await all_or_first_error(requests)
        (preference, why), (swapped_preference, swapped_why) = (answer.value for answer in answers)
        words = f"{answers[0].model}: {why} / {answers[1].model}: {swapped_why}"
        return PairwiseComparison(first, second, (preference, 1 - swapped_preference), words)

    def _score(self, comparisons: Sequence[PairwiseComparison], place: int) -> Score | Unscored:
        involved = [
            comparison
            for comparison in comparisons
            if place in (comparison.first, comparison.second)
        ]
        words = "\n".join(
            f"against attempt "
            f"{comparison.second if place == comparison.first else comparison.first}: "
            f"{'contradicted' if comparison.is_contradicted else f'{comparison.of(place):g}'}. "
            f"{comparison.words}"
            for comparison in involved
        )
        contradicted = sum(comparison.is_contradicted for comparison in involved)
        if contradicted > self.config.max_contradicted * len(involved):
            return Unscored(
                f"Disagreement: in {contradicted} of {len(involved)} comparisons the judge "
                "contradicts itself when the order is swapped, more than "
                f"max_contradicted={self.config.max_contradicted:g}",
                evidence=words,
            )

        value = math.fsum(comparison.of(place) for comparison in involved) / len(involved)
        return Score(value, success=value >= self.config.solved_from, reason=words)


def question(config: PairwiseConfig, shown: ShownGroup, task: Task, order: tuple[int, int]) -> str:
    """The judge's prompt about two attempts."""
    rules, records = records_of(config, shown, task, order)
    return _QUESTION.format(rubric=config.rubric, rules=rules, records=records)


def _better_in(text: str) -> tuple[float, str]:
    """The result of the first attempt in a judge's answer, and the reason. Raises UnusableError."""
    verdicts = objects_in(text)
    won = find_agreement(map(_won, verdicts), _NO_VERDICT)
    words = verdicts[0].get("explanation") or ""
    return won, storable(" ".join(str(words).split()), MAX_EXPLANATION)


def _won(verdict: object) -> float:
    better = verdict.get("better") if isinstance(verdict, dict) else None
    won = {"1": 1.0, "2": 0.0, "0": 0.5}.get("" if isinstance(better, bool) else str(better))
    if won is None:
        raise UnusableError(_NO_VERDICT)
    return won
