"""Texts as words: SQuAD's comparison of answers, n-grams, and the scripts of words. All functions
take time linear in the text."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
EAST_ASIAN = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
"""Letters of scripts without spaces between words, as part of a character class of `re`."""
_WORDS = re.compile(rf"[{EAST_ASIAN}]|[^\W{EAST_ASIAN}]+")
SCRIPTS = {
    "en": ("LATIN",),
    "zh": ("CJK",),
    "ja": ("HIRAGANA", "KATAKANA", "CJK", "KATAKANA-HIRAGANA"),
    "ko": ("HANGUL",),
    "ru": ("CYRILLIC",),
    "el": ("GREEK",),
    "ar": ("ARABIC",),
    "he": ("HEBREW",),
    "hi": ("DEVANAGARI",),
    "th": ("THAI",),
}
"""Maps a language to its scripts, by their Unicode names."""
_NO_LANGUAGE = re.compile(
    r"```.*?(?:```|\Z)"  # code
    r"|`[^`\n]*`"
    r"|\$\$.*?(?:\$\$|\Z)|\$[^$\n]*\$"  # mathematics
    r"|\\[A-Za-z]+"
    r"|https?://\S+"
    r"|</?[A-Za-z][^<>]*>",
    re.DOTALL,
)


def squad_normalised(text: str) -> str:
    """The text normalised as in SQuAD's evaluation: lower case, without ASCII punctuation and
    English articles, white space as single blanks (Rajpurkar et al., 2016,
    https://arxiv.org/abs/1606.05250)."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def f1(stated: str, right: str) -> float:
    """The harmonic mean of precision and recall of the normalised words, as in SQuAD's evaluation:
    2 * shared / (words of the first + words of the second). If a text has no words: 1 if both have
    none, else 0."""
    stated_words = squad_normalised(stated).split()
    right_words = squad_normalised(right).split()
    if not stated_words or not right_words:
        return float(stated_words == right_words)
    shared = sum((Counter(stated_words) & Counter(right_words)).values())
    return 2 * shared / (len(stated_words) + len(right_words))


def words_of(text: str) -> list[str]:
    """The words in lower case. A Chinese or Japanese character is a word."""
    return _WORDS.findall(text.lower())


def repeated_share(text: str, size: int) -> float:
    """The share of repeated n-grams of `size` words: 1 - distinct / all. 0 for a text of fewer
    words."""
    words = words_of(text)
    number = len(words) - size + 1
    if number <= 0:
        return 0.0
    return 1 - len({tuple(words[index : index + size]) for index in range(number)}) / number


def share_of_language(text: str, language: str) -> float:
    """The share of the words that are written in the language's scripts. Code, mathematics, tags,
    links and words without a letter don't count. 1 for a text without words."""
    scripts = SCRIPTS[language]
    is_in_script: dict[str, bool] = {}
    num_in_script = num_words = 0
    for word in words_of(_NO_LANGUAGE.sub(" ", text)):
        letter = next((character for character in word if character.isalpha()), None)
        if letter is None:
            continue

        if letter not in is_in_script:
            script = unicodedata.name(letter, "").partition(" ")[0]
            is_in_script[letter] = script in scripts

        num_in_script += is_in_script[letter]
        num_words += 1

    return num_in_script / num_words if num_words else 1.0
