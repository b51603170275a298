"""The history that the policy sees in an agent of many turns: the task, and one round for each
reply with its results. The section `agent.context` decides how it is cut when it becomes long, and
`agent.history` how many images it keeps.

A cut edits the history, so the next prompt branches at the edit, and so does an image that becomes
text. The turns before and after it are trained as the policy saw them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from agentevo.agents.policy import Policy
from agentevo.agents.tool_format import Tools
from agentevo.config.agents import ContextSection
from agentevo.errors import RequestTooLongError
from agentevo.types import ImagePart, Message, TextPart
from agentevo.types.content import content_of, parts_of
from agentevo.types.images import images_of_messages

T = TypeVar("T")

LEFT_OUT = "[this result is left out]"
IMAGE_LEFT_OUT = "[an earlier image is left out]"
_SUMMARY = "What was done and found so far: "


class HistoryRound(NamedTuple):
    """A reply in the history, and the messages that answered it."""

    reply: Message
    answers: list[Message]


@dataclass
class History:
    """See the module. One object per attempt."""

    opening: list[Message]
    """The task."""
    section: ContextSection
    last_images: int | None = None
    """How many images of the rounds the policy sees. None: all."""
    num_cuts: int = 0

    def __post_init__(self) -> None:
        self._rounds: list[HistoryRound] = []
        self._summary = ""

    @property
    def messages(self) -> list[Message]:
        """The messages that the policy sees."""
        shown = list(self.opening)
        if self._summary:
            last = shown[-1]
            parts = [*parts_of(last), f"\n\n{_SUMMARY}{self._summary}"]
            shown[-1] = replace(last, content=content_of(parts))

        played = [
            message
            for past_round in self._rounds
            for message in (past_round.reply, *past_round.answers)
        ]
        if self.last_images is not None:
            played = keep_last_images(played, self.last_images)
        return shown + played

    def add(self, reply: Message, answers: list[Message]) -> None:
        self._rounds.append(HistoryRound(reply, answers))

    async def look(self, turn: int, policy: Policy, tools: Tools = None) -> None:
        """Cuts the history if the prompt and the reply of `turn` together have more than
        `max_tokens` tokens."""
        limit = self.section.max_tokens
        if limit is not None and sum(policy.num_tokens(turn)) > limit:
            await self.cut(policy, tools)

    async def ask_within_context(
        self, ask: Callable[[list[Message]], Awaitable[T]], policy: Policy
    ) -> T:
        """Calls `ask` with the history and returns the result. Cuts the history as long as it is
        too long for the context. Raises RequestTooLongError if nothing is left to cut."""
        while True:
            try:
                return await ask(self.messages)
            except RequestTooLongError:
                if not await self.cut(policy):
                    raise

    async def cut(self, policy: Policy, tools: Tools = None) -> bool:
        """Shortens the history; returns false if nothing is left to cut. `tools` are the schemas
        that the policy sees. Raises the errors of the request for a summary, except
        RequestTooLongError."""
        section = self.section
        keep = self.section.keep_turns
        old = self._rounds[: len(self._rounds) - keep]
        if section.strategy == "full" or not old:
            return False

        recent = self._rounds[len(old) :]
        if section.strategy == "discard_results":
            cut = _without_results(old)
            if cut == old:
                return False
            self._rounds = [*cut, *recent]
        else:
            if section.strategy == "summary":
                self._summary = await self._summarise(old, policy, tools)
            self._rounds = recent

        self.num_cuts += 1
        return True

    async def _summarise(self, old: list[HistoryRound], policy: Policy, tools: Tools) -> str:
        """The summary of the old rounds. If they are too long for one request, only the replies are
        summarised; if these are also too long, the earlier summary stays."""
        for rounds in (old, _without_results(old)):
            try:
                return await self._summary_of(rounds, policy, tools)
            except RequestTooLongError:
                continue
        return self._summary

    async def _summary_of(self, rounds: list[HistoryRound], policy: Policy, tools: Tools) -> str:
        now = self._rounds
        self._rounds = rounds
        try:
            messages = [*self.messages, Message("user", self.section.summary_prompt)]
        finally:
            self._rounds = now

        name = self.section.summary_model
        if name is not None:
            return (await policy.model(name).generate(messages)).text.strip()

        # With the same tools the request extends the previous prompt.
        return (await policy.generate(messages, tools=tools)).answer.strip()


def _without_results(rounds: list[HistoryRound]) -> list[HistoryRound]:
    return [
        HistoryRound(reply, [replace(answer, content=LEFT_OUT) for answer in answers])
        for reply, answers in rounds
    ]


def keep_last_images(messages: Sequence[Message], num: int) -> list[Message]:
    """The messages with the last `num` of their images. Each earlier image becomes
    IMAGE_LEFT_OUT."""
    num_old = sum(1 for _ in images_of_messages(messages)) - num
    kept = []
    for message in messages:
        parts: list[str | TextPart | ImagePart] = []
        for part in parts_of(message):
            is_old = isinstance(part, ImagePart) and num_old > 0
            num_old -= is_old
            parts.append(IMAGE_LEFT_OUT if is_old else part)

        is_edited = IMAGE_LEFT_OUT in parts
        kept.append(replace(message, content=content_of(parts)) if is_edited else message)

    return kept
