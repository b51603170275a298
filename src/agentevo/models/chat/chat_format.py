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

If a template rewrites earlier text (numbers the turns, moves the system message, drops old
messages), no continuation exists. Such a template is refused at construction, and tools that it
moves are refused at their first use. One mismatch remains: if a completion ends in the middle of a
word, the template's rendering might merge its last characters with the end-of-turn text. Special
tokens, which all common templates use there, never merge.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
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
from agentevo.models.chat.model_template import begins_texts_with_bos
from agentevo.models.chat.prompt_thoughts import EMPTY_THOUGHT, OPENS_THINKING, thought_of
from agentevo.models.chat.template_variables import why_refused
from agentevo.models.chat.text_stream import TextStream, before_stop
from agentevo.models.chat.token_texts import TokenTexts
from agentevo.models.token_rows import num_tokens
from agentevo.models.tool_calls import ToolCallParser, find_parser
from agentevo.models.tool_calls.families import GEMMA, GLM
from agentevo.models.tool_calls.harmony import ENDS as HARMONY_ENDS
from agentevo.models.tool_calls.parser import HARMONY, THOUGHTS
from agentevo.types import Message, ToolCall

if TYPE_CHECKING:
    from agentevo.models.vision.processor import VisionProcessor

CACHED_MESSAGES = 8192
"""The number of cached encodings of messages."""
CACHED_VARIANTS = 64
"""The number of cached chat formats with other values of the template's variables."""
LONG_TEXT = 50_000
"""The number of characters that take about 10 ms to encode. Longer texts are not cached."""
_FIRST = "probefirst"
_SECOND = "probesecond"
_ASKED = "probequestion"
_SYSTEM = "probesystem"
_USER = Message("user", _ASKED)
_TAIL = max(map(len, THOUGHTS)) + len("\n")
"""The most tokens that the beginning of a thought can have."""
_ENDS_BY_FAMILY = {
    HARMONY: ("<|return|>", "<|call|>"),
    GEMMA: ("<|tool_response>",),
    GLM: ("<|user|>", "<|observation|>"),
}
"""Parser -> the tokens that end answers in its family, beside the declared ones."""


def num_characters(messages: Sequence[Message]) -> int:
    """The number of characters in the messages' texts."""
    return sum(
        len(message.text)
        + len(message.reasoning or "")
        + sum(len(call.arguments) for call in message.tool_calls)
        for message in messages
    )


