"""Chat messages -> token ids, one turn at a time, without ever re-encoding what the model said.

Along an episode the ids that the policy sees are

    first_prompt(messages) + completion + continuation(new messages) + completion + continuation(...) ...

and every completion stays the very ids that the engine drew. A continuation is what the chat
template puts after an assistant message: the template renders a conversation with a sentinel in the
assistant's place, and the text after the sentinel is encoded. So a template that strips the model's
thinking from old turns does no harm: the old turn is never rendered.

Where a template rewrites what came before (numbers the turns, moves the system message, drops old
messages) no continuation exists; it is refused at construction. A mismatch that stays: where a
completion ends in mid-word, the template's own rendering might merge its last characters with the
end-of-turn text; special tokens, which all common templates use there, never merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from agentevo.errors import ModelError
from agentevo.types import Message

CACHED_MESSAGES = 8192
"""Encodings of messages that are remembered."""
_FIRST, _SECOND, _ASKED, _SYSTEM = "probefirst", "probesecond", "probequestion", "probesystem"
_USER = Message("user", _ASKED)


class ChatFormat:
    """Token-exact multi-turn encoding with one tokenizer's chat template. Raises `ModelError` if
    the template can't be continued."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None
    ) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template: choose an instruction-tuned model, or save "
                "a template with it"
            )
        self.tokenizer = tokenizer
        self.end_of_turn_id = self._find_end_of_turn()
        declared = [
            *_eos_ids(tokenizer.eos_token_id),
            *_eos_ids(getattr(generation_config, "eos_token_id", None)),
        ]
        self.end_ids = tuple(sorted({self.end_of_turn_id, *declared}))
        """Ids that end a completion: stop tokens for the engine."""
        # Members of a group meet the same environments, so the same messages come again and again.
        self._first_prompt = lru_cache(CACHED_MESSAGES)(self._compute_first_prompt)
        self._continuation = lru_cache(CACHED_MESSAGES)(self._compute_continuation)
        self._check_history([_USER])
        self._system_problem = self._probe_system()

    def first_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a new conversation, up to where the assistant speaks."""
        return list(self._first_prompt(tuple(messages)))

    def continuation(self, messages: Sequence[Message], *, ended_with_stop: bool) -> list[int]:
        """Ids to append after a completion, up to where the assistant speaks again.

        `ended_with_stop`: the completion's last id is one of `end_ids`; the end-of-turn token is
        then not repeated. False for one that was cut off by a limit or ended by a stop string: its
        end-of-turn token is part of the answer.
        """
        return list(self._continuation(tuple(messages), ended_with_stop))

    def _compute_first_prompt(self, messages: tuple[Message, ...]) -> list[int]:
        if not messages:
            raise ModelError("a conversation needs at least one message")
        if self._system_problem is not None and any(
            message.role == "system" for message in messages
        ):
            raise ModelError(self._system_problem)
        return self._encode(self._render(messages, prompt=True))

    def _compute_continuation(
        self, messages: tuple[Message, ...], ended_with_stop: bool
    ) -> list[int]:
        if not messages:
            raise ModelError("a continuation needs at least one new message after the assistant's")
        ids = self._encode(
            self._after(
                _FIRST, self._render([_USER, Message("assistant", _FIRST), *messages], prompt=True)
            )
        )
        if self.end_of_turn_id not in ids:
            raise ModelError(
                _refusal(
                    "it does not end an assistant's message that is followed by one of role "
                    f"{messages[0].role}"
                )
            )
        return ids[ids.index(self.end_of_turn_id) + 1 :] if ended_with_stop else ids

    def completion(self, text: str) -> list[int]:
        """Ids of an assistant's message that someone else wrote (a demonstration), end-of-turn
        token included."""
        return [*self._encode(text), self.end_of_turn_id]

    def text(self, completion_ids: Sequence[int]) -> str:
        """What a completion says, without the token that ends it."""
        ids = (
            list(completion_ids[:-1])
            if completion_ids and completion_ids[-1] in self.end_ids
            else list(completion_ids)
        )
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=prompt
            )
        except TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise ModelError(
                f"the chat template refuses a conversation of {roles}: {error}"
            ) from error
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        unknown = self.tokenizer.unk_token_id
        if unknown is not None and unknown in ids and self.tokenizer.unk_token not in text:
            lost = sorted(
                {
                    char
                    for char in text
                    if unknown in self.tokenizer.encode(char, add_special_tokens=False)
                }
            )
            raise ModelError(
                "the tokenizer has no token for "
                f"{' '.join(map(repr, lost)) or 'part of the text'} in {text[-200:]!r}: "
                "keep to characters it knows, or use model.tiny.tokenizer=byte"
            )
        return ids

    def _after(self, sentinel: str, text: str) -> str:
        _, found, after = text.partition(sentinel)
        if not found:
            raise ModelError(_refusal("it drops or changes earlier assistant messages"))
        return after

    def _find_end_of_turn(self) -> int:
        """The first special token that follows an assistant's message, whether or not another
        message comes after it."""
        answered = [_USER, Message("assistant", _FIRST)]
        last = self._encode(self._after(_FIRST, self._render(answered, prompt=False)))
        special = {
            *self.tokenizer.all_special_ids,
            *(i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special),
        }
        end = next((position for position, token in enumerate(last) if token in special), None)
        if end is None:
            raise ModelError(
                _refusal(
                    "it puts no special token at the end of an assistant's message, so nothing "
                    "tells where a turn ends"
                )
            )
        followed = self._encode(self._after(_FIRST, self._render([*answered, _USER], prompt=True)))
        if followed[: end + 1] != last[: end + 1]:
            raise ModelError(
                _refusal("it ends an assistant's message differently once another message follows")
            )
        return last[end]

    def _check_history(self, start: list[Message]) -> None:
        """A conversation that grows must only be appended to. `start`: its messages before the
        first assistant's."""
        first, second = Message("assistant", _FIRST), Message("assistant", _SECOND)
        opening, asked = self._render(start, prompt=False), self._render(start, prompt=True)
        once = self._render([*start, first, _USER], prompt=True)
        twice = self._render([*start, first, _USER, second, _USER], prompt=True)
        header, found, after_first = once.partition(_FIRST)
        # The prompt may say more than the header that a finished message gets, such as an opening
        # <think>, but not less.
        if not found or not once.startswith(opening) or not asked.startswith(header):
            raise ModelError(
                _refusal(
                    "[user, assistant, user] does not begin with the rendering of [user] and the "
                    "generation prompt"
                )
            )
        if not twice.startswith(self._render([*start, first, _USER], prompt=False)):
            raise ModelError(_refusal("a longer conversation does not begin with the shorter one"))
        if self._after(_SECOND, twice) != after_first:
            raise ModelError(
                _refusal(
                    "what follows an assistant's message depends on how many turns came before"
                )
            )

    def _probe_system(self) -> str | None:
        """Why conversations with a system message can't be continued, or None. Only such a
        conversation is then refused."""
        try:
            self._check_history([Message("system", _SYSTEM), _USER])
        except ModelError as error:
            return (
                f"with a system message: {error}; put the text into the first user message "
                "instead (agent.system_prompt=null)"
            )
        return None


def _refusal(why: str) -> str:
    return (
        f"the chat template can't be continued turn by turn: {why}. Use a model whose "
        "template only appends, or edit its template"
    )


def _eos_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
