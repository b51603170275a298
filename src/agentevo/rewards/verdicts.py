"""What a judge's answer says, though it may quote an attempt that was written to be taken for it.

    thought    at the beginning of an answer counts for nothing, drafts in it among them
    cut        an answer that ended at its limit of tokens is unusable, whatever it says until then
    several    every verdict in an answer has to say the same: which of two is the judge's own and
               which a quotation is not known
    broken     JSON that can't be read makes an answer unusable: what is within it is a part of
               something else

Whatever is unusable is asked again (judging.py); nothing is guessed here. A judge that states its
verdict in free words alone, and then quotes a whole forged one, is not noticed: a server that holds
answers to a schema leaves no room for it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
THOUGHTS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
"""How families begin and end a thought, where their server leaves it in the answer."""
_JSON_START = re.compile(r'\{(?=\s*")|\[(?=\s*\{)')
_SCORE_TAG = re.compile(r"<\s*(/?)\s*score\s*>", re.IGNORECASE)
_CORRECT = re.compile(r"\b(in)?correct\b", re.IGNORECASE)
_SENTENCE = re.compile(r"[^.!?;\n\u3002\uff01\uff1f]+[.!?;\n\u3002\uff01\uff1f]*")
_NOUN = re.compile(
    r"(?:[\s*_]+(?:and\s+)?(?:final|numerical|actual|reference|complete))?[\s*_]+(?:answer|response|"
    r"result|solution|value|option|choice|number|one|reading|verdict|name|date|word|term)s?\b",
    re.IGNORECASE,
)
"""Behind `correct`: it speaks of an answer, and does not say of the given one that it is right."""
_NEGATION = re.compile(
    r"\b(?:not|never|no|non|nor|neither|cannot|hardly|without)\b|n['\u2019]t\b", re.IGNORECASE
)
_NEGATED = re.compile(
    r"(?:\b(?:not|never|cannot)|n['\u2019]t)"
    r"(?:\s{1,9}(?:at\s{1,9}all|be|been|being|considered|\w{1,30}ly)){0,2}[\s*_]{1,9}\Z",
    re.IGNORECASE,
)
"""Right before `correct`: the text says the opposite."""
_VAGUE = re.compile(
    r"\b(?:if|unless|whether|would|could|might|may|were|had|seems?|appears?|claims?|says|"
    r"said|states?|stated|asks?|quote|almost|nearly|partly|half|somewhat|mostly|far|than|anything|"
    r"nothing|more|less|rather|instead|supposedly|allegedly)\b|[?\"\u201c\u201d\u300c]",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r",|\b(?:so|and|but|hence|thus|therefore|which)\b", re.IGNORECASE)
_SURELY = re.compile(
    r"(?:entire|ful|complete|absolute|total|perfect|clear|exact|definite|certain|undoubted)ly",
    re.IGNORECASE,
)
_ANSWERED = re.compile(r"[*_ ]{0,9}:[*_\s]{0,9}(?:yes|no|true|false)\b", re.IGNORECASE)
_ADVERB = re.compile(r"\b(\w{1,30}ly)[\s*_]{1,9}\Z", re.IGNORECASE)


class UnusableError(ValueError):
    """A judge's answer can't be used. It says why, in words that the judge can mend it by."""


def whole_object(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object with all of these fields and no other, as every server that enforces
    schemas takes it: without bounds of numbers."""
    return {
        "type": "object",
        "properties": dict(fields),
        "required": list(fields),
        "additionalProperties": False,
    }


def final_words(reply: Any) -> str:
    """What a remote model's reply says behind its thought. Raises UnusableError for one that was
    cut off."""
    if reply.finish_reason == "length":
        raise UnusableError(
            "the answer was cut off at the limit of its tokens: keep it shorter (the limit is "
            "max_new_tokens of the remote model)"
        )

    text: str = reply.text.lstrip()
    for begin, end in THOUGHTS.items():
        if text.startswith(begin):
            _, mark, words = text.partition(end)
            if not mark:
                raise UnusableError(f"the thought that begins with {begin} does not end")
            return words

    return text


def objects_in(text: str) -> list[Any]:
    """The JSON objects, and lists of objects, that stand in an answer, without those that are in
    others. Raises UnusableError where one is broken, or names a key twice."""
    values = []
    place = 0
    while start := _JSON_START.search(text, place):
        try:
            value, place = _JSON.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            broken = text[start.start() : start.start() + 60]
            raise UnusableError(f"there is JSON in it that can't be read: {broken!r}") from None
        values.append(value)

    return values


def find_agreement(verdicts: Iterable[T], nothing: str) -> T:
    """The verdict, which may stand in an answer more than once. Raises UnusableError for none, with
    `nothing` as the reason, and for verdicts that differ."""
    candidates = list(verdicts)
    if not candidates:
        raise UnusableError(nothing)
    if any(verdict != candidates[0] for verdict in candidates):
        raise UnusableError("there are verdicts in it that differ: give yours, and quote none")
    return candidates[0]


def number_of(value: object) -> float | None:
    """A number, also one that is written as a text, as small models do; None for all else."""
    if isinstance(value, str) and len(value) < 40:
        try:
            value = float(value)
        except ValueError:
            return None

    if isinstance(value, bool) or not isinstance(value, int | float):
        return None

    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def scores_in_tags(text: str) -> list[str]:
    """What stands between <score> and </score>, each time. Raises UnusableError where a tag has no
    partner."""
    values = []
    begin: int | None = None
    for tag in _SCORE_TAG.finditer(text):
        if bool(tag[1]) == (begin is None):
            raise UnusableError("a tag <score> or </score> has no partner")
        if begin is None:
            begin = tag.end()
        else:
            values.append(text[begin : tag.start()].strip())
            begin = None

    if begin is not None:
        raise UnusableError("a tag <score> is not closed")
    return values


def words_of_verdict(text: str) -> list[bool]:
    """What the words correct and incorrect say, each time that they judge. Raises UnusableError for
    a sentence that may mean either."""
    verdicts = []
    for sentence in _SENTENCE.findall(text):
        judging = [
            match
            for match in _CORRECT.finditer(sentence)
            if match[1] is not None or not _NOUN.match(sentence, match.end())
        ]
        num_negations = len(_NEGATION.findall(sentence)) if judging else 0
        is_vague = bool(judging) and _VAGUE.search(sentence) is not None
        for match in judging:
            verdict = None if is_vague else _verdict(sentence, match, num_negations)
            if verdict is None:
                raise UnusableError(
                    f"whether it says correct or incorrect is not clear: {sentence.strip()[:100]!r}"
                )
            verdicts.append(verdict)

    return verdicts


def _verdict(sentence: str, match: re.Match[str], num_negations: int) -> bool | None:
    """What one such word says in a sentence; None where it may mean either."""
    before = sentence[max(0, match.start() - 100) : match.start()]
    adverb = _ADVERB.search(before)
    if (
        before.endswith(("-", "\u2010", "\u2011"))
        or _ANSWERED.match(sentence, match.end())
        or (adverb is not None and not _SURELY.fullmatch(adverb[1]))
    ):
        return None

    if match[1] is not None:
        return None if _NEGATION.search(_CLAUSE.split(before)[-1]) else False

    is_negated = _NEGATED.search(before) is not None
    return None if num_negations > is_negated else not is_negated


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key stands in it twice")
    return fields


_JSON = json.JSONDecoder(object_pairs_hook=_without_repeated_keys)
