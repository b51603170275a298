"""Decides whether a free-form reply states the right answer, and no other candidates.

    number   the last number of the reply is the answer, and no list of numbers ends there; the
             question's numbers are ignored, unless the answer is one of them
    words    the reply has the answer as whole words, not in a list, without its opposite (yes and
             no, true and false), and at most MAX_EXTRA_WORDS different words that neither the
             answer nor the question has

A policy is trained to get this reward, so a reply that names many candidates gets nothing.
Candidates in words without any sign between them are only limited by the number of words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from agentevo.rewards.numerals import Numeral, numerals_from_the_end, plain
from agentevo.rewards.texts import EAST_ASIAN, words_of

MAX_EXTRA_WORDS = 40
TOLERANCE = 1e-6
"""The largest difference of equal numbers, as a share of the right number (of 1 if it is 0)."""
_ALTERNATIVES = r"\bor\b|[/|\u3001\u6216]|\u8fd8\u662f"
_TOGETHER = r"\band\b|&|[\u548c\u4e0e\u53ca]"
_MARKS = " \t\r()[]{}*_`\"'\u201c\u201d\u300c\u300d"
_NUMBERS_APART = re.compile(
    rf"(?P<choice>{_ALTERNATIVES}|{_TOGETHER})|[\s,;()\[\]\uff0c\uff1b-]", re.IGNORECASE
)
_ITEMS_APART = re.compile(
    rf"({_ALTERNATIVES}|{_TOGETHER})|[,;:\n.!?\uff0c\uff1b\uff1a\u3002\uff01\uff1f]",
    re.IGNORECASE,
)
_ALTERNATIVE = re.compile(_ALTERNATIVES, re.IGNORECASE)
_BULLET = re.compile(r"\A\s*(?:[-*\u2022]|\d{1,3}[.)])\s+")
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true", "\u662f": "\u5426"}
_MASK = "\0"
"""Replaces the answer in a text."""


def states_answer(text: str, answer: str, query: str, *, ignore_case: bool) -> bool:
    """Whether a reply to the query states the answer. The module has the rules."""
    number = _number_alone(answer)
    if number is not None:
        return _states_number(text, number, query)

    if ignore_case:
        text = text.casefold()
        answer = answer.casefold()
        query = query.casefold()

    return _states_words(text, answer.strip().rstrip("."), query)


def _number_alone(answer: str) -> Numeral | None:
    """The number in an answer that is only a number."""
    text = plain(answer)
    number = next(numerals_from_the_end(text), None)
    if number is None:
        return None
    surroundings = text[: number.start] + text[number.end :]
    return None if surroundings.strip(_MARKS + "-+.$\u20ac\u00a3\u00a5") else number


def _states_number(text: str, right: Numeral, query: str) -> bool:
    text = plain(text)
    numerals = list(numerals_from_the_end(text))
    query_numerals = [
        numeral for numeral in numerals_from_the_end(plain(query)) if numeral is not None
    ]
    if not any(_equal(numeral, right) for numeral in query_numerals):
        candidates = [
            numeral
            for numeral in numerals
            if numeral is None
            or not any(_equal(numeral, query_numeral) for query_numeral in query_numerals)
        ]
    else:
        candidates = numerals

    stated = candidates[0] if candidates else None
    if stated is None or not _equal(stated, right):
        return False

    place = numerals.index(stated)
    return not _ends_a_list(text, numerals[place:])


def _equal(stated: Numeral, right: Numeral) -> bool:
    return any(
        abs(stated_value - right_value) <= TOLERANCE * (abs(right_value) or 1.0)
        for stated_value in stated.readings
        for right_value in right.readings
    )


def _ends_a_list(text: str, numerals: Sequence[Numeral | None]) -> bool:
    """Whether the last number of a text ends a list of two numbers with a word such as `or` between
    them, or of three numbers. `numerals` start at the text's end."""
    num_members = 1
    for later, earlier in pairwise(numerals):
        if later is None or earlier is None:
            break

        gap = text[earlier.end : later.start]
        if len(gap) > 20 or _NUMBERS_APART.sub("", gap):
            break

        num_members += 1
        is_choice = any(match["choice"] for match in _NUMBERS_APART.finditer(gap))
        if is_choice or num_members == 3:
            return True

    return False


def _states_words(text: str, answer: str, query: str) -> bool:
    masked, num_found = _whole_words(answer).subn(_MASK, text.replace(_MASK, " "))
    expected_words = {*words_of(answer), *words_of(query)}
    words = set(words_of(masked))
    too_many = len(words - expected_words) > MAX_EXTRA_WORDS
    if num_found == 0 or too_many or _OPPOSITES.get(answer.casefold()) in words:
        return False
    return not _is_listed(masked, len(words_of(answer)))


def _whole_words(answer: str) -> re.Pattern[str]:
    """The pattern of the answer as whole words. Chinese and Japanese have no spaces between words.
    In other scripts, a letter next to the answer makes the answer a part of a word."""
    letter = rf"[^\W{EAST_ASIAN}]"
    words = r"\s+".join(map(re.escape, answer.split()))
    is_east_asian = [bool(re.match(f"[{EAST_ASIAN}]", end)) for end in (answer[0], answer[-1])]
    begin = "" if is_east_asian[0] else rf"(?<!{letter})(?<!\d[.,])"
    end = "" if is_east_asian[1] else rf"(?!{letter})"
    return re.compile(f"{begin}{words}{end}")


def _is_listed(masked: str, num_words: int) -> bool:
    """Whether the answer is an item of a list. It can be an alternative, or joined by `and` to an
    item that is as short. Or commas, lines or full stops separate it from two items that are as
    short."""
    items: list[str] = []
    joints: list[str] = []  # the word between an item and the next item, empty for a comma
    parts = _ITEMS_APART.split(masked)
    joint = ""
    for item, separator in zip(parts[::2], [*parts[1::2], None], strict=True):
        bare = _BULLET.sub("", item).strip(_MARKS)
        if bare:
            joints += [joint] if items else []
            items.append(bare)
            joint = ""
        joint = joint or (separator or "")

    def is_short(item: str, extra_words: int) -> bool:
        return _MASK not in item and len(words_of(item)) <= num_words + extra_words

    for index, item in enumerate(items):
        if _MASK not in item:
            continue

        sides = []
        if item.endswith(_MASK):
            sides.append((joints[index : index + 2], items[index + 1 : index + 3]))
        if item.startswith(_MASK):
            first = max(0, index - 2)
            sides.append((joints[first:index][::-1], items[first:index][::-1]))

        num_siblings = 0
        for side_joints, neighbours in sides:
            if side_joints and _ALTERNATIVE.match(side_joints[0]):
                return True
            if side_joints and side_joints[0] and is_short(neighbours[0], 2):
                return True

            for neighbour in neighbours:
                if not is_short(neighbour, 1):
                    break
                num_siblings += 1

        if num_siblings >= 2:
            return True

    return False
