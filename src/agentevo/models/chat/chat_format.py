"""Chat messages -> token ids, one turn at a time, without ever re-encoding the model's own text.

Over an episode the policy sees the ids

    first_prompt(messages) + completion + continuation(new messages) + completion + ...

and every completion keeps exactly the ids that the engine sampled. A continuation is the text that
the chat template puts after an assistant message. To find it, the template renders a conversation
with a sentinel in the assistant's place, and the text after the sentinel is encoded. A template may
strip the model's thinking from old turns, because old turns are never rendered. If a tool's result
follows, the assistant's message is a tool call with the sentinel among its arguments, provided that
the template supports calls: some templates end such a message differently, or refuse results
without a call.

Harmony's templates (GPT-OSS) end an answer with <|return|> if it is the last message and with
<|end|> in a history, and let the model choose the channel. The sampled <|return|> or <|call|> is
kept instead of the template's token. <|end|> does not end an answer, because a thought ends with
it.

If a template rewrites earlier text, no continuation exists. Such a template is refused at
construction, and tools that it moves are refused at their first use (history_check.py). One
mismatch remains: if a completion ends in the middle of a word, the template's rendering might merge
its last characters with the end-of-turn text. Special tokens, which all common templates use there,
never merge.

Images of messages need a model that sees (models/vision/processor.py). Its template writes one
placeholder for each, in whose place the tokens of the image are encoded. `image_spans` finds them
among the ids. Equal messages have equal images, since a message names an image by its digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING

from transformers import GenerationConfig, PreTrainedTokenizerBase

from agentevo.data.message_markers import CUT, encode_rendering
from agentevo.errors import BadRequestError, ModelError
from agentevo.models.chat.call_notation import CallNotation, call_notation
from agentevo.models.chat.chat_template import (
    NO_TOOLS,
    OWN_VALUES,
    ChatTemplate,
    TemplateValues,
    ToolSchemas,
)
from agentevo.models.chat.history_check import check_history
from agentevo.models.chat.model_template import begins_texts_with_bos
from agentevo.models.chat.prompt_thoughts import OPENS_THINKING, thought_of
from agentevo.models.chat.template_variables import why_refused
from agentevo.models.chat.text_stream import TextStream, before_stop
from agentevo.models.chat.token_texts import TokenTexts
from agentevo.models.chat.turn_ends import (
    ENDS_BY_FAMILY,
    PROBE_ANSWER,
    PROBE_USER,
    after,
    ids_of_marks,
    next_role_id,
    refusal,
    turn_ends,
)
from agentevo.models.token_rows import num_tokens
from agentevo.models.tool_calls import ToolCallParser, find_parser
from agentevo.models.tool_calls.parser import HARMONY, THOUGHTS
from agentevo.types import Message, ToolCall
from agentevo.types.image_span import ImageSpan
from agentevo.types.images import ImageFile, file_of, images_of_messages

if TYPE_CHECKING:
    from agentevo.models.files.load import LoadedModel
    from agentevo.models.vision.processor import ImageTokens, VisionProcessor

NO_IMAGES: Mapping[str, ImageFile] = MappingProxyType({})
CACHED_MESSAGES = 8192
"""The number of cached encodings of messages."""
CACHED_VARIANTS = 64
"""The number of cached chat formats with other values of the template's variables."""
LONG_TEXT = 50_000
"""The number of characters that take about 10 ms to encode. Longer texts are not cached."""
_SYSTEM = "probesystem"
_TAIL = max(map(len, THOUGHTS)) + len("\n")
"""The most tokens that the beginning of a thought can have."""


def chat_of(loaded: LoadedModel) -> ChatFormat:
    """The chat format of a loaded model. Raises ModelError for a chat template that can't be
    continued turn by turn."""
    generation = getattr(loaded.model, "generation_config", None)
    return ChatFormat(loaded.tokenizer, generation, processor=loaded.processor)


def num_characters(messages: Sequence[Message]) -> int:
    """The number of characters in the messages' texts."""
    return sum(
        len(message.text)
        + len(message.reasoning or "")
        + sum(len(call.arguments) for call in message.tool_calls)
        for message in messages
    )


def is_long(messages: Sequence[Message], images: Sequence[ImageTokens] = ()) -> bool:
    """Whether the messages are too long to encode on the event loop, and to cache. `images`: the
    tokens of their images."""
    return num_characters(messages) + sum(len(image.text) for image in images) > LONG_TEXT


