"""The reward `rlpr`: the policy's probability of the right answer after its own reasoning.

    r = clip(PR - PR_base, 0, 1),   PR = (1/n) sum_j pi(y*_j | x, z, y*_<j)

x is the prompt, z the policy's text up to its stated answer, and y* the task's answer, which
replaces the stated answer. PR_base is PR without z (the answer directly after the prompt) under the
run's initial policy. So an answer that the policy knew without reasoning earns nothing. Source:
https://arxiv.org/abs/2506.18254, sections 3.2 and 3.3.

z consists of the sampled ids before the answer, and only the text after them is encoded. No rule
and no other model judges the answer. So the reward does not detect reasoning that names many
answers to make each of them likely. Check the replies, or list `length` too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Literal, NamedTuple

import pydantic
from pydantic import Field

from agentevo.errors import ConfigError, ModelError, RequestTooLongError
from agentevo.rewards.answer_texts import check_opening, find_opening, opening_text, place_of
from agentevo.rewards.baselines import Baseline, baseline_key
from agentevo.rewards.reward import RewardConfig, Score, ScoredPolicy, reward, right_answers
from agentevo.runtime.event_loop import gather_all
from agentevo.types import Task, Trajectory, context_of

Measure = Literal["mean", "geometric_mean", "product", "mean_logprob"]
MAX_REFERENCES = 64
"""The maximum number of right answers of a task that are scored."""
ANSWER_PREFIXES = ("", " ")
"""The text between an opening and an answer. Word tokens include the blank before them. The policy
would write only one of the two forms, and the other is unlikely even if the policy knows the
answer."""
SOLVED_PROBABILITY = 0.5
"""The lowest probability at which an answer counts as known."""
CONCURRENCY = 64
"""The number of baselines that are computed concurrently and stored together."""
MAX_STEPS_BACK = 32
"""The maximum number of tokens that a character can span."""


class ProbabilityConfig(RewardConfig):
    """A reward for the policy's own probability of the right answer."""

    place: Annotated[str, pydantic.AfterValidator(check_opening)] = "answer"
    """The place of a reply's stated answer, which the right answer replaces: the name of an XML
    tag, `boxed` or `hashes`. A task's own `answer_schema` overrides it."""
    measure: Measure = "mean"
    """How the probabilities of the right answer's tokens are combined: their `mean` (as in the
    paper), their `geometric_mean`, their `product`, or `mean_logprob`, the mean of their
    logarithms."""
    debias: bool = True
    """Subtract the initial policy's value for the answer directly after the prompt, and clip the
    difference to 0 to 1."""
    format_weight: float = Field(default=0.1, ge=0, le=1)
    """The share of the score for stating exactly one answer. The rest is for the probability."""
    timeout_s: float = Field(default=600.0, gt=0)
    """The time limit of one score, in seconds, including waits for the engine's other work. Beyond
    it, the attempt is recorded as failed."""


def measure_logprobs(logprobs: Sequence[float], measure: Measure) -> float:
    """The measure of the log-probs of at least one token."""
    mean_logprob = math.fsum(logprobs) / len(logprobs)
    if measure == "mean":
        return math.fsum(map(math.exp, logprobs)) / len(logprobs)
    if measure == "mean_logprob":
        return mean_logprob
    return math.exp(mean_logprob * (len(logprobs) if measure == "product" else 1))


class PlacedAnswer(NamedTuple):
    """A right answer as tokens after a context."""

    context_ids: list[int]
    ids: list[int]
    skipped: int
    """The number of leading `ids` that belong to the text before the answer."""


def place_answer(
    policy: ScoredPolicy, context_ids: list[int], before: str, answer: str
) -> PlacedAnswer:
    """The answer after a context and after the text `before`, which is not yet encoded. Ids of
    `before` alone are not part of the answer."""
    ids = policy.encode(before + answer)
    skipped = 0
    while before and skipped < len(ids) - 1:
        if not before.startswith(policy.text(ids[: skipped + 1])):
            break
        skipped += 1
    return PlacedAnswer(context_ids, ids, skipped)


def split(policy: ScoredPolicy, ids: list[int], text: str, end: int) -> tuple[list[int], str]:
    """The ids that end at or before character `end` of their text, and the characters between them
    and `end`. Raises ValueError for a tokenizer whose texts do not add up."""
    low = 0
    high = len(ids)
    while low < high:  # more ids give a longer text, so bisection works
        middle = (low + high + 1) // 2
        if len(policy.text(ids[:middle])) <= end:
            low = middle
        else:
            high = middle - 1

    for count in range(low, max(low - MAX_STEPS_BACK, -1), -1):
        prefix = policy.text(ids[:count])
        # the ids must not end inside a character
        if text.startswith(prefix) and len(prefix) <= end:
            return ids[:count], text[len(prefix) : end]

    raise ValueError("the texts of the reply's first tokens don't match the start of its text")