def is_long(messages: Sequence[Message]) -> bool:
    """Whether the messages are too long to encode on the event loop, and to cache."""
    return num_characters(messages) > LONG_TEXT


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
        """`template`: the tokenizer's, with values of its variables."""
        self.tokenizer = tokenizer
        self._generation_config = generation_config
        self.processor = processor
        self._template = ChatTemplate(tokenizer) if template is None else template
        declared = [
            *ids_of_marks(tokenizer, *_ENDS_BY_FAMILY.get(self.parser.name, ())),
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
        self.opening = self._check_history([_USER])
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
            variant = ChatFormat(self.tokenizer, self._generation_config, template)
        except ModelError as error:
            raise BadRequestError(f"chat_template_kwargs: with these values, {error}") from error
        if variant.end_ids != self.end_ids:
            raise BadRequestError(
                "chat_template_kwargs: with these values, the template ends an answer with other "
                "tokens: set them as model.template"
            )
        return variant

    def first_prompt(self, messages: Sequence[Message], tools: ToolSchemas = NO_TOOLS) -> list[int]:
        """The ids of a new conversation, up to the start of the assistant's answer."""
        encode = self._compute_first_prompt if is_long(messages) else self._first_prompt
        return list(encode(tuple(messages), tools))

    def continuation(
        self, messages: Sequence[Message], *, ended_with_stop: bool, tools: ToolSchemas = NO_TOOLS
    ) -> list[int]:
        """The ids to append after a completion, up to the start of the assistant's next answer.
        Without messages, the assistant answers again directly.

        `ended_with_stop`: the completion's last id is one of `end_ids`; the end-of-turn token is
        then not repeated. False if a limit cut it off or a stop string ended it: then the
        end-of-turn token is part of the continuation.
        """
        encode = self._compute_continuation if is_long(messages) else self._continuation
        return list(encode(tuple(messages), tools, ended_with_stop))

    def has_ended(
        self, last_id: int, messages: Sequence[Message], tools: ToolSchemas = NO_TOOLS
    ) -> bool:
        """Whether a completion with this last id has ended with the token that the continuation
        with these messages would begin with (`ended_with_stop`)."""
        if self._ends_at_next_role:
            return last_id == self.continuation(messages, ended_with_stop=False, tools=tools)[0]
        return last_id in self.end_ids

    def completion(self, message: Message) -> list[int]:
        """The ids of an assistant's message that the policy did not sample (a demonstration), in
        the form in which the policy would sample it, including the end-of-turn token."""
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
        result = Message("tool", _FIRST, name="probename", tool_call_id="probe0000")
        try:
            return self.opening_of(self.continuation([result], ended_with_stop=False))
        except ModelError:
            return self.opening

    def _compute_first_prompt(self, messages: tuple[Message, ...], tools: ToolSchemas) -> list[int]:
        if not messages:
            raise ModelError("a conversation needs at least one message")

        problem = self._tools_problem(tools) if tools != NO_TOOLS else None
        if problem is None and any(message.role == "system" for message in messages):
            problem = self.system_problem
        if problem is not None:
            raise ModelError(problem)
        return self._encode(self._template.render(messages, prompt=True, tools=tools))

    def _compute_continuation(
        self, messages: tuple[Message, ...], tools: ToolSchemas, ended_with_stop: bool
    ) -> list[int]:
        role = messages[0].role if messages else "assistant"
        ids = self._after_tool_calls(messages, tools) if role == "tool" else None
        if ids is None:
            answered = [_USER, Message("assistant", _FIRST), *messages]
            text = self._template.render(answered, prompt=True, tools=tools)
            ids = self._encode(_after(_FIRST, text))
            if self._ends_at_next_role:
                return ids[1:] if ended_with_stop else ids
            if self._end_in_history not in ids:
                raise ModelError(
                    _refusal(
                        "it does not end an assistant's message that is followed by one of role "
                        f"{role}"
                    )
                )

            if ended_with_stop:
                return ids[ids.index(self._end_in_history) + 1 :]

            return ids

        return ids[1:] if ended_with_stop else ids

    def _after_tool_calls(
        self, messages: tuple[Message, ...], tools: ToolSchemas
    ) -> list[int] | None:
        """The text after an assistant's message with tool calls, from the token that ends the
        message. None if the template does not render calls, or has no token that ends them."""
        results = list(takewhile(lambda message: message.role == "tool", messages))
        ids = self._after_calls_named("probename", results, messages, tools)
        unnamed = ids is not None and any(result.name is None for result in results)
        if unnamed and ids != self._after_calls_named("probeother", results, messages, tools):
            raise ModelError(
                "the chat template writes the name of the tool with its result: give it with the "
                'message, as in {"role": "tool", "name": "search", "content": "..."}'
            )

        return ids

    def _after_calls_named(
        self, name: str, results: list[Message], messages: tuple[Message, ...], tools: ToolSchemas
    ) -> list[int] | None:
        calls = tuple(
            ToolCall(
                result.name or name,
                json.dumps({"a": _FIRST}),
                result.tool_call_id or f"probe{number:04d}",
            )
            for number, result in enumerate(results)
        )
        conversation = [_USER, Message("assistant", "", calls), *messages]
        try:
            text = self._template.render(conversation, prompt=True, tools=tools)
        except ModelError:
            return None

        pieces = text.split(_FIRST, len(calls))
        if len(pieces) <= len(calls):
            return None

        ids = self._encode(pieces[-1])
        end = next((place for place, token in enumerate(ids) if token in self.end_ids), None)
        return None if end is None else ids[end:]

    def _written(self, message: Message) -> str:
        """The text that the template renders for an assistant's message with tool calls or
        reasoning."""
        return self._written_with_end(message)[0]

    def _written_with_end(self, message: Message) -> tuple[str, int]:
        """As `_written`, with the token that ends the message."""
        prompt = self._template.render([_USER], prompt=True).removesuffix(self.opening)
        rendered = self._template.render([_USER, message], prompt=False)
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
        ids = self._after_tool_calls((Message("tool", _FIRST, name="probename"),), NO_TOOLS)
        return [] if ids is None else ids[:1]

    def _encode(self, text: str) -> list[int]:
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
        """Checks that the template only appends when a conversation grows. `start`: the messages
        before the first assistant's. Returns the part of the generation prompt that follows the
        header of a finished message, such as an opening <think>."""

        def render(messages: list[Message], *, prompt: bool) -> str:
            return self._template.render([*start, *messages], prompt=prompt, tools=tools)

        first = Message("assistant", _FIRST)
        second = Message("assistant", _SECOND)
        generation = render([], prompt=True)
        once = render([first, _USER], prompt=True)
        twice = render([first, _USER, second, _USER], prompt=True)

        header, sentinel, after_first = once.partition(_FIRST)
        omitted = header[len(generation) :] if header.startswith(generation) else ""
        is_thought = not omitted.strip() or EMPTY_THOUGHT.fullmatch(omitted.lstrip())
        if omitted and (self.parser.name == HARMONY or is_thought):
            self._omitted_header = omitted
            header = generation
        elif not generation.startswith(header):  # the thought of a finished message is left out
            header = EMPTY_THOUGHT.sub("", header)

        if not sentinel or not generation.startswith(header):
            raise ModelError(
                _refusal(
                    "[user, assistant, user] does not begin with the rendering of [user] and the "
                    "generation prompt"
                )
            )

        if not twice.startswith(once.removesuffix(generation[len(header) :])):
            raise ModelError(_refusal("a longer conversation does not begin with the shorter one"))

        if _after(_SECOND, twice) != after_first:
            raise ModelError(
                _refusal(
                    "what follows an assistant's message depends on how many turns came before"
                )
            )

        return generation[len(header) :]

    def _probe_system(self) -> str | None:
        """Why conversations with a system message can't be continued, or None. Other conversations
        are not affected."""
        try:
            self._check_history([Message("system", _SYSTEM), _USER])
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
            self._check_history([_USER], tools)
        except ModelError as error:
            return f"with tools: {error}"
        return None


def next_role_id(template: ChatTemplate) -> int | None:
    """The special token right after an assistant's message that another message follows, in a
    template that ends the last message with nothing. None for other templates."""
    tokenizer = template.tokenizer
    conversation = [_USER, Message("assistant", _FIRST)]
    if _after(_FIRST, template.render(conversation, prompt=False)).strip():
        return None

    text = _after(_FIRST, template.render([*conversation, _USER], prompt=True))
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if ids and ids[0] in special_ids(tokenizer) else None


def next_role_marks(template: ChatTemplate) -> tuple[str, str] | None:
    """The tokens that end an answer and a message with tool calls, in a family whose template
    leaves the end of a message to the beginning of the next one. None for other templates."""
    if find_parser(str(template.tokenizer.get_chat_template())).name != GLM:
        return None
    answer, calls = _ENDS_BY_FAMILY[GLM]
    known = ids_of_marks(template.tokenizer, answer, calls)
    return (answer, calls) if len(known) == 2 and next_role_id(template) in known else None


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The first special token after an assistant's message. It must be the same whether or not
    another message follows. Raises ModelError if there is none."""
    last, in_history = turn_ends(ChatTemplate(tokenizer))
    if last != in_history:
        raise ModelError(
            _refusal("it ends an assistant's message differently once another message follows")
        )
    return last


def turn_ends(template: ChatTemplate) -> tuple[int, int]:
    """The first special tokens after an assistant's message: after the last message, and after one
    that others follow. Only Harmony's templates may have different ones. Raises ModelError for
    other templates with different tokens, and for templates without such a token."""
    tokenizer = template.tokenizer

    def after_answer(messages: list[Message], *, prompt: bool) -> list[int]:
        text = template.render([_USER, Message("assistant", _FIRST), *messages], prompt=prompt)
        return list(tokenizer.encode(_after(_FIRST, text), add_special_tokens=False))

    special = special_ids(tokenizer)
    last = after_answer([], prompt=False)
    end = next((position for position, token in enumerate(last) if token in special), None)
    if end is None:
        raise ModelError(
            _refusal(
                "it puts no special token at the end of an assistant's message, so the end of a "
                "turn can't be found"
            )
        )

    followed = after_answer([_USER], prompt=True)[: end + 1]
    is_harmony = find_parser(str(tokenizer.get_chat_template())).name == HARMONY
    harmony_ends = ids_of_marks(tokenizer, *HARMONY_ENDS) if is_harmony else []
    if followed != last[: end + 1] and not (
        followed[:end] == last[:end] and {*followed[end:], last[end]} <= set(harmony_ends)
    ):
        raise ModelError(
            _refusal("it ends an assistant's message differently once another message follows")
        )

    return last[end], followed[end]


def ids_of_marks(tokenizer: PreTrainedTokenizerBase, *texts: str) -> list[int]:
    """The ids of those marks that this tokenizer has as tokens."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[text] for text in texts if text in vocabulary]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids of all special tokens, including those that were added without a role."""
    added = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return {*tokenizer.all_special_ids, *added}


def _after(sentinel: str, text: str) -> str:
    _, sentinel_kept, after = text.partition(sentinel)
    if not sentinel_kept:
        raise ModelError(_refusal("it drops or changes earlier assistant messages"))
    return after


def _refusal(why: str) -> str:
    return (
        f"the chat template can't be continued turn by turn: {why}. Use a model whose "
        "template only appends, or edit its template"
    )


def _eos_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
