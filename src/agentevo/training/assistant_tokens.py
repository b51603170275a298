"""Conversations -> token ids, with a mask that is true exactly where the assistant speaks. The chat
template determines where that is.

A template with `{% generation %}` blocks marks the assistant's tokens itself. For any other, with r
= the template's rendering and g = the same with the generation prompt,

    prompt(k) = ids of g(messages before k)  is the policy's context before assistant message k
    whole(k)  = ids of r(messages up to k)   must begin with prompt(k); what follows is trained up
                                             to the end of the turn: the first token that ends an
                                             answer, or else the last special one

so training covers all tokens that the policy would have to generate, including its end-of-turn
token. It does not cover the text that a template puts after that: a newline, the end of the text
(Phi-3). Message k continues the tokens of the message before it where prompt(k) begins with them.
Where it does not (a template that strips the thinking of earlier turns, or rewrites them), a new
sample begins: each turn is trained in the context that the template gives it. This module never
searches for a text in another one.

Where the generation prompt opens a thought (`<think>`) that the rendering leaves out, the policy
has to finish it: the thought of the row (or none) and `</think>` precede the rendered answer. An
empty thought of the prompt that the rendering leaves out precedes it, too.

A row that can't be encoded this way raises RowError: the template refuses it, drops its tools or
tool calls, or begins an answer differently from its own generation prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from agentevo.data import ChatRow, RowError
from agentevo.data.message_markers import THOUGHT_TAGS
from agentevo.data.messages import REASONING_KEYS
from agentevo.errors import ImageError, ModelError
from agentevo.models.chat.chat_format import LONG_TEXT, NO_IMAGES
from agentevo.models.chat.chat_template import TEMPLATE_ERRORS, ChatTemplate
from agentevo.models.chat.prompt_thoughts import EMPTY_THOUGHT, OPENS_THINKING, thought_of
from agentevo.models.chat.turn_ends import (
    end_of_turn_id,
    ids_of_marks,
    next_role_marks,
    special_ids,
)
from agentevo.models.tool_calls.parser import THOUGHTS
from agentevo.types import Sample
from agentevo.types.image_span import ImageSpan
from agentevo.types.images import ImageFile, file_of

if TYPE_CHECKING:
    from agentevo.models.vision.processor import ImageTokens, VisionProcessor

CHARACTERS_PER_TOKEN = 16
"""A row with more characters than this for each token that it may have is not encoded. Most texts
have 4."""
MANY_MESSAGES = 10_000
"""The number of messages of a row that are encoded in any case: each has at least one token."""

TrainOn = Literal["all", "last"]
Chat = list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class TokenRow:
    """One sample in compact form, since a whole data set is held in memory. A conversation whose
    history is rewritten gives several."""

    name: str
    """The name of the conversation, whose rows all go into the same batch."""
    ids: np.ndarray
    """[T] int32"""
    mask: np.ndarray
    """[T] bool, false at 0."""
    images: tuple[ImageSpan, ...] = ()
    """The images of the ids, in order."""
    processor: str = ""
    """The fingerprint of the settings that made the tokens of the images; empty without images."""

    @property
    def num_trained(self) -> int:
        return int(self.mask.sum())

    def sample(self) -> Sample:
        """The row as a Sample. All rows are in one group, so they are ordered by their tokens, and
        those that share a beginning meet in one micro-batch."""
        return Sample.given(
            self.name, "", self.ids, self.mask, images=self.images, processor=self.processor
        )


class AssistantTokens:
    """Encodes conversations as the module's docstring describes. Raises ModelError for a tokenizer
    without a chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        train_on: TrainOn = "all",
        too_long: Literal["drop", "shorten"] = "drop",
        processor: VisionProcessor | None = None,
        images: Mapping[str, ImageFile] = NO_IMAGES,
    ) -> None:
        """`processor`: the model's, if it sees. `images`: those of the conversations, by digest; it
        may grow."""
        self._chat_template = ChatTemplate(tokenizer)
        self._processor = processor
        self._images = images
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.train_on = train_on
        self.too_long = too_long
        self._special = special_ids(tokenizer)
        special_texts = {*map(str, tokenizer.convert_ids_to_tokens([*self._special]))}
        if processor is not None:
            family = processor.family
            special_texts |= {family.placeholder, family.feature, *processor.vision_texts}
        self._special_texts = sorted(special_texts)
        self._marked = "endgeneration" in str(tokenizer.get_chat_template())
        boundary_ids = {tokenizer.eos_token_id, tokenizer.bos_token_id}
        self._unknown = (
            tokenizer.unk_token_id if tokenizer.unk_token_id not in boundary_ids else None
        )
        self._ends = _end_ids(tokenizer)
        self._next_roles = next_role_marks(self._chat_template)
        """The tokens that end an answer and a message with calls, if the template leaves them to
        the next message."""
        if self._next_roles is not None:
            self._ends.insert(0, set(ids_of_marks(tokenizer, *self._next_roles)))
        self._cuts: dict[int, bool] = {}

    def encode(self, conversation: ChatRow) -> tuple[list[TokenRow], bool]:
        """The conversation's samples, and whether it lost its oldest turns to become short enough.
        Raises RowError."""
        self._check_texts(conversation)
        messages = self._near_limit(conversation.messages)
        shortened = messages is not conversation.messages
        while True:
            parts = self._parts(messages, conversation.tools)
            longest = max(len(ids) for ids, _ in parts)
            if longest <= self.max_tokens:
                return [
                    self._row(conversation.where, ids, mask, messages) for ids, mask in parts
                ], shortened

            rest = _without_oldest_turn(messages) if self.too_long == "shorten" else None
            if rest is None:
                what = "even with its last turn alone" if shortened else "it"
                raise RowError(
                    "too_long",
                    f"{what} has {longest} tokens, the limit is {self.max_tokens} "
                    "(data.max_tokens)",
                )

            messages = rest
            shortened = True

    def _row(self, name: str, ids: list[int], mask: list[bool], messages: Chat) -> TokenRow:
        """`messages`: those that the ids begin with."""
        processor = self._processor
        spans: tuple[ImageSpan, ...] = ()
        if processor is not None and processor.feature_id in ids:
            shown = self._shown(messages)
            ends = [*accumulate(image.num_features for image in shown)]
            count = ids.count(processor.feature_id)
            spans = processor.find_spans(ids, [
                image for image, end in zip(shown, ends, strict=True) if end <= count
            ])  # fmt: skip

        return TokenRow(
            name,
            np.asarray(ids, dtype=np.int32),
            np.asarray(mask, dtype=np.bool_),
            spans,
            processor.fingerprint if processor is not None and spans else "",
        )

    def _shown(self, messages: Chat) -> list[ImageTokens]:
        """The tokens of each image of the messages, in order. Raises RowError for one that can't be
        shown."""
        if self._processor is None:
            return []
        try:
            return [
                self._processor.tokens_of(file_of(digest, self._images))
                for digest in _digests(messages)
            ]
        except ImageError as error:
            raise RowError("image", str(error)) from error

    def _near_limit(self, messages: Chat) -> Chat:
        """The messages, without the oldest turns that make them far too long to be encoded. Raises
        RowError if that is impossible, or not requested."""
        sizes = [_num_characters(message) for message in messages]
        most = CHARACTERS_PER_TOKEN * max(self.max_tokens, LONG_TEXT)
        begins_at = 1 if messages[0]["role"] == "system" else 0
        characters = sum(sizes)
        if characters <= most and len(messages) <= max(self.max_tokens, MANY_MESSAGES):
            return messages

        starts = _later_turns(messages) if self.too_long == "shorten" else []
        # Characters from each message on.
        remaining_characters = [*accumulate(reversed(sizes))][::-1]
        for start in starts:
            few = len(messages) - start < max(self.max_tokens, MANY_MESSAGES)
            if few and sum(sizes[:begins_at]) + remaining_characters[start] <= most:
                return [*messages[:begins_at], *messages[start:]]

        raise RowError(
            "too_long",
            f"it has {len(messages)} messages with {characters} characters, far more than "
            f"{self.max_tokens} tokens (data.max_tokens)",
        )

    def _parts(self, messages: Chat, tools: Chat | None) -> list[tuple[list[int], list[bool]]]:
        """The (ids, mask) of each sample."""
        self._check_nothing_lost(messages, tools)
        parts = (
            [self._marked_tokens(messages, tools)]
            if self._marked and not _digests(messages)
            else self._tokens_by_turn(messages, tools)
        )
        parts = [part for part in parts if any(part[1])]
        if not parts:
            raise RowError("empty", "every message of the assistant has weight 0")

        for ids, mask in parts:
            if self._unknown is not None and self._unknown in ids:
                raise RowError(
                    "unknown_characters",
                    f"the tokenizer has no token for a part of {self.tokenizer.decode(ids)[:80]!r}",
                )

            if mask[0]:
                raise RowError(
                    "template",
                    "it begins with a message of the assistant, which has no context "
                    "to predict it from",
                )

        return parts

    def _tokens_by_turn(
        self, messages: Chat, tools: Chat | None
    ) -> list[tuple[list[int], list[bool]]]:
        parts: list[tuple[list[int], list[bool]]] = []
        answers = [
            place for place, message in enumerate(messages) if message["role"] == "assistant"
        ]
        text = ""
        ids: list[int] = []  # of the text, which is what is known to be answers so far
        for place in answers:
            prompt_text = self._render(messages[:place], tools, prompt=True)
            whole_text = _finish_thought(
                prompt_text, self._render(messages[: place + 1], tools), messages[place]
            )
            if self._next_roles is not None:
                whole_text += self._next_roles[bool(messages[place].get("tool_calls"))]
            prompt = self._encode_after(text, ids, prompt_text)
            whole_ids = self._encode_after(text, ids, whole_text)
            if whole_ids[: len(prompt)] != prompt:
                if not whole_text.startswith(prompt_text):
                    raise RowError(
                        "template",
                        f"message {place + 1}: the template does not begin it with its own "
                        f"generation prompt: edit the template, "
                        "or mark what the assistant says with {% generation %}",
                    )

                whole_ids = [
                    *prompt,
                    *self._encode(whole_text[len(prompt_text) :]),
                ]  # tokens that meet at the border: the policy's begin there

            end = self._end(whole_ids, len(prompt))
            if end is None:
                raise RowError(
                    "template",
                    f"message {place + 1}: the template puts no special token after it, so its "
                    f"end is unknown",
                )

            if not parts or prompt[: len(parts[-1][0])] != parts[-1][0]:
                parts.append(([], []))

            known_ids, known_mask = parts[-1]
            trained = messages[place].get("weight", 1) == 1 and (
                self.train_on == "all" or place == answers[-1]
            )
            known_mask += [False] * (len(prompt) - len(known_ids)) + [trained] * (
                end + 1 - len(prompt)
            )
            known_ids[:] = whole_ids[: end + 1]
            name = str(self.tokenizer.convert_ids_to_tokens(whole_ids[end]))
            start = min(len(prompt_text), whole_text.rindex(name))
            text = whole_text[: whole_text.index(name, start) + len(name)]
            ids = known_ids.copy()

        return parts

    def _end(self, ids: list[int], start: int) -> int | None:
        """The end of the answer that begins at `start`."""
        for ends in self._ends:
            place = next((at for at in range(start, len(ids)) if ids[at] in ends), None)
            if place is not None:
                return place
        special = (at for at in range(start, len(ids)) if ids[at] in self._special)
        return max(special, default=None)

    def _marked_tokens(self, messages: Chat, tools: Chat | None) -> tuple[list[int], list[bool]]:
        """Ids and mask by the template's own `{% generation %}` blocks."""
        encoding = self._template(
            messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = list(encoding["input_ids"])
        mask = [bool(m) for m in encoding["assistant_masks"]]
        runs = [
            list(run)
            for trained, run in groupby(range(len(ids)), key=lambda at: mask[at])
            if trained
        ]
        weights = [
            message.get("weight", 1) for message in messages if message["role"] == "assistant"
        ]
        if len(runs) != len(weights):
            raise RowError(
                "no_assistant_mask",
                f"the template marks {len(runs)} passages for {len(weights)} messages of the "
                "assistant",
            )

        for number, (run, weight) in enumerate(zip(runs, weights, strict=True), start=1):
            if weight == 0 or (self.train_on == "last" and number < len(runs)):
                for at in run:
                    mask[at] = False

        return ids, mask

    def _check_nothing_lost(self, messages: Chat, tools: Chat | None) -> None:
        """Raises RowError if the template leaves out tools, tool calls or thinking: the assistant
        would then learn to call tools that it can't see, or to give an empty answer in place of a
        call. Thinking is checked in the last message only, because templates strip it from earlier
        ones."""
        calling = [place for place, message in enumerate(messages) if "tool_calls" in message]
        thinking = [key for key in REASONING_KEYS if messages[-1].get(key)]
        if thinking and OPENS_THINKING.search(self._render(messages[:-1], tools, prompt=True)):
            thinking = []  # the prompt opens it, and `_finish_thought` writes it
        if not (tools or calling or thinking):
            return

        rendering = self._render(messages, tools)
        missing = ["tools"] if tools and self._is_same(rendering, messages, None) else []
        for place in calling:
            if self._is_same(rendering, _without(messages, "tool_calls", place), tools):
                content_note = " beside a content" if messages[place]["content"] else ""
                missing.append(f"tool_calls{content_note} (message {place + 1})")

        last = len(messages) - 1
        missing += [
            key
            for key in thinking
            if self._is_same(rendering, _without(messages, key, last), tools)
        ]
        if missing:
            raise RowError(
                "template",
                f"the template leaves out {missing[0]}: choose a model whose template supports it",
            )

    def _is_same(self, rendering: str, messages: Chat, tools: Chat | None) -> bool:
        """Whether these messages have this rendering; a template may refuse them."""
        try:
            return rendering == self._render(messages, tools)
        except RowError:
            return False

    def _check_texts(self, conversation: ChatRow) -> None:
        """Raises RowError for a text that spells out a special token: it would be encoded as that
        token, and a turn would end or begin within a message."""
        for number, message in enumerate(
            [*conversation.messages, {"tools": conversation.tools}], start=1
        ):
            text = json.dumps(message, ensure_ascii=False, default=str)
            tags = THOUGHT_TAGS if message.get("role") == "assistant" else ()
            special = next((t for t in self._special_texts if t in text and t not in tags), None)
            if special is not None:
                where = f"message {number}" if number <= len(conversation.messages) else "tools"
                raise RowError(
                    "special_token",
                    f"{where}: has {special} in its text, which would be encoded as that token: "
                    "remove it",
                )

    def _render(self, messages: Chat, tools: Chat | None, *, prompt: bool = False) -> str:
        text = str(self._template(messages, tools, tokenize=False, add_generation_prompt=prompt))
        if self._processor is None or not (shown := self._shown(messages)):
            return text
        try:
            return self._processor.expand(text, shown)
        except ModelError as error:
            raise RowError("template", str(error)) from error

    def _template(self, messages: Chat, tools: Chat | None, **options: Any) -> Any:
        template_messages = cast(Chat, self._chat_template.to_call_form(messages))
        if self._processor is not None:
            template_messages = cast(Chat, self._processor.template.parts_of(template_messages))
        try:
            return self.tokenizer.apply_chat_template(
                template_messages, tools=cast(Any, tools), **options
            )
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(message["role"] for message in messages)
            raise RowError(
                "template", f"the chat template refuses a conversation of {roles}: {error}"
            ) from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _encode_after(self, known_text: str, known_ids: list[int], text: str) -> list[int]:
        """Encodes `text`, reusing the known ids of its beginning up to a special token."""
        if known_ids and text.startswith(known_text) and self._is_cut(known_ids[-1]):
            return [*known_ids, *self._encode(text[len(known_text) :])]
        return self._encode(text)

    def _is_cut(self, token: int) -> bool:
        """Whether the text after this token is encoded the same on its own. It is not if the
        tokenizer puts a blank before each text, or if the token absorbs the white space after
        it."""
        if token not in self._cuts:
            name = str(self.tokenizer.convert_ids_to_tokens(token))
            texts = ("\n", "one two", "\none", " one", "12")
            self._cuts[token] = all(
                self._encode(name + text) == [token, *self._encode(text)] for text in texts
            )
        return self._cuts[token]


def _finish_thought(prompt: str, rendering: str, message: dict[str, Any]) -> str:
    """The `rendering` of a conversation that ends with the assistant's `message`, with the
    message's thought after a prompt that opens a thought, or has an empty one, which the rendering
    leaves out."""
    if rendering.startswith(prompt):
        return rendering

    empty = EMPTY_THOUGHT.search(prompt)
    if empty is not None:
        before = prompt[: empty.start()]
        answer = rendering.removeprefix(before)
        has_thought = answer.startswith(tuple(THOUGHTS))
        return prompt + answer if rendering.startswith(before) and not has_thought else rendering

    opening = OPENS_THINKING.search(prompt)
    if opening is None:
        return rendering

    before = prompt[: opening.start()]
    answer = rendering.removeprefix(before)
    if not rendering.startswith(before):
        return rendering

    if answer.startswith("<think></think>"):  # as a template writes it in a history
        answer = answer.removeprefix("<think></think>")
    elif answer.startswith("<think>"):
        # Otherwise the thought is the template's, which is to agree.
        content_has_thought = message["content"].startswith("<think>")
        return prompt + answer.removeprefix("<think>") if content_has_thought else rendering

    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
    thought, rest = thought_of(message["content"], reasoning, opening.group())
    gap = rest[: len(rest) - len(rest.lstrip())] if thought.endswith("</think>") else ""
    return prompt + thought + ("" if answer.startswith(gap) else gap) + answer


def _end_ids(tokenizer: PreTrainedTokenizerBase) -> list[set[int]]:
    """Tokens that end an answer: the one that the template puts there, then the tokenizer's own."""
    try:
        of_template = {end_of_turn_id(tokenizer)}
    except ModelError:  # it ends answers in more than one way
        of_template = set()
    declared = tokenizer.eos_token_id
    return [of_template, set() if declared is None else {declared}]


def _without(messages: Chat, key: str, place: int) -> Chat:
    """The messages, one of them without a key."""
    rest = {name: value for name, value in messages[place].items() if name != key}
    return [*messages[:place], rest, *messages[place + 1 :]]


def _without_oldest_turn(messages: Chat) -> Chat | None:
    """The messages without those between the system message and the user's second message; None
    if only one turn is left."""
    later = next(iter(_later_turns(messages)), None)
    start = 1 if messages[0]["role"] == "system" else 0
    return None if later is None else [*messages[:start], *messages[later:]]


def _later_turns(messages: Chat) -> list[int]:
    """The places where the user begins a turn after the first one."""
    start = 1 if messages[0]["role"] == "system" else 0
    return [
        place
        for place, message in enumerate(messages)
        if message["role"] == "user" and place > start and messages[place - 1]["role"] != "user"
    ]


def _digests(messages: Chat) -> list[str]:
    """The images of the messages, in order and with repetitions."""
    contents = [message["content"] for message in messages]
    return [
        part["sha256"]
        for content in contents
        if isinstance(content, list)
        for part in content
        if part["type"] == "image"
    ]


def _num_characters(message: dict[str, Any]) -> int:
    return len(str(message.get("content") or ""))