@reward("rlpr")
class Rlpr:
    """The policy's probability of the right answer in place of the stated answer, minus its
    probability without any reasoning (RLPR, arXiv 2506.18254). No rule and no other model judges
    the answer."""

    Config = ProbabilityConfig

    def __init__(self, config: ProbabilityConfig) -> None:
        self.config = config

    async def prepare(self, tasks: Sequence[Task], policy: ScoredPolicy) -> None:
        """Computes and stores the missing baselines of these tasks, with the current policy. A
        baseline that can't be computed is left out, and the score of its task then gives the
        reason."""
        if not self.config.debias:
            return

        known_baselines = await policy.baselines.known()
        placed_answers = {
            baseline_key(policy.agent, placed.context_ids, placed.ids): (task, placed)
            for task in tasks
            for placed in self._all_directly(policy, task)
        }
        waiting = [
            (key, *entry) for key, entry in placed_answers.items() if key not in known_baselines
        ]

        async def compute_baseline(task: Task, placed: PlacedAnswer) -> Baseline | None:
            with suppress(RequestTooLongError):
                return await self._baseline(policy, task, placed)
            return None

        for first in range(0, len(waiting), CONCURRENCY):
            chunk = waiting[first : first + CONCURRENCY]
            baselines = await gather_all(
                [compute_baseline(task, placed) for _, task, placed in chunk]
            )
            await policy.baselines.add(
                {
                    key: new
                    for (key, *_), new in zip(chunk, baselines, strict=True)
                    if new is not None
                }
            )

    async def score(self, trajectory: Trajectory, task: Task, policy: ScoredPolicy) -> Score:
        """See Scorer.score. Of several right answers, the best one counts."""
        answers = self._answers(task)
        reply = self._reply(trajectory, task, policy)
        if reply is None:
            return self._score(0.0, is_valid=False, solved=False)

        context, before = reply
        values = await gather_all(
            [self._value(trajectory, task, policy, context, before, answer) for answer in answers]
        )
        value, measured = max(values)
        solved = measured >= (
            math.log(SOLVED_PROBABILITY)
            if self.config.measure == "mean_logprob"
            else SOLVED_PROBABILITY
        )
        return self._score(value, is_valid=True, solved=solved)

    def _score(self, value: float, *, is_valid: bool, solved: bool) -> Score:
        share = self.config.format_weight
        parts = {"probability": (1 - share) * value}
        if share:
            parts["format"] = share * float(is_valid)
        return Score(sum(parts.values()), parts, solved)

    def _answers(self, task: Task) -> list[str]:
        answers = list(dict.fromkeys(str(answer).strip() for answer in right_answers(task)))
        if not all(answers):
            raise ValueError(f"an answer of the task {task.id!r} is empty: give its row a text")
        return answers[:MAX_REFERENCES]

    def _place(self, task: Task) -> str:
        try:
            return check_opening(place_of(task, self.config.place))
        except ValueError as error:
            raise ConfigError(f"the task {task.id!r}: answer_schema: {error}") from error

    def _reply(
        self, trajectory: Trajectory, task: Task, policy: ScoredPolicy
    ) -> tuple[list[int], str] | None:
        """The ids up to the stated answer, and the rest of its opening as text. None for a reply
        that does not state exactly one answer."""
        place = self._place(task)
        if not trajectory.turns:
            return None

        completion_ids = list(trajectory.turns[-1].completion_ids)
        text = policy.text(completion_ids)
        end = find_opening(text, place)
        if end is None:
            return None

        kept_ids, before = split(policy, completion_ids, text, end)
        return [*context_of(trajectory.turns, len(trajectory.turns) - 1), *kept_ids], before

    async def _value(
        self,
        trajectory: Trajectory,
        task: Task,
        policy: ScoredPolicy,
        context: list[int],
        before: str,
        answer: str,
    ) -> tuple[float, float]:
        """The score of this answer, and its measure."""
        placed = place_answer(policy, context, before, answer)
        logprobs, _ = await policy.score(placed.context_ids, placed.ids)
        measured = measure_logprobs(logprobs[placed.skipped :], self.config.measure)
        if not self.config.debias:
            return measured, measured

        without = [
            measure_logprobs(
                (await self._kept_baseline(policy, task, directly)).logprobs, self.config.measure
            )
            for directly in self._directly(policy, task, _prompt_of(trajectory), answer)
        ]
        return min(max(measured - max(without), 0.0), 1.0), measured

    async def _kept_baseline(
        self, policy: ScoredPolicy, task: Task, placed: PlacedAnswer
    ) -> Baseline:
        """The stored baseline. A new one if the prompt was not known before the attempt."""
        key = baseline_key(policy.agent, placed.context_ids, placed.ids)
        baseline = (await policy.baselines.known()).get(key)
        if baseline is None:
            await policy.baselines.add({key: await self._baseline(policy, task, placed)})
            # The first stored entry counts, and it may be from another process.
            return (await policy.baselines.known())[key]
        return baseline

    def _all_directly(self, policy: ScoredPolicy, task: Task) -> list[PlacedAnswer]:
        """Each right answer directly after the prompt. Empty if the prompt is not known before the
        attempt, or if a text can't be encoded."""
        with suppress(ValueError, ConfigError, ModelError):
            prompt = policy.first_prompt(task)
            if prompt is not None:
                return [
                    placed
                    for answer in self._answers(task)
                    for placed in self._directly(policy, task, prompt, answer)
                ]

        return []

    def _directly(
        self, policy: ScoredPolicy, task: Task, prompt_ids: list[int], answer: str
    ) -> list[PlacedAnswer]:
        """The answer directly after the prompt, with each of ANSWER_PREFIXES before it."""
        opening = opening_text(self._place(task))
        return [
            place_answer(policy, prompt_ids, opening + lead, answer) for lead in ANSWER_PREFIXES
        ]

    async def _baseline(self, policy: ScoredPolicy, task: Task, placed: PlacedAnswer) -> Baseline:
        logprobs, version = await policy.score(placed.context_ids, placed.ids)
        return Baseline(task.id, version, logprobs[placed.skipped :])


def _prompt_of(trajectory: Trajectory) -> list[int]:
    """The prompt at the start of the last turn's conversation."""
    turn = trajectory.turns[-1]
    while turn.parent is not None:
        turn = trajectory.turns[turn.parent]
    return list(turn.prompt_ids)
