"""Few-shot examples: a text of examples from the agent's own best attempts. This method needs no
writer."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentevo.agents.named_texts import as_examples, examples_of
from agentevo.config.texts import text_problem
from agentevo.data.messages import messages_of
from agentevo.errors import BadRequestError
from agentevo.types import Message
from agentevo_evolve.prompts.folder import PlayedAttempt


def best_attempts(played: Sequence[PlayedAttempt]) -> list[PlayedAttempt]:
    """An attempt of each task, the highest reward first. They are successful attempts or, if there
    are none, attempts with a reward above the mean."""
    completed = [
        attempt for attempt in played if attempt.status == "completed" and attempt.messages
    ]
    good = [attempt for attempt in completed if attempt.success]
    if not good and completed:
        mean = sum(attempt.reward for attempt in completed) / len(completed)
        good = [attempt for attempt in completed if attempt.reward > mean]

    best: dict[str, PlayedAttempt] = {}
    for candidate in sorted(
        good, key=lambda attempt: (-attempt.reward, attempt.task, attempt.label, attempt.attempt)
    ):
        best.setdefault(candidate.task, candidate)

    return list(best.values())


def chosen_examples(
    played: Sequence[PlayedAttempt], before: str, most: int, draw: random.Random
) -> str | None:
    """A text of at most `most` conversations, sampled from `best_attempts`. None if there are none.
    `before`: the examples in these attempts' prompts, which are not the attempts' own
    conversations."""
    shown = [message for example in examples_of("examples", before) for message in example]
    opening = common_opening([attempt for attempt in played if attempt.messages], shown)
    talks = [
        talk
        for best_attempt in best_attempts(played)
        if (talk := attempt_messages(best_attempt, opening))
    ]
    if not talks:
        return None

    count = min(len(talks), draw.randint(max(1, most // 2), most))
    text = as_examples(draw.sample(talks, count))
    return text if text_problem("examples", text) is None else None


def common_opening(played: Sequence[PlayedAttempt], shown: Sequence[Message]) -> list[Message]:
    """The common beginning of conversations, without system messages: the messages that the
    conversations of all tasks share. For a single task, the examples in `shown`."""
    openings = {attempt.task: _talk(attempt) for attempt in played}
    talks = [talk for talk in openings.values() if talk]
    if len(talks) < 2:
        return list(shown)

    common: list[Message] = []
    for same in zip(*talks, strict=False):
        if any(_said(message) != _said(same[0]) for message in same):
            break
        common.append(same[0])

    return common


def attempt_messages(played: PlayedAttempt, opening: Sequence[Message]) -> list[Message]:
    """The attempt's conversation without system messages and without the common beginning. Empty if
    it can't be an example."""
    talk = _talk(played)
    if [_said(message) for message in talk[: len(opening)]] == [
        _said(message) for message in opening
    ]:
        talk = talk[len(opening) :]
    return talk if talk and talk[-1].role == "assistant" else []


def _talk(played: PlayedAttempt) -> list[Message]:
    try:
        return [message for message in messages_of(played.messages) if message.role != "system"]
    except BadRequestError:
        return []


def _said(message: Message) -> tuple[str, str]:
    return message.role, message.text
