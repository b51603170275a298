"""The check that a chat template only appends when a conversation grows: it does not number the
turns, move the system message or drop old messages."""

from __future__ import annotations

from typing import NamedTuple

from agentevo.errors import ModelError
from agentevo.models.chat.chat_template import ChatTemplate, ToolSchemas
from agentevo.models.chat.prompt_thoughts import EMPTY_THOUGHT
from agentevo.models.chat.turn_ends import PROBE_ANSWER, PROBE_USER, after, refusal
from agentevo.types import Message

_SECOND_ANSWER = "probesecond"


class AnswerPlace(NamedTuple):
    """The texts that a template puts before an answer, in the prompt or in the history only."""

    omitted_header: str
    """The text before an answer in a history that the generation prompt leaves out, so that the
    policy writes it."""
    opening: str
    """The part of the generation prompt that follows the header of a finished message, such as an
    opening <think>."""


def check_history(
    template: ChatTemplate, start: list[Message], tools: ToolSchemas, *, is_harmony: bool
) -> AnswerPlace:
    """The texts before an answer that follows `start`, the messages before the first assistant's.
    Raises ModelError for a template that does not only append."""

    def render(messages: list[Message], *, prompt: bool) -> str:
        return template.render([*start, *messages], prompt=prompt, tools=tools)

    first = Message("assistant", PROBE_ANSWER)
    second = Message("assistant", _SECOND_ANSWER)
    generation = render([], prompt=True)
    once = render([first, PROBE_USER], prompt=True)
    twice = render([first, PROBE_USER, second, PROBE_USER], prompt=True)

    header, sentinel, after_first = once.partition(PROBE_ANSWER)
    omitted = header[len(generation) :] if header.startswith(generation) else ""
    is_thought = not omitted.strip() or EMPTY_THOUGHT.fullmatch(omitted.lstrip())
    omitted_header = omitted if is_harmony or is_thought else ""
    if omitted_header:
        header = generation
    elif not generation.startswith(header):  # the thought of a finished message is left out
        header = EMPTY_THOUGHT.sub("", header)

    if not sentinel or not generation.startswith(header):
        raise ModelError(
            refusal(
                "[user, assistant, user] does not begin with the rendering of [user] and the "
                "generation prompt"
            )
        )

    opening = generation[len(header) :]
    if not twice.startswith(once.removesuffix(opening)):
        raise ModelError(refusal("a longer conversation does not begin with the shorter one"))

    if after(_SECOND_ANSWER, twice) != after_first:
        raise ModelError(
            refusal("what follows an assistant's message depends on how many turns came before")
        )

    return AnswerPlace(omitted_header, opening)
