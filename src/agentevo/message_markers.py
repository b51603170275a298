"""Special tokens that a message spells out.

`<|im_end|><|im_start|>system` in a tool's result or an observation is a text like any other.
Encoded together with what the chat template writes, it would become the tokens that end one turn
and begin another. So each such marker is cut before the template sees it: CUT follows its first
character, and the code that encodes the rendering encodes each piece between cuts separately. The
ids still decode to the same text, without a special token that the template has not written.

Text that a template writes as ordinary text, such as Llama 2's [INST], is not a token: it can't be
distinguished from a message with the same text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT = "\ufdd0"
"""A noncharacter of Unicode, which no text should have; a text that has it loses it."""
THOUGHT_TAGS = ("<think>", "</think>")
"""Special tokens of the tokenizer that an answer may nevertheless contain."""
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_TAG = re.compile(r"</?\w+>")


class MessageMarkers:
    """The markers of one tokenizer.

    In any message these are cut: special tokens, and added ones that the chat template writes
    (DeepSeek's <｜User｜> is not special), unless they are tags in the form of <tool_call>, which
    prompts speak of. In a tool's result such tags are cut, too. In an assistant's message only
    those are cut that surround messages: calls and thoughts are written with others, and Harmony's
    own are kept, as one answer of its has several messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        render: Callable[[list[dict[str, Any]]], str],
    ) -> None:
        """`render` gives the text of a conversation up to where the assistant speaks."""
        template = str(tokenizer.get_chat_template()) if tokenizer.chat_template else ""
        added = tokenizer.added_tokens_decoder.values()
        written = {token.content for token in added if token.content in template}
        special = {token.content for token in added if token.special}
        special |= set(tokenizer.all_special_tokens)
        markers = special | {text for text in written if not _TAG.fullmatch(text)}
        self._usual = _pattern(markers)
        self._of_tools = _pattern(markers | written)
        self._of_assistants = _pattern(
            _around_messages(tokenizer, render, markers) - set(THOUGHT_TAGS)
        )

    def cut(self, value: Any, role: str) -> Any:
        """A text, or all texts within lists and mappings (keys included), with the markers cut that
        a message of this role may not contain."""
        if isinstance(value, str):
            pattern = {"tool": self._of_tools, "assistant": self._of_assistants}.get(role)
            return _cut(value, pattern or self._usual)
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
    """Ids of a chat template's rendering of messages whose markers are cut: a special token where
    the template has written one, and nowhere else."""
    pieces = [tokenizer.encode(piece, add_special_tokens=False) for piece in text.split(CUT)]
    return [token for piece in pieces for token in piece]


def _pattern(markers: set[str]) -> re.Pattern[str]:
    """A single character can't be cut, and nothing can be forged with it alone."""
    longest_first = sorted((text for text in markers if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _cut(text: str, pattern: re.Pattern[str]) -> str:
    """Without a marker in any piece between cuts; a marker may hold another one."""
    text = text.replace(CUT, "")
    while pattern.search(text):
        text = pattern.sub(lambda marker: f"{marker[0][0]}{CUT}{marker[0][1:]}", text)
    return text
