"""Where a reply states its answer, checked against straightforward references, and with texts that
are meant to take for ever."""

import json
import re
import string
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow import soak

from agentevo.rewards import patterns
from agentevo.rewards.answer_texts import check_place, find_answer
from agentevo.rewards.containment import states_answer
from agentevo.rewards.judging import (
    UnusableError,
    objects_in,
    scores_in_tags,
    verdicts_in_words,
)
from agentevo.rewards.multiple_choice import WITHOUT_TEXTS, choice_of
from agentevo.rewards.numerals import last_numeral, readings
from agentevo.rewards.patterns import Pattern
from agentevo.rewards.texts import f1, repeated_share, share_of_language, squad_normalised


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("a <answer> 3 </answer> b <answer>4</answer>", "auto", "4"),
        (r"so \boxed{\frac{1}{2}} and \boxed{x^{2}}", "auto", "x^{2}"),
        (r"open \boxed{1", "boxed", None),
        (r"\boxed{1} and open \boxed{2", "boxed", None),
        (r"\boxed{1} \fbox{2}", "boxed", "1"),
        (r"only \fbox{2}", "boxed", "2"),
        (r"\boxed{\left\{ 1, \{2\} \right.} then }", "boxed", r"\left\{ 1, \{2\} \right."),
        (r"\boxed{a \\{b}}", "boxed", r"a \\{b}"),
        ("work\n#### 42\nmore", "auto", "42"),
        ("  just this ", "auto", "just this"),
        ("nothing", "answer", None),
        (r"<answer>\boxed{1}</answer>", "answer", r"\boxed{1}"),
        ("<final>1</final><FINAL> 2 </Final>", "final", "2"),
        ("<answer><answer>4</answer></answer>", "answer", "4"),
        ("<answer>1</answer> <answer>2", "answer", "1"),
        ("</answer><answer>2", "answer", None),
        ("<answers>1</answers>", "answer", None),
        (r"\boxed{1} and open \boxed{2", "auto", None),
        (r"\boxed{1} and open \fbox{2", "auto", "1"),
        (r"\boxed{1 and #### 2", "auto", None),
        ("it is 5, or $1,000.", "number", "1,000"),
        ("no number", "number", None),
        ('x {"a": 1} y {"b": {"c": [7, " z "]}} {', "json:b.c.1", "z"),
        ('{"b": {"c": [7, {"d": null}]}}', "json:b.c.0", "7"),
        ('{"b": {"c": [7, {"d": null}]}}', "json:b.c.1.d", None),
        ('{"b": [1]}', "json:b.1", None),
        ('{"b": [1]}', "json:b.x", None),
        ("```json\n[1, 2]\n```", "json", "[1, 2]"),
        ("none", "json:b", None),
        (r"$\frac{1}{2}$ in [0, 1) or [x]; " * 500 + '{"b": 1}', "json:b", "1"),
        ("Answer: 3\nAnswer: 4 ", "regex:Answer: (.*?)$", "3\nAnswer: 4"),
        ("Answer: 3\nAnswer: 4 !", r"regex:Answer: (\d)", "4"),
        ("Answer: 3", r"regex:\d", "3"),
        ("Answer", r"regex:\d", None),
    ],
)
def test_where_an_answer_is_stated(text, place, expected):
    assert find_answer(text, place) == expected


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("", "not a place"),
        ("my tag", "not a place"),
        ("json:", "not a place"),
        ("regex:", "not a place"),
        ("regex:(", "not a regular expression"),
        ("regex:" + "a" * 10_001, "10001 characters"),
        ("answer_tag", "written `answer`"),
    ],
)
def test_what_is_no_place(place, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        check_place(place)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 1,234.5.", 1234.5),
        ("$3", 3.0),
        ("-2e3", -2000.0),
        ("\u2212 $ 4", -4.0),
        ("3/4", 0.75),
        ("50%", 0.5),
        ("1.234,5", 1234.5),
        ("it is 1.234.567.", 1234567.0),
        ("0.125,8", 8.0),
        ("- 5", -5.0),
        ("x = - 5\nis it", -5.0),
        ("they are\n - 4\n - 5", 5.0),
        ("they are\n-5", -5.0),
        ("from 1 to 7", 7.0),
        ("5 - 3 = 2", 2.0),
        ("5-3", 3.0),
        ("\u7b54\u6848\u662f5\u3002", 5.0),
        ("x2", None),
        ("1/0", None),
        ("7 or " + "9" * 400, 7.0),
        ("7 or " + "9" * 5000, 7.0),
        ("7 or 1/" + "9" * 5000, 7.0),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    stated = last_numeral(text)
    assert (None if stated is None else stated[1]) == number


@given(st.floats(allow_nan=False, allow_infinity=False), st.text("abc xyz,;", max_size=9))
def test_a_number_that_is_written_is_read(number, words):
    stated = last_numeral(f"1 {words} {number!r} {words}")
    assert stated is not None and stated[1] == number


def test_percents_are_read_as_a_share_and_as_they_are_written():
    assert readings("about 50%") == (0.5, 50.0)
    assert readings("about 50") == (50.0,) and readings("none") == ()


PIECES = [
    "<a>",
    "</a>",
    "<A>",
    "b",
    " ",
    "<",
    "\\boxed{",
    "{",
    "}",
    "\\{",
    "\\}",
    "\\\\",
    "\\fbox{",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


def tag_by_search(text):
    """Every pair of tags with neither tag between; the one that ends last."""
    found = [
        text[match.end() : match.end() + end.start()]
        for match in re.finditer("<a>", text, re.IGNORECASE)
        if (end := re.search("</?a>", text[match.end() :], re.IGNORECASE))
        and end[0].startswith("</")
    ]
    return found[-1].strip() if found else None


def box_by_counting(text):
    """Character by character from the last box on."""
    begin = max(text.rfind("\\boxed{"), -1)
    begin = begin + 7 if begin >= 0 else text.rfind("\\fbox{") + 6 if "\\fbox{" in text else None
    if begin is None:
        return None

    depth = 1
    place = begin
    while place < len(text):
        if text[place] == "\\":
            place += 2
            continue
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[begin:place].strip()
        place += 1

    return None


@given(TEXTS)
def test_tags_and_boxes_are_those_of_a_plain_search(text):
    assert find_answer(text, "a") == tag_by_search(text)
    assert find_answer(text, "boxed") == box_by_counting(text)


@given(
    st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=6)
)
def test_json_is_found_behind_any_words(value):
    text = f"some words: {json.dumps([value])} and more"
    assert find_answer(text, "json") == json.dumps([value], ensure_ascii=False)
    inside = value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    assert find_answer(text, "json:0") == (None if value is None else inside)


LONG = 100_000
HOSTILE = [
    "1.234",
    ".234",
    "1.234,",
    " - ",
    "\n- 1",
    "\\boxed{",
    "\\fbox{",
    "<answer>",
    "</answer>",
    "</answer><answer>",
    "{",
    "}",
    '{"a":',
    "[",
    "[[],",
    "{}",
    "[1,",
    '["a',
    " ",
    "-",
    "- ",
    "9",
    "9,",
    "1,000",
    ".",
    "1/",
    "a" * 50 + "<",
    "#",
    "\\",
    "$",
    "`",
    "\u662f",
    "answer is ",
    "A ",
    "(",
    "\x00",
    "\\frac{",
    "\\frac{1}{",
    "\\frac12",
    "\\sqrt{2}",
    "1 000 ",
    "1\\,000",
    "9{,}",
    "2^",
    "2^{",
    "\u00bd",
    "\u2013",
    "\u00b2",
    "1 1/2 ",
    "1,00,",
    "3,5 ",
    "or ",
    "a b, ",
    "a b or ",
    "correct ",
    "not correct ",
    "not " * 3,
    "<score>",
    '{"a": 1}',
]


@pytest.mark.slow
@pytest.mark.timeout(225)
@pytest.mark.parametrize(
    "piece", [*HOSTILE[::8], *soak(*(p for n, p in enumerate(HOSTILE) if n % 8))]
)
def test_a_hostile_text_takes_no_longer_than_another(piece):
    """A second at most; what is quadratic or worse takes minutes to years."""
    text = piece * (LONG // len(piece))
    for place in ("auto", "answer", "boxed", "hashes", "number", "json:a"):
        find_answer(text, place)

    readings(text)
    states_answer(text, "38", "1 2 3", ignore_case=True)
    states_answer(text, "a b", "c", ignore_case=True)
    for read in (objects_in, scores_in_tags, verdicts_in_words):
        with suppress(UnusableError):
            read(text)

    f1(text, "a")
    squad_normalised(text)
    repeated_share(text, 3)
    share_of_language(text, "en")
    choice_of(text, WITHOUT_TEXTS)


@pytest.mark.parametrize("pattern", ["(?:x+x+)+y", "((x*)*)*y|(?:x+x+)+z"])
def test_a_pattern_that_does_not_end_is_an_error(monkeypatch, pattern):
    monkeypatch.setattr(patterns, "LIMIT_S", 0.05)
    for match in (Pattern(pattern).matches_whole, Pattern(pattern).last):
        with pytest.raises(TimeoutError, match="nested repetitions"):
            match("x" * 100_000)


WORDS = st.lists(
    st.sampled_from(["the", "A", "an", "cat", "Cat!", "(dog)", "it's", "is.", "\u662f"]), max_size=8
)


def squad_by_characters(text):
    """The steps of SQuAD's evaluation, one by one."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


@given(WORDS, WORDS)
def test_f1_is_squads(first, second):
    stated = " ".join(first)
    right = "  ".join(second)
    assert squad_normalised(stated) == squad_by_characters(stated)

    mine = squad_by_characters(stated).split()
    gold = squad_by_characters(right).split()
    left = list(gold)
    shared = 0
    for word in mine:
        if word in left:
            left.remove(word)
            shared += 1

    if not mine or not gold:
        expected = float(mine == gold)
    elif shared == 0:
        expected = 0.0
    else:
        precision = shared / len(mine)
        recall = shared / len(gold)
        expected = 2 * precision * recall / (precision + recall)

    assert f1(stated, right) == pytest.approx(expected)
    assert f1(stated, right) == f1(right, stated)


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 4))
def test_repetition_counts_what_came_before(words, size):
    grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    again = sum(gram in grams[:i] for i, gram in enumerate(grams))
    expected = again / len(grams) if grams else 0.0
    assert repeated_share(" ".join(words), size) == pytest.approx(expected)
