"""Streams the text of a completion while its tokens arrive: token ids in, pieces of text out.

Invariant: the pieces add up to the text of the whole completion, and no piece is ever withdrawn. So
text that may still change waits: the bytes of an incomplete character, a run of SentencePiece's
byte tokens (which decode together), a token that would end the completion, and the possible
beginning of a stop string. `finish` compares the pieces with the whole text and returns the
remaining text.

Cost: linear in the length. A token is decoded together with a few preceding tokens, which is enough
to give the same text as in the whole completion: a character has at most 4 tokens of one byte, and
a decoder that drops a leading space does so only at the first token. Tokenizers that rewrite their
text afterwards (`clean_up_tokenization_spaces`), and those that are not of the `tokenizers`
package, give all of their text at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from agentevo.errors import ModelError

CONTEXT = 4
"""The number of preceding tokens that are decoded with new tokens."""
WINDOW = 16
"""The most tokens in the window. Beyond it, only the last CONTEXT tokens are kept."""
UNDECODED = "\N{REPLACEMENT CHARACTER}"
"""The replacement character, to which the bytes of an incomplete character are decoded."""
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def before_stop(text: str, stop_strings: Iterable[str]) -> str:
    """The text before the first stop string in it."""
    starts = [start for stop in stop_strings if (start := text.find(stop)) >= 0]
    return text[: min(starts)] if starts else text


class TextStream:
    """See the module. `decode` returns the text of a whole completion."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: Sequence[int],
        stop_strings: Sequence[str],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._decode = decode
        self._end_ids = frozenset(end_ids)
        self._stop_strings = tuple(stop_strings)
        self._in_pieces = _decodes_in_pieces(tokenizer)
        self._backend: Any = tokenizer.backend_tokenizer if self._in_pieces else None
        self._ids: list[int] = []
        """All ids of the completion so far."""
        self._decoded = 0
        """The number of ids that were added to the window."""
        self._window: list[int] = []
        self._in_run = False
        """Whether the last token of the window is a SentencePiece byte, whose run may continue."""
        self._known = 0
        """The number of characters of the window's text that were taken."""
        self._waiting = ""
        """Text that is certain, unless a stop string begins with it."""
        self._stopped = False
        self._pieces: list[str] = []

    def add(self, ids: Sequence[int]) -> str:
        """Adds tokens. Returns the text that has become certain, or ""."""
        self._ids += ids
        if self._stopped or not self._in_pieces:
            return ""
        piece = self._before_stop(self._decode_new())
        self._pieces.append(piece)
        return piece

    def finish(self, full_text: str | None = None) -> str:
        """The remaining text after the last token. `full_text`: the whole text including stop
        strings, if the caller has already decoded it. Raises ModelError for a tokenizer that
        decodes a token differently next to other tokens."""
        text = (
            self._decode(self._ids)
            if full_text is None
            else before_stop(full_text, self._stop_strings)
        )
        streamed = "".join(self._pieces)
        if not text.startswith(streamed):
            raise ModelError(
                f"the tokenizer decodes tokens differently one by one ({streamed[-80:]!r}) than "
                f"all at once ({text[-80:]!r}): ask for the completion without streaming"
            )

        self._pieces = [text]
        return text[len(streamed) :]

    def _decode_new(self) -> str:
        """Decodes the new tokens, and returns the text that is certain."""
        last = len(self._ids) - (bool(self._ids) and self._ids[-1] in self._end_ids)
        new_ids = self._ids[self._decoded : last]
        for token in new_ids:
            name = self._backend.id_to_token(token)
            if name is not None:  # an id outside the vocabulary has no text
                self._window.append(token)
                self._in_run = _BYTE.fullmatch(name) is not None

        self._decoded = max(self._decoded, last)
        if not self._window or self._in_run:
            return ""

        text = self._text()
        certain = len(text) - text.endswith(UNDECODED)
        new = text[self._known : certain]

        self._known = max(self._known, certain)
        if len(self._window) > WINDOW:
            self._shorten(len(text) - self._known)

        return new

    def _shorten(self, uncertain: int) -> None:
        """Drops all but the newest tokens of the window. `uncertain`: the number of characters at
        the end of the text that were not taken."""
        del self._window[:-CONTEXT]
        self._known = len(self._text()) - uncertain

    def _text(self) -> str:
        # `_decodes_in_pieces` makes sure that the tokenizer changes nothing else.
        return str(self._backend.decode(self._window, skip_special_tokens=False))

    def _before_stop(self, new: str) -> str:
        """The part of the waiting text, followed by `new`, that is certain."""
        if not self._stop_strings:
            return new

        text = self._waiting + new
        end = len(text)
        self._stopped = False
        for stop in self._stop_strings:
            start = _first_beginning(text, stop)
            if start < end:
                end = start
                self._stopped = text.startswith(stop, start)

        self._waiting = text[end:]
        return text[:end]


def _first_beginning(text: str, stop: str) -> int:
    """The index at which the stop string begins, or a prefix of it at the end of the text.
    Otherwise the text's length."""
    start = text.find(stop[0])
    while start >= 0:
        if stop.startswith(text[start : start + len(stop)]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)


def _decodes_in_pieces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the text of a token depends only on its nearest neighbours."""
    if not tokenizer.is_fast or type(tokenizer)._decode is not PreTrainedTokenizerFast._decode:
        return False
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    forced = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    return not tokenizer.clean_up_tokenization_spaces or (is_bpe and not forced)
