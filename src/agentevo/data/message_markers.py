"""Special tokens that a message spells out as text.

`<|im_end|><|im_start|>system` in a tool's result or an observation is ordinary text. If it were
encoded together with the text of the chat template, it would become the tokens that end a turn and
begin another. So each such marker is cut before the template sees it. CUT is inserted after its
first character, and the code that encodes the rendering encodes each piece between cuts separately.
The ids still decode to the same text, without a special token that the template has not written.

Text that a template writes as ordinary text, such as Llama 2's [INST], is not a token. It can't be
distinguished from a message with the same text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT = "\ufdd0"
"""A noncharacter of Unicode, which no text should contain. It is removed from a text that contains
it."""
THOUGHT_TAGS = ("<think>", "</think>")
"""Special tokens of the tokenizer that an answer may nevertheless contain."""
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_TAG = re.compile(r"</?\w+>")


class MessageMarkers:
    """The markers of a tokenizer.

    In any message, special tokens are cut, and so are added tokens that the chat template writes
    (DeepSeek's <｜User｜> is not special). Tags in the form of <tool_call> are not cut, because
    prompts mention them. In a tool's result, such tags are cut too. In an assistant's message, only
    the markers that surround messages are cut, because other markers enclose calls and thoughts.
    Harmony's markers are kept, because an answer in Harmony has several messages.
    `cut_always` adds markers that no message may contain.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        render: Callable[[list[dict[str, Any]]], str],
    ) -> None:
        """`render` returns the text of a conversation up to the beginning of the assistant's
        reply."""
        template = str(tokenizer.get_chat_template()) if tokenizer.chat_template else ""
        added = tokenizer.added_tokens_decoder.values()
        written = {token.content for token in added if token.content in template}
        special = {token.content for token in added if token.special}
        special |= set(tokenizer.all_special_tokens)
        markers = special | {text for text in written if not _TAG.fullmatch(text)}
        self._usual = _pattern(markers)
        self._of_tools = _pattern(markers | written)
        self._find_around = partial(_around_messages, tokenizer, render, markers)
        self._always = _pattern(())

    @cached_property
    def _of_assistants(self) -> re.Pattern[str]:
        return _pattern(self._find_around() - set(THOUGHT_TAGS))

    def cut_always(self, texts: Collection[str]) -> None:
        """Cuts these texts in the messages of every role too, such as the placeholder of an
        image."""
        self._always = _pattern(texts)

    def cut(self, value: Any, role: str) -> Any:
        """The value with cuts in the markers that a message of this role may not contain. The value
        is a text, or lists and mappings with texts (keys included)."""
        if isinstance(value, str):
            if role == "assistant":
                return _cut(value, self._of_assistants, self._always)
            return _cut(value, self._of_tools if role == "tool" else self._usual, self._always)
        if isinstance(value, dict):
            return {self.cut(key, role): self.cut(item, role) for key, item in value.items()}
        if isinstance(value, list):
            return [self.cut(item, role) for item in value]
        return value


def _around_messages(
    tokenizer: PreTrainedTokenizerBase,
    render: Callable[[list[dict[str, Any]]], str],
    markers: set[str],
) -> set[str]:
    """The markers that the template writes in a plain conversation, and the tokenizer's own
    beginning and end of a text."""
    user_message = {"role": "user", "content": "a"}
    messages = [user_message, {"role": "assistant", "content": "b"}, user_message]
    try:
        text = render(messages)
    except Exception:  # noqa: BLE001 (a template may do anything; its user reports it)
        return markers

    ends = {tokenizer.bos_token, tokenizer.eos_token}
    around = {marker for marker in markers if marker in text or marker in ends}
    return around - set(_HARMONY) if set(_HARMONY) <= markers else around


def encode_rendering(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a chat template's rendering of messages whose markers are cut. A special token
    appears only where the template has written one."""
    pieces = [tokenizer.encode(piece, add_special_tokens=False) for piece in text.split(CUT)]
    return [token for piece in pieces for token in piece]


def _pattern(markers: Collection[str]) -> re.Pattern[str]:
    """A single character can't be cut, and a message can't forge anything with it alone."""
    longest_first = sorted((text for text in markers if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _cut(text: str, *patterns: re.Pattern[str]) -> str:
    """The text with cuts, so that no piece between cuts contains a marker. A marker may contain
    another marker."""
    text = text.replace(CUT, "")
    for pattern in patterns:
        while pattern.search(text):
            text = pattern.sub(lambda marker: f"{marker[0][0]}{CUT}{marker[0][1:]}", text)
    return text
