"""Matches prompts that are token ids or plain texts, and not chats, with the recorded turns.

A text that begins with a recorded prompt and the policy's whole answer to it keeps those ids, and
only the rest of the text is encoded. The token that ended a completion is not in the text that the
client received. A client that appends this token continues from the whole turn. A client that does
not starts a new branch, with the sampled ids before that token. If a text differs earlier, for
example after a stop string, the rest is encoded from there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from agentevo.errors import BadRequestError
from agentevo.inference.engine import Engine, ScoringEngine
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.types import Turn
from agentevo.types.turn_columns import TURN_COLUMNS


class PlainTexts:
    """See the module. `context` returns all ids up to and including a turn's completion."""

    def __init__(self, chat: ChatFormat, context: Callable[[int], list[int]]) -> None:
        self._chat = chat
        self._context = context
        self._known: dict[str, tuple[int, int]] = {}
        """The text of a prompt and completion -> their turn, and how many of the last ids are not
        in the text."""

    def ids_of(self, text: str) -> list[int]:
        """The ids of a prompt. Raises ModelError for text that the tokenizer can't encode."""
        prefixes = [prefix for prefix in list(self._known) if text.startswith(prefix)]
        longest = max(prefixes, key=len, default="")
        if not longest:
            return self._chat.plain(text)
        turn, unsaid = self._known[longest]
        ids = self._context(turn)
        return ids[: len(ids) - unsaid] + self._chat.plain(text[len(longest) :], begins=False)

    def note_answer(
        self, prompt: str, answer: str, turn: int, completion_ids: Sequence[int]
    ) -> None:
        """Records that turn `turn` answered a prompt with `answer`."""
        has_end_token = completion_ids[-1] in self._chat.end_ids
        if has_end_token:
            (end,) = self._chat.token_texts(completion_ids[-1:])
            self._known[prompt + answer + end.text] = (turn, 0)
        self._known[prompt + answer] = (turn, int(has_end_token))


def checked_ids(prompt: Sequence[int], vocabulary: int) -> list[int]:
    """The ids of a prompt. Raises BadRequestError for invalid ids."""
    ids = list(prompt)
    for place, token in enumerate(ids):
        if not isinstance(token, int) or not 0 <= token < vocabulary:
            raise BadRequestError(
                f"token {place} of the prompt is {token!r}: ids of this model are whole "
                f"numbers from 0 to {vocabulary - 1}"
            )

    return ids


def recorded_beginning(
    ids: list[int], turns: Sequence[Turn], children: Mapping[int | None, Sequence[int]]
) -> tuple[int, int | None]:
    """The number of ids that are recorded, and the turn that they continue: the turn with the
    longest context that is a prefix of the ids, and the newest of several. `children`: turn -> the
    turns that extend it; None -> the roots."""
    id_array = array(TURN_COLUMNS["prompt_ids"], ids)
    num_recorded = 0
    parent = -1
    reached: list[tuple[int, int | None]] = [(0, None)]
    while reached:
        start, turn = reached.pop()
        for child in children.get(turn, ()):
            middle = start + len(turns[child].prompt_ids)
            end = middle + len(turns[child].completion_ids)
            if (
                end < len(ids)
                and id_array[start:middle] == turns[child].prompt_ids
                and id_array[middle:end] == turns[child].completion_ids
            ):
                num_recorded, parent = max((num_recorded, parent), (end, child))
                reached.append((end, child))

    return num_recorded, parent if num_recorded else None


class ScoredPrompt(NamedTuple):
    """The tokens of a prompt, and the log-probs of all but the first at temperature 1."""

    ids: list[int]
    logprobs: list[float]


async def score_ids(engine: Engine, ids: list[int], *, deadline_s: float) -> ScoredPrompt:
    """The log-probs of a prompt's tokens. Raises BadRequestError if the engine computes none, and
    the errors of its `score`."""
    if not isinstance(engine, ScoringEngine):
        raise BadRequestError(
            "this engine computes no log-probs of a prompt: leave out echo or logprobs, or serve "
            "the model with engine.type=torch"
        )
    if len(ids) == 1:
        return ScoredPrompt(ids, [])

    scores = await engine.score(ids[:1], ids[1:], deadline_s=deadline_s)
    return ScoredPrompt(ids, list(scores.logprobs))