class ChatFormat:
    """Token-exact multi-turn encoding with one tokenizer's chat template. Raises `ModelError` if
    the template can't be continued."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        generation_config: GenerationConfig | None = None,
        template: ChatTemplate | None = None,
        processor: VisionProcessor | None = None,
    ) -> None:
        """`template`: the tokenizer's, with values of its variables. `processor`: the model's, if
        it sees; without it, messages with images are refused."""
        self.tokenizer = tokenizer
        self._generation_config = generation_config
        self.processor = processor
        if template is None:
            template = ChatTemplate(tokenizer) if processor is None else processor.template
        self._template = template
        declared = [
            *ids_of_marks(tokenizer, *ENDS_BY_FAMILY.get(self.parser.name, ())),
            *_eos_ids(tokenizer.eos_token_id),
            *_eos_ids(getattr(generation_config, "eos_token_id", None)),
        ]
        next_role = next_role_id(self._template)
        self._ends_at_next_role = next_role is not None and next_role in declared
        """Whether the token that begins the next message ends an answer (GLM)."""
        if next_role is not None and self._ends_at_next_role:
            self.end_of_turn_id = self._end_in_history = next_role
        else:
            self.end_of_turn_id, self._end_in_history = turn_ends(self._template)
        within = {self._end_in_history} - {self.end_of_turn_id}
        self.end_ids = tuple(sorted({self.end_of_turn_id, *declared} - within))
        """The ids that end a completion. They are the engine's stop tokens."""
        self._omitted_header = ""
        """The text before an answer that the template's generation prompt leaves out, so that the
        policy writes it."""
        # Members of a group meet the same environments, so the same messages come again and again.
        self._first_prompt = lru_cache(CACHED_MESSAGES)(self._compute_first_prompt)
        self._continuation = lru_cache(CACHED_MESSAGES)(self._compute_continuation)
        self._tools_problem = lru_cache(CACHED_MESSAGES)(self._probe_tools)
        self._variant = lru_cache(CACHED_VARIANTS)(self._make_variant)
        self.opening = self._check_history([PROBE_USER])
        """The generation prompt's text after the header of a finished message: "" or the
        beginning of a thought, such as "<think>\\n"."""
        self.system_problem = self._probe_system()
        """Why conversations with a system message can't be continued, or None."""

    @cached_property
    def longest_token(self) -> int:
        """The most characters in one token. A text's length divided by this is a lower bound of its
        number of tokens."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    @cached_property
    def num_tokens(self) -> int:
        """The number of token ids. All ids of a prompt are smaller."""
        return num_tokens(self.tokenizer)

    @property
    def variables(self) -> frozenset[str]:
        """The variables of the template that a request may set."""
        return self._template.variables

    def with_values(self, values: TemplateValues) -> ChatFormat:
        """The chat format of requests that give the template's variables other values than the
        model's section. Raises BadRequestError for variables that the template does not read, and
        for values with which it can't be continued."""
        return self if values == OWN_VALUES else self._variant(values)

    def _make_variant(self, values: TemplateValues) -> ChatFormat:
        problem = why_refused(json.loads(values.as_json), self.variables)
        if problem is not None:
            raise BadRequestError(f"chat_template_kwargs: {problem}")

        try:
            template = self._template.with_values(values)
            variant = ChatFormat(self.tokenizer, self._generation_config, template, self.processor)
        except ModelError as error:
            raise BadRequestError(f"chat_template_kwargs: with these values, {error}") from error
        if variant.end_ids != self.end_ids:
            raise BadRequestError(
                "chat_template_kwargs: with these values, the template ends an answer with other "
                "tokens: set them as model.template"
            )
        return variant

    def first_prompt(
        self,
        messages: Sequence[Message],
        tools: ToolSchemas = NO_TOOLS,
        images: Mapping[str, ImageFile] = NO_IMAGES,
    ) -> list[int]:
        """The ids of a new conversation, up to the start of the assistant's answer. `images`: maps
        a digest to the image, for each image of the messages. Raises ModelError for images if the
        model does not see, and ImageError for one that is missing or damaged."""
        shown = self._tokens_of(messages, images)
        encode = self._compute_first_prompt if is_long(messages, shown) else self._first_prompt
        return list(encode(tuple(messages), tools, shown))

    def continuation(
        self,
        messages: Sequence[Message],
        *,
        ended_with_stop: bool,
        tools: ToolSchemas = NO_TOOLS,
        images: Mapping[str, ImageFile] = NO_IMAGES,
    ) -> list[int]:
        """The ids to append after a completion, up to the start of the assistant's next answer.
        Without messages, the assistant answers again directly.

        `ended_with_stop`: the completion's last id is one of `end_ids`; the end-of-turn token is
        then not repeated. False if a limit cut it off or a stop string ended it: then the
        end-of-turn token is part of the continuation. `images`: see `first_prompt`.
        """
        shown = self._tokens_of(messages, images)
        encode = self._compute_continuation if is_long(messages, shown) else self._continuation
        return list(encode(tuple(messages), tools, ended_with_stop, shown))

    def image_spans(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        images: Mapping[str, ImageFile] = NO_IMAGES,
    ) -> tuple[ImageSpan, ...]:
        """The images of these messages among the ids that `first_prompt` or `continuation` returned
        for them, in order."""
        if self.processor is None:
            return ()
        return self.processor.find_spans(ids, self._tokens_of(messages, images))

    @property
    def fingerprint(self) -> str:
        """What the tokens and pixels of images depend on; empty for a model that reads text
        only."""
        return "" if self.processor is None else self.processor.fingerprint

    def knows_images(self, messages: Sequence[Message]) -> bool:
        """Whether no image of the messages has to be decoded to find its tokens."""
        processor = self.processor
        return processor is None or all(
            processor.knows(part.sha256) for part in images_of_messages(messages)
        )

    def _tokens_of(
        self, messages: Sequence[Message], images: Mapping[str, ImageFile]
    ) -> tuple[ImageTokens, ...]:
        """The tokens of each image of the messages, in order."""
        processor = self.processor
        if processor is None:
            return ()
        return tuple(
            processor.tokens_of(file_of(part.sha256, images))
            for part in images_of_messages(messages)
        )

    def has_ended(
        self,
        last_id: int,
        messages: Sequence[Message],
        tools: ToolSchemas = NO_TOOLS,
        images: Mapping[str, ImageFile] = NO_IMAGES,
    ) -> bool:
        """Whether a completion with this last id has ended with the token that the continuation
        with these messages would begin with (`ended_with_stop`)."""
        if not self._ends_at_next_role:
            return last_id in self.end_ids
        following = self.continuation(messages, ended_with_stop=False, tools=tools, images=images)
        return last_id == following[0]

    def completion(self, message: Message) -> list[int]:
        """The ids of an assistant's message that the policy did not sample (a demonstration), in
        the form in which the policy would sample it, including the end-of-turn token."""
        if any(images_of_messages([message])):
            raise ModelError(
                "a message of the assistant holds an image, and a policy writes text only: give "
                "images to the user's messages or to results of tools"
            )

        end = self.end_of_turn_id
        if message.tool_calls or message.reasoning is not None:
            text, end = self._written_with_end(message)
        else:
            text = self._omitted_header + self._template.markers.cut(message.text, "assistant")

        if OPENS_THINKING.search(self.opening):
            thought, text = thought_of(text, message.reasoning, self.opening)
            text = thought + text

        return [*self._encode(text), end]

    def plain(self, text: str, *, begins: bool = True) -> list[int]:
        """The ids of a text outside of a chat. If the text `begins` a context, it gets the
        tokenizer's first token, unless it has that token already."""
        ids = self._encode(text)
        if begins and begins_texts_with_bos(self.tokenizer):
            start = self.tokenizer.bos_token_id
            return ids if ids[:1] == [start] else [start, *ids]
        return ids

    def text(self, completion_ids: Sequence[int], stop_strings: Sequence[str] = ()) -> str:
        """The text of a completion without the token that ends it, up to the first of
        `stop_strings`. Special tokens stay: several families write their tool calls with them
        (models/tool_calls)."""
        ids = (
            list(completion_ids[:-1])
            if completion_ids and completion_ids[-1] in self.end_ids
            else list(completion_ids)
        )
        text = str(self.tokenizer.decode(ids, skip_special_tokens=False))
        return before_stop(text, stop_strings)

    def text_stream(self, stop_strings: Sequence[str] = ()) -> TextStream:
        """A stream of the text of one completion while its tokens arrive. The pieces add up to
        `text(ids, stop_strings)`."""
        return TextStream(
            self.tokenizer,
            end_ids=self.end_ids,
            stop_strings=stop_strings,
            decode=lambda ids: self.text(ids, stop_strings),
        )

    @cached_property
    def parser(self) -> ToolCallParser:
        """The parser for tool calls and reasoning in the notation of the model's family."""
        return find_parser(str(self.tokenizer.get_chat_template()))

    @cached_property
    def call_notation(self) -> CallNotation | None:
        """The notation of tool calls in the model's family. None if calls are not JSON after a
        name."""
        return call_notation(self.parser, self._written)

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """The added tokens, such as "<tool_call>", and their ids."""
        return dict(self.tokenizer.get_added_vocab())

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of single tokens."""
        return TokenTexts(self.tokenizer)

    def opening_of(self, prompt_ids: Sequence[int]) -> str:
        """The part of this prompt that is in the assistant's place: `opening`, the beginning of a
        thought (which a template may write for some values of its variables), or an empty text."""
        end = str(self.tokenizer.decode(list(prompt_ids[-max(len(self.opening), _TAIL) - 1 :])))
        if self.opening and end.endswith(self.opening):
            return self.opening
        begun = end.rstrip()
        mark = next((mark for mark in self.parser.thoughts if begun.endswith(mark)), None)
        return "" if mark is None else mark + end[len(begun) :]

    def opening_after(self, messages: Sequence[Message]) -> str:
        """The part of the prompt of these messages that is in the assistant's place. After the
        result of a tool, some templates leave `opening` out or open a thought (Gemma 4)."""
        after_result = bool(messages) and messages[-1].role == "tool"
        return self._opening_after_result if after_result else self.opening

    @cached_property
    def _opening_after_result(self) -> str:
        result = Message("tool", PROBE_ANSWER, name="probename", tool_call_id="probe0000")
        try:
            return self.opening_of(self.continuation([result], ended_with_stop=False))
        except ModelError:
            return self.opening

    def _compute_first_prompt(
        self, messages: tuple[Message, ...], tools: ToolSchemas, images: tuple[ImageTokens, ...]
    ) -> list[int]:
        if not messages:
            raise ModelError("a conversation needs at least one message")

        problem = self._tools_problem(tools) if tools != NO_TOOLS else None
        if problem is None and any(message.role == "system" for message in messages):
            problem = self.system_problem
        if problem is not None:
            raise ModelError(problem)
        return self._encode(self._template.render(messages, prompt=True, tools=tools), images)

    def _compute_continuation(
        self,
        messages: tuple[Message, ...],
        tools: ToolSchemas,
        ended_with_stop: bool,
        images: tuple[ImageTokens, ...],
    ) -> list[int]:
        role = messages[0].role if messages else "assistant"
        ids = self._after_tool_calls(messages, tools, images) if role == "tool" else None
        if ids is None:
            answered = [PROBE_USER, Message("assistant", PROBE_ANSWER), *messages]
            text = self._template.render(answered, prompt=True, tools=tools)
            ids = self._encode(after(PROBE_ANSWER, text), images)
            if self._ends_at_next_role:
                return ids[1:] if ended_with_stop else ids
            if self._end_in_history not in ids:
                raise ModelError(
                    refusal(
                        "it does not end an assistant's message that is followed by one of role "
                        f"{role}"
                    )
                )

            if ended_with_stop:
                return ids[ids.index(self._end_in_history) + 1 :]

            return ids

        return ids[1:] if ended_with_stop else ids

    def _after_tool_calls(
        self,
        messages: tuple[Message, ...],
        tools: ToolSchemas,
        images: tuple[ImageTokens, ...] = (),
    ) -> list[int] | None:
        """The text after an assistant's message with tool calls, from the token that ends the
        message. None if the template does not render calls, or has no token that ends them."""
        results = list(takewhile(lambda message: message.role == "tool", messages))
        ids = self._after_calls_named("probename", results, messages, tools, images)
        unnamed = ids is not None and any(result.name is None for result in results)
        if unnamed and ids != self._after_calls_named(
            "probeother", results, messages, tools, images
        ):
            raise ModelError(
                "the chat template writes the name of the tool with its result: give it with the "
                'message, as in {"role": "tool", "name": "search", "content": "..."}'
            )

        return ids

    def _after_calls_named(
        self,
        name: str,
        results: list[Message],
        messages: tuple[Message, ...],
        tools: ToolSchemas,
        images: tuple[ImageTokens, ...],
    ) -> list[int] | None:
        calls = tuple(
            ToolCall(
                result.name or name,
                json.dumps({"a": PROBE_ANSWER}),
                result.tool_call_id or f"probe{number:04d}",
            )
            for number, result in enumerate(results)
        )
        conversation = [PROBE_USER, Message("assistant", "", calls), *messages]
        try:
            text = self._template.render(conversation, prompt=True, tools=tools)
        except ModelError:
            return None

        pieces = text.split(PROBE_ANSWER, len(calls))
        if len(pieces) <= len(calls):
            return None

        ids = self._encode(pieces[-1], images)
        end = next((place for place, token in enumerate(ids) if token in self.end_ids), None)
        return None if end is None else ids[end:]

    def _written(self, message: Message) -> str:
        """The text that the template renders for an assistant's message with tool calls or
        reasoning."""
        return self._written_with_end(message)[0]

    def _written_with_end(self, message: Message) -> tuple[str, int]:
        """As `_written`, with the token that ends the message."""
        prompt = self._template.render([PROBE_USER], prompt=True).removesuffix(self.opening)
        rendered = self._template.render([PROBE_USER, message], prompt=False)
        answer = rendered.removeprefix(prompt)
        ends = [self.end_of_turn_id, *(self.end_ids if self._omitted_header else ())]
        if message.tool_calls:
            ends += self._ends_of_calls
        marks = map(str, self.tokenizer.convert_ids_to_tokens(ends))
        cuts = ((*answer.rpartition(mark)[:2], end) for mark, end in zip(marks, ends, strict=True))
        text, found_mark, end = next((cut for cut in cuts if cut[1]), ("", "", ends[0]))
        if self._ends_at_next_role:
            end = self._ends_of_calls[0] if message.tool_calls else self.end_of_turn_id
            text, found_mark = answer, answer
        if not rendered.startswith(prompt) or not found_mark:
            raise ModelError(
                "the chat template begins or ends an assistant's message with tool calls or "
                "reasoning differently from its own generation prompt: edit the template"
            )

        opens = OPENS_THINKING.search(self.opening) is not None
        thought = self._template.markers.cut(message.reasoning or "", "assistant").strip()
        if thought not in text and not opens:
            raise ModelError(
                "the chat template leaves out the reasoning: choose a model whose template has a "
                "place for it, or write it into the content"
            )

        return text, end

    @cached_property
    def _ends_of_calls(self) -> list[int]:
        """The token that ends a message with tool calls in a history, if it is known."""
        ids = self._after_tool_calls((Message("tool", PROBE_ANSWER, name="probename"),), NO_TOOLS)
        return [] if ids is None else ids[:1]

    def _encode(self, text: str, images: Sequence[ImageTokens] = ()) -> list[int]:
        """`images`: the tokens of the images whose placeholders the text has, in order."""
        if images and self.processor is not None:
            text = self.processor.expand(text, images)
        ids = encode_rendering(self.tokenizer, text)
        text = text.replace(CUT, "")
        unknown = self.tokenizer.unk_token_id
        if unknown is not None and unknown in ids and self.tokenizer.unk_token not in text:
            unknown_chars = sorted(
                {
                    char
                    for char in set(text)
                    if unknown in self.tokenizer.encode(char, add_special_tokens=False)
                }
            )
            raise ModelError(
                "the tokenizer has no token for "
                f"{' '.join(map(repr, unknown_chars)) or 'part of the text'} in {text[-200:]!r}: "
                "use only characters that it knows, or use model.tiny.tokenizer=byte"
            )

        return ids

    def _check_history(self, start: list[Message], tools: ToolSchemas = NO_TOOLS) -> str:
        """See history_check.py. Returns the text that the generation prompt opens an answer
        with."""
        place = check_history(self._template, start, tools, is_harmony=self.parser.name == HARMONY)
        self._omitted_header = place.omitted_header or self._omitted_header
        return place.opening

    def _probe_system(self) -> str | None:
        """Why conversations with a system message can't be continued, or None. Other conversations
        are not affected."""
        try:
            self._check_history([Message("system", _SYSTEM), PROBE_USER])
        except ModelError as error:
            return (
                f"with a system message: {error}; leave it out, or put its text into the first "
                "user message"
            )

        return None

    def _probe_tools(self, tools: ToolSchemas) -> str | None:
        """Why conversations with these tools can't be continued, or None."""
        try:
            self._template.check_tools(tools)
            self._check_history([PROBE_USER], tools)
        except ModelError as error:
            return f"with tools: {error}"
        return None


def _eos_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
