"""The text and bytes of single tokens. The bytes may be a part of a character."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from agentevo.models.chat.text_stream import UNDECODED

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText(NamedTuple):
    """One token."""

    text: str
    """The token's text; U+FFFD for a part of a character."""
    octets: list[int]
    """Its bytes in UTF-8."""


class TokenTexts:
    """Texts of a tokenizer's tokens. Each token is decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def __call__(self, ids: Sequence[int]) -> list[TokenText]:
        return [self._known.get(token) or self._read(token) for token in ids]

    def _read(self, token: int) -> TokenText:
        text = str(self._tokenizer.decode([token]))
        octets = list(text.encode())
        if UNDECODED in text:
            name = self._tokenizer.convert_ids_to_tokens(token)
            octets = _octets_of(name) if isinstance(name, str) else octets
        self._known[token] = TokenText(text, octets)
        return self._known[token]


def _octets_of(name: str) -> list[int]:
    """The bytes of a token from its name, which is SentencePiece's form of a byte or in GPT-2's
    letters."""
    byte = _BYTE.fullmatch(name)
    if byte is not None:
        return [int(byte[1], 16)]
    letters = _letters()
    if all(letter in letters for letter in name):
        return [letters[letter] for letter in name]
    return list(name.encode())


@cache
def _letters() -> dict[str, int]:
    """GPT-2's letter of each byte (openai/gpt-2, encoder.py): a printable byte is the character
    with its own number, and the other bytes, in order, are the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + place): byte for place, byte in enumerate(unprintable)}
    return {chr(byte): byte for byte in printable} | shifted
