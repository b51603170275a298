"""One conversation with the policy, recorded token for token as a tree of turns. The agent's handle
(agents/policy.py) wraps a conversation. Other interfaces to the same engine can do the same.

`complete(messages)` takes the whole history, as a chat API does. It finds the longest recorded
history that the messages begin with (history.py) and encodes only the messages after it, so the
model's own text is never encoded again. A history that was edited matches less, and its turn starts
a new branch or root (types.Turn.parent). A request with other tools, or other values of the
template's variables, also starts a new root, because the template writes them before the first
message. Messages that come back in another form than
recorded are counted (drift.py). Token ids in place of messages are matched against the recorded
ids, and so is a plain text (plain_prompts.py).

Messages name images by their digests, so the same text with another image is another history. The
files are in `images`. A turn records where its images are, and the engine gets those of the whole
context (prompt_images.py).

Every request gets its own seed (request_sampling.py). Calls may overlap: turns are numbered in the
order in which they end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import msgspec

from agentevo.data.message_images import ImageCollector
from agentevo.errors import (
    BadRequestError,
    EngineError,
    EngineUnavailableError,
    GrammarError,
    ListenerError,
    RequestTooLongError,
    shown,
)
from agentevo.inference.conversations.call_notes import note_answers
from agentevo.inference.conversations.drift import Drift
from agentevo.inference.conversations.history import Histories, HistoryMatch, HistoryNode
from agentevo.inference.conversations.plain_prompts import (
    PlainTexts,
    ScoredPrompt,
    checked_ids,
    recorded_beginning,
    score_ids,
)
from agentevo.inference.conversations.prompt_images import (
    check_no_images,
    with_files,
)
from agentevo.inference.conversations.request_sampling import RequestSampling
from agentevo.inference.engine import Engine, SleepingEngine, TokenListener
from agentevo.inference.token_listeners import StreamedTokens
from agentevo.models.chat.answer_form import AnswerForm, grammar_of
from agentevo.models.chat.chat_format import LONG_TEXT, ChatFormat, is_long, num_characters
from agentevo.models.chat.chat_template import OWN_VALUES, TemplateValues, ToolSchemas
from agentevo.runtime.event_loop import gather_all, in_thread, outside_scopes
from agentevo.store.call_log import AttemptCalls
from agentevo.types import (
    Completion,
    Constraint,
    Message,
    SamplingOverrides,
    SamplingParams,
    Turn,
    context_of,
    images_of_context,
)
from agentevo.types.image_span import ImageSpan
from agentevo.types.images import PromptImage, images_of_messages
from agentevo.types.routed_experts import why_misaligned

CompletionListener = Callable[[int, Sequence[int], Sequence[float]], None]
"""A function that gets the tokens of a call's completions as they are sampled. Its arguments are
the completion's number from 0, the token ids, and their log-probs (see TokenListener)."""
MAX_COMPLETIONS = 1024
"""The most completions of one call."""
COUNTED_CHARACTERS = 16
"""The most characters that `count_tokens` accepts per token of the model's context. Most texts have
4 characters per token."""


def check_count(n: int) -> None:
    """Raises BadRequestError if one call can't ask for this number of completions."""
    if not 1 <= n <= MAX_COMPLETIONS:
        raise BadRequestError(f"n is {shown(n)}: ask for 1 to {MAX_COMPLETIONS} completions")


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The prompt of a call, and how it joins the recorded turns."""

    parent: int | None
    added: list[int]
    """The ids after the parent's completion; the whole prompt if the turn is a root."""
    ids: list[int]
    """The ids of the whole prompt."""
    new_messages: list[Message]
    last_message: HistoryNode | None = None
    """The last message of the history; None for a prompt of token ids or a text."""
    text: str | None = None
    """The whole prompt, if it is a plain text."""
    added_images: tuple[ImageSpan, ...] = ()
    """The images of `added`; their offsets count from its first id."""
    images: tuple[PromptImage, ...] = ()
    """The images of `ids`."""


