"""Few-shot choice: a text of examples from the agent's own best attempts. No writer is needed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentevo.agents.texts import as_examples, examples_of
from agentevo.config.texts import text_problem
from agentevo.data.messages import messages_of
from agentevo.errors import BadRequestError
from agentevo.prompts.folder import PlayedAttempt
from agentevo.types import Message


def best_attempts(played: Sequence[PlayedAttempt]) -> list[PlayedAttempt]:
    """One attempt of each task, the most rewarded first: of those that succeeded, or, where none
    did, of those that are worth more than the mean."""
    whole = [one for one in played if one.status == "completed" and one.messages]
    good = [one for one in whole if one.success]
    if not good and whole:
        mean = sum(one.reward for one in whole) / len(whole)
        good = [one for one in whole if one.reward > mean]

    best: dict[str, PlayedAttempt] = {}
    for one in sorted(good, key=lambda one: (-one.reward, one.task, one.label, one.attempt)):
        best.setdefault(one.task, one)

    return list(best.values())


def chosen_examples(
    played: Sequence[PlayedAttempt], before: str, most: int, draw: random.Random
) -> str | None:
    """A text of at most `most` conversations, drawn from `best_attempts`; None where there is none.
    `before`: the examples that these attempts saw, which are not theirs."""
    shown = [message for one in examples_of("examples", before) for message in one]
    opening = common_opening([one for one in played if one.messages], shown)
    talks = [
        talk for best_attempt in best_attempts(played) if (talk := own_talk(best_attempt, opening))
    ]
    if not talks:
        return None

    count = min(len(talks), draw.randint(max(1, most // 2), most))
    text = as_examples(draw.sample(talks, count))
    return text if text_problem("examples", text) is None else None


def common_opening(played: Sequence[PlayedAttempt], shown: Sequence[Message]) -> list[Message]:
    """What conversations begin with, system messages left out, whatever their task: the messages
    that those of all tasks have in common; of a single task `shown`, the examples."""
    openings = {one.task: _talk(one) for one in played}
    talks = [talk for talk in openings.values() if talk]
    if len(talks) < 2:
        return list(shown)

    common: list[Message] = []
    for same in zip(*talks, strict=False):
        if any(_said(one) != _said(same[0]) for one in same):
            break
        common.append(same[0])

    return common


def own_talk(played: PlayedAttempt, opening: Sequence[Message]) -> list[Message]:
    """The attempt's conversation without system messages and without what it begins with; empty
    for one that no example can be."""
    talk = _talk(played)
    if [_said(one) for one in talk[: len(opening)]] == [_said(one) for one in opening]:
        talk = talk[len(opening) :]
    return talk if talk and talk[-1].role == "assistant" else []


def _talk(played: PlayedAttempt) -> list[Message]:
    try:
        return [one for one in messages_of(played.messages) if one.role != "system"]
    except BadRequestError:
        return []


def _said(message: Message) -> tuple[str, str]:
    return message.role, message.text
