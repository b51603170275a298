"""Words of texts, also of scripts that put no space between them: Chinese, Japanese, Korean, Thai,
Lao, Khmer and Burmese. There a letter is taken for a word, and neighbours are pairs: which letters
are a word would take a dictionary of each language. (Korean has spaces, but its endings are written
on.)
"""

from __future__ import annotations

import re

UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff"
    "\u3005-\u3007\u3040-\u30ff\u3130-\u318f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\uff66-\uff9f\U00020000-\U000323af"
)
"""Their letters, as a part of a class of `re`."""
WORD_LETTER = rf"[^\W{UNSPACED}]"
"""A letter or digit of words that have spaces between them."""
_LETTER = re.compile(f"[{UNSPACED}]")


def separate(text: str) -> str:
    """The text with spaces around each letter of a script without them."""
    return _LETTER.sub(" \\g<0> ", text)


def num_words(text: str) -> float:
    """Words of a text; two letters of a script without spaces count as one."""
    num_letters = len(_LETTER.findall(text))
    return len(_LETTER.sub(" ", text).split()) + num_letters / 2


def stands_in(words: str, text: str) -> bool:
    """Whether words stand in a text as whole ones, whatever their case and the space in them."""
    plain_words, plain_text = (" ".join(string.split()).casefold() for string in (words, text))
    pattern = rf"(?<!{WORD_LETTER}){re.escape(plain_words)}(?!{WORD_LETTER})"
    return bool(re.search(pattern, plain_text))