class Conversation:
    """See the module. `sampling` has the defaults of every call. `timeout_s` is the time limit of
    each request. `images` has the images of the attempt, which its conversations share."""

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        sampling: SamplingParams,
        *,
        name: str,
        seed: int,
        context_length: int,
        timeout_s: float,
        calls: AttemptCalls | None = None,
        images: ImageCollector | None = None,
    ) -> None:
        self.images = ImageCollector() if images is None else images
        """The images that messages may name."""
        self.sees_images = chat.processor is not None
        """Whether the model reads images."""
        self._engine = engine
        self._chat = chat
        self._sampling = RequestSampling(sampling, seed, chat)
        self._name = name
        self._context_length = context_length
        self._timeout_s = timeout_s
        self._turns: list[Turn] = []
        self._children: dict[int | None, list[int]] = {}
        """Turn -> the turns that extend it; None -> the roots."""
        self._histories = Histories()
        self._answers: list[HistoryNode | None] = []
        """The message of each turn; None if the turn answered token ids or a text."""
        self._texts = PlainTexts(chat, self._context)
        self._discarded: set[int] = set()
        self._malformed: dict[int, int] = {}
        """Turn -> the number of its malformed tool calls."""
        self._pending: Counter[int] = Counter()
        """The version when a call was made -> the number of such calls without an answer."""
        self._closed = False
        self.calls = calls or AttemptCalls(None, name)
        """The record of this conversation's calls."""
        self.drift = Drift()
        """Messages that came back in another form than recorded."""
        self.broken: BaseException | None = None
        """The engine's first failure, even if the agent handled it. A request that is too long does
        not count, because it is the agent's failure."""

    @property
    def name(self) -> str:
        """The engine's name for this conversation. For an attempt, the id of its trajectory."""
        return self._name

    @property
    def turns(self) -> list[Turn]:
        """The turns recorded so far, without rewards."""
        return list(self._turns)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version of the weights that sampled any token so far, or that served when a
        waiting call was made. None before the first call. A call that was made while no engine was
        known has no version."""
        versions = [min(turn.versions) for turn in self._turns if turn.versions]
        pending = (version for version, count in self._pending.items() if count and version >= 0)
        return min([*versions, *pending], default=None)

    @property
    def slept_s(self) -> float:
        """The seconds that the engine has slept so far. They do not count towards the time limits
        of its callers."""
        return self._engine.slept_s if isinstance(self._engine, SleepingEngine) else 0.0

    async def complete(
        self,
        prompt: Sequence[Message] | Sequence[int] | str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        overrides: SamplingOverrides | None = None,
        form: AnswerForm | None = None,
        template: Mapping[str, Any] | None = None,
        n: int = 1,
        listen: CompletionListener | None = None,
        sized: Callable[[int, int], None] | None = None,
        top_logprobs: int = 0,
        drawn: Callable[[Sequence[Completion]], None] | None = None,
    ) -> list[Turn]:
        """Samples `n` answers of the policy and records them as turns with one parent. Either all
        of them are recorded, or none. The prompt is a history that ends with another party's
        message, token ids, or a plain text. `tools` are JSON schemas in OpenAI's form, which the
        chat template writes into the prompt. `form`: the form that the answers must have.
        `template`: values of the template's variables, which replace the model's. `listen` gets
        every token of every completion before this function returns, the tokens of one completion
        in order. `sized` is called before the first token with the number of tokens in the prompt,
        and how many of them were recorded. `drawn` gets the sampled completions, each with the
        `top_logprobs` likeliest tokens at each position.

        Raises BadRequestError for an invalid request, RequestTooLongError when the context is
        full, GrammarError for a form that can't be enforced, DeadlineExceededError when the engine
        is late, ListenerError when `listen` raises.
        """
        check_count(n)
        values = TemplateValues.of(template)
        grammar = grammar_of(form, self._chat.with_values(values), tools, prompt)

        joined = await self._join(prompt, ToolSchemas.of(tools), values)
        room = self._context_length - len(joined.ids)
        if room < 1:
            raise RequestTooLongError(
                f"the conversation has {len(joined.ids)} tokens, the model's context is "
                f"{self._context_length}: allow fewer turns"
            )

        if sized is not None:
            sized(len(joined.ids), len(joined.ids) - len(joined.added))

        request_fields = {
            "grammar": grammar,
            "top_logprobs": top_logprobs,
            "routed_from": max(len(joined.ids) - len(joined.added) - 1, 0),
        }
        requests = [
            msgspec.structs.replace(
                self._sampling.make_params(number, overrides, room), **request_fields
            )
            for number in range(n)
        ]
        call = self.calls.call("policy", "generate", prompt_tokens=len(joined.ids))
        with self._waiting(), call:
            completions = await self._all_completed(joined, requests, listen)
            turns = [
                self._record(joined, sampling, completion)
                for sampling, completion in zip(requests, completions, strict=True)
            ]
            note_answers(call, turns, prompt, tools, joined.ids, self._chat.tokenizer)

        if drawn is not None:
            drawn(completions)

        return turns

    async def count_tokens(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> int:
        """The number of tokens in the prompt that `complete` would send for this history. The
        prompt may be longer than the model's context. Records nothing, and counts no drift. Raises
        RequestTooLongError if the history is far longer than the context."""
        written = ToolSchemas.of(tools)
        match = self._histories.find(written, messages, TemplateValues.of(template))
        new = list(messages[match.known :])
        characters = num_characters(new) + len(written.as_json)
        longest = max(COUNTED_CHARACTERS * self._context_length, LONG_TEXT)
        if characters > longest or len(new) > max(self._context_length, LONG_TEXT):
            raise RequestTooLongError(
                f"the {len(new)} messages to count have {characters} characters, far more than "
                f"the model's context of {self._context_length} tokens: shorten them"
            )

        added, _ = await self._encode_new(match, new)
        return len(self._recorded_of(match)) + len(added)

    async def score(self, prompt: str | Sequence[int]) -> ScoredPrompt:
        """The log-probs of a prompt's tokens under the newest weights. Records nothing. Raises the
        errors of `score_ids` and of `complete`."""
        joined = await self._join(prompt, ToolSchemas(), OWN_VALUES)
        return await score_ids(self._engine, joined.ids, deadline_s=self._timeout_s)

    async def check(self, prompt: str | Sequence[int | Message]) -> None:
        """Checks a prompt that is a text or token ids. Raises the same errors as `complete`."""
        await self._join(prompt, ToolSchemas(), OWN_VALUES)

    def recognise(self, turn: int, message: Message) -> None:
        """Registers another form of the answer of turn `turn`: a history with `message` in its
        place also matches the turn. A caller needs this if it passes answers on with tool calls and
        reasoning parsed from their text. A client may send the message back in yet another form
        (equivalence.py)."""
        answer = self._answers[turn]
        if answer is None:
            raise BadRequestError(
                f"turn {turn} answered a prompt of token ids, which has no messages"
            )
        self._histories.serves_clients = answer.is_given = True
        if message not in answer.forms:
            answer.recognise(message)
            self.drift.record(answer, message)

    def note_malformed(self, turn: int, count: int) -> None:
        """Records the number of malformed tool calls in the answer of turn `turn`. Callers that
        parse tool calls from the text use it."""
        self._malformed[turn] = count

    def discard(self, turn: int) -> None:
        """Marks the answer of turn `turn` as not delivered. An undelivered answer earned no reward,
        so the attempt is recorded without it. If a later turn continues from it, it was delivered
        after all."""
        self._discarded.add(turn)
        answer = self._answers[turn]
        if answer is not None:
            answer.is_lost = True

    def _is_lost(self, turn: int) -> bool:
        return turn in self._discarded and turn not in self._children

    @property
    def received(self) -> list[int]:
        """The indices of all turns except those that were not delivered."""
        return [turn.index for turn in self._turns if not self._is_lost(turn.index)]

    def turns_to_record(self, rewards: Mapping[int, float]) -> list[Turn]:
        """The turns for the trajectory with their rewards, which are given by index. Turns that
        were not delivered are left out, and the others are renumbered."""
        numbers = {index: number for number, index in enumerate(self.received)}
        turns = []
        for index, number in numbers.items():
            turn = self._turns[index]
            parent = None if turn.parent is None else numbers[turn.parent]
            reward = rewards.get(index, 0.0)
            if (number, parent, reward) != (turn.index, turn.parent, turn.reward):
                turn = msgspec.structs.replace(turn, index=number, parent=parent, reward=reward)
            turns.append(turn)

        return turns

    def metrics(self) -> dict[str, float]:
        """The conversation's metrics for the trajectory. Empty if nothing drifted, all answers were
        delivered, and every tool call was well formed."""
        received = self.received
        counts = {
            "num_undelivered": len(self._turns) - len(received),
            "num_malformed_calls": sum(self._malformed.get(turn, 0) for turn in received),
        }
        return self.drift.metrics() | {name: float(n) for name, n in counts.items() if n}

    def prompt_ids(self, turn: int) -> list[int]:
        """The ids of the whole context that turn `turn` answered."""
        return context_of(self._turns, turn)

    @property
    def chat(self) -> ChatFormat:
        """The chat format that turns messages into tokens."""
        return self._chat

    def opening(self, turn: Turn) -> str:
        """The text that the prompt of a turn put in the assistant's place, such as "<think>\\n"."""
        answer = self._answers[turn.index]
        values = OWN_VALUES if answer is None else answer.values
        return self._chat.with_values(values).opening_of(turn.prompt_ids)

    async def close(self) -> None:
        """Ends the conversation and frees the engine's memory of it. Later calls fail."""
        self._closed = True
        await self._engine.release(self._name)

    async def _join(
        self, prompt: str | Sequence[int | Message], tools: ToolSchemas, values: TemplateValues
    ) -> _Prompt:
        if isinstance(prompt, str):
            return await self._join_text(prompt)
        if prompt and isinstance(prompt[0], int):
            return self._join_ids(cast("Sequence[int]", prompt))

        messages = cast("Sequence[Message]", prompt)
        match = self._histories.find(tools, messages, values)
        before = self._recorded_of(match)
        new = list(messages[match.known :])
        num_parts = len(new) + sum(1 for _ in images_of_messages(new))
        self._check_length(len(before), num_characters(new) + len(tools.as_json), num_parts)
        added, spans = await self._encode_new(match, new)
        parent = None if match.answer is None else match.answer.turn
        shown = [] if parent is None else images_of_context(self._turns, parent)
        images = with_files(
            [*shown, *(span.shifted(len(before)) for span in spans)], self.images.files
        )
        self.drift.count(match)

        last = self._histories.add(match)
        return _Prompt(parent, added, before + added, new, last, added_images=spans, images=images)

    def _recorded_of(self, match: HistoryMatch) -> list[int]:
        """The ids up to the answer that a request continues from."""
        turn = None if match.answer is None else match.answer.turn
        return [] if turn is None else self._context(turn)

    async def _encode_new(
        self, match: HistoryMatch, new: list[Message]
    ) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """The ids of the messages after that answer, and the images among them."""
        tools = match.root.tools
        files = self.images.files
        chat = self._chat.with_values(match.root.values)
        parent = None if match.answer is None else match.answer.turn

        def encode() -> tuple[list[int], tuple[ImageSpan, ...]]:
            if parent is None:
                ids = chat.first_prompt(new, tools, files)
            else:
                last_id = self._turns[parent].completion_ids[-1]
                ended_with_stop = chat.has_ended(last_id, new, tools, files)
                ids = chat.continuation(
                    new, ended_with_stop=ended_with_stop, tools=tools, images=files
                )
            return ids, chat.image_spans(ids, new, files)

        # Short messages are encoded in this thread, so that the order of events decides which
        # requests share a step.
        is_slow = is_long(new) or not chat.knows_images(new)
        return await in_thread(encode) if is_slow else encode()

    def _context(self, turn: int) -> list[int]:
        """All ids up to and including the turn's completion."""
        return context_of(self._turns, turn) + list(self._turns[turn].completion_ids)

    def _check_length(self, num_recorded: int, added: int, messages: int = 0) -> None:
        """Raises RequestTooLongError if even the shortest encoding of `added` characters in
        `messages` messages and images, after `num_recorded` tokens, exceeds the context. Each
        message has at least the token that ends it, and each image one."""
        tokens = num_recorded + max(added // self._chat.longest_token, messages)
        if tokens >= self._context_length:
            raise RequestTooLongError(
                f"the {added} characters added to the conversation are at least {tokens} tokens, "
                f"and the model's context is {self._context_length}: shorten the observations"
            )

    async def _join_text(self, prompt: str) -> _Prompt:
        self._check_length(0, len(prompt))
        long = len(prompt) > LONG_TEXT
        ids = await in_thread(self._texts.ids_of, prompt) if long else self._texts.ids_of(prompt)
        if not ids:
            raise BadRequestError("the prompt is empty: give at least one character")
        return replace(self._join_ids(ids), text=prompt)

    def _join_ids(self, prompt: Sequence[int]) -> _Prompt:
        if len(prompt) >= self._context_length:
            raise RequestTooLongError(
                f"the prompt has {len(prompt)} tokens, the model's context is "
                f"{self._context_length}: shorten it"
            )

        ids = checked_ids(prompt, self._chat.num_tokens)
        check_no_images(ids, self._chat)
        num_recorded, parent = recorded_beginning(ids, self._turns, self._children)
        return _Prompt(parent, ids[num_recorded:], ids, [])

    def _record(self, joined: _Prompt, sampling: SamplingParams, completion: Completion) -> Turn:
        message = Message("assistant", self._chat.text(completion.ids))
        turn = Turn(
            index=len(self._turns),
            parent=joined.parent,
            prompt_ids=joined.added,
            completion_ids=completion.ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            temperature=sampling.temperature,
            seed=sampling.seed,
            overrides=self._sampling.find_changes(sampling),
            constraint=Constraint(
                grammar=sampling.grammar, end_ids=sampling.stop_token_ids, masks=completion.masks
            )
            if sampling.grammar
            else None,
            penalties=sampling.penalties,
            routed_experts=completion.routed_experts,
            images=joined.added_images,
            processor=self._chat.fingerprint if joined.added_images else "",
            messages=[*joined.new_messages, message],
            tools=joined.last_message.tools.as_json
            if joined.last_message and joined.parent is None
            else "",
        )
        if turn.routed_experts is not None and (wrong := why_misaligned(turn)):
            raise EngineError(f"the engine's answer can't be recorded: {wrong}")

        self._turns.append(turn)
        self._children.setdefault(turn.parent, []).append(turn.index)
        answer = None if joined.last_message is None else joined.last_message.add(message, -1)
        self._answers.append(answer)

        if answer is not None:
            answer.turn = turn.index
            self.drift.record(answer, message)

        if joined.text is not None:
            self._texts.note_answer(joined.text, message.text, turn.index, turn.completion_ids)

        return turn

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Counts a call as pending during the block, under the version that serves when it
        begins."""
        if self._closed:
            raise EngineError(
                f"the attempt {self._name} has ended: its agent was broken off and can't send "
                "more requests"
            )

        version = self._engine.version
        self._pending[version] += 1
        try:
            yield
        finally:
            self._pending[version] -= 1

    async def _all_completed(
        self,
        joined: _Prompt,
        requests: Sequence[SamplingParams],
        listen: CompletionListener | None,
    ) -> list[Completion]:
        """Runs the requests at once, and returns one completion for each. The first failure cancels
        the others."""
        completions = [
            self._complete(joined, sampling, None if listen is None else partial(listen, number))
            for number, sampling in enumerate(requests)
        ]
        return await gather_all(completions) if len(requests) > 1 else [await completions[0]]

    async def _complete(
        self, joined: _Prompt, sampling: SamplingParams, listen: TokenListener | None
    ) -> Completion:
        """The engine's answer. A failure is also stored in `broken`. An engine that reads text only
        needs no argument for images."""
        images: dict[str, Any] = {"images": joined.images} if joined.images else {}
        streamed = None if listen is None else StreamedTokens(listen)
        try:
            with outside_scopes():  # the engine's own tasks outlive the attempt
                completion = await self._engine.generate(
                    joined.ids,
                    sampling,
                    session=self._name,
                    deadline_s=self._timeout_s,
                    listen=None if streamed is None else streamed.add,
                    **images,
                )

            if streamed is not None:
                streamed.finish(completion)

            return completion
        except (RequestTooLongError, GrammarError, ListenerError):
            raise
        except asyncio.CancelledError:
            if self._engine.version < 0:
                self.broken = self.broken or EngineUnavailableError(
                    "no engine answered before the attempt was broken off"
                )
            raise
        except Exception as error:
            self.broken = self.broken or error
            raise
