"""Splits texts into words, also in scripts without spaces between words: Chinese, Japanese, Korean,
Thai, Lao, Khmer and Burmese. In these, each letter counts as a word, and neighbouring letters as
pairs, since real words would need a dictionary of each language. (Korean has spaces, but attaches
endings to words.)
"""

from __future__ import annotations

import re

UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff"
    "\u3005-\u3007\u3040-\u30ff\u3130-\u318f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\uff66-\uff9f\U00020000-\U000323af"
)
"""The letters of these scripts, as part of a character class of `re`."""
WORD_LETTER = rf"[^\W{UNSPACED}]"
"""A letter or digit of a script with spaces between words."""
_LETTER = re.compile(f"[{UNSPACED}]")


def separate(text: str) -> str:
    """The text with spaces around each letter of a script without spaces."""
    return _LETTER.sub(" \\g<0> ", text)


def num_words(text: str) -> float:
    """The number of words; two letters of a script without spaces count as one word."""
    num_letters = len(_LETTER.findall(text))
    return len(_LETTER.sub(" ", text).split()) + num_letters / 2


def contains_words(words: str, text: str) -> bool:
    """Whether a text contains these as whole words; case and the kind of spaces do not matter."""
    plain_words, plain_text = (" ".join(string.split()).casefold() for string in (words, text))
    pattern = rf"(?<!{WORD_LETTER}){re.escape(plain_words)}(?!{WORD_LETTER})"
    return bool(re.search(pattern, plain_text))
