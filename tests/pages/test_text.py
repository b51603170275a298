"""Whatever somebody wrote is only text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.pages import render, shown
from agentevo.pages.drawing import as_json, line_chart, scale, sparkline
from agentevo.pages.rendering import mark_code


@pytest.mark.parametrize(
    ("given_text", "expected"),
    [
        ("plain é 漢 🙂", "plain é 漢 🙂"),
        ("a\x00b\x1b[31mred", "a␀b␛[31mred"),
        ("user\u202egnp.exe", "user⟨RLO⟩gnp.exe"),
        ("\ud800 lone", "\ufffd lone"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        ("two\r\nlines\rthree\tfour", "two\nlines␍three\tfour"),
    ],
)
def test_hostile_text_is_seen_for_what_it_is(given_text: object, expected: str) -> None:
    assert shown(given_text) == expected


def test_a_long_text_is_cut_and_says_so() -> None:
    text = shown("x" * 5_000_000, 100)
    assert text == "x" * 100 + "… (5,000,000 characters)"
    assert len(shown(b"x" * 5_000_000, 100)) < 200


@given(st.text(st.characters(exclude_categories=())))
def test_what_is_shown_can_always_be_sent(text: str) -> None:
    result = shown(text)
    result.encode("utf-8")
    assert not any(ord(char) < 32 and char not in "\n\t" for char in result)


def test_templates_escape() -> None:
    page = render(
        "problem.html",
        theme="",
        news="",
        versions={},
        heading="<b>",
        text="<script>alert(1)</script>",
    )
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_json_in_a_page_ends_no_element() -> None:
    text = as_json({"name": "</script><!--", "values": [1.0, float("nan")]})
    assert "<" not in text
    assert "null" in text


@given(st.lists(st.floats(), max_size=200))
def test_any_numbers_can_be_drawn(values: list[float]) -> None:
    assert "nan" not in sparkline(values)
    line_chart([float(place) for place in range(len(values))], [("a", values)])
    scale(*(values + [None] * 4)[:4])


def test_a_chart_of_zeros_has_readable_bounds() -> None:
    assert ">−1<" in (drawn := line_chart([1, 2], [("zero", [0.0, 0.0])])) and ">1<" in drawn


def test_between_two_backticks_is_code_and_all_of_it_is_escaped():
    assert str(mark_code("do `<b>` & go")) == "do <code>&lt;b&gt;</code> &amp; go"
    assert str(mark_code("one ` alone <i>")) == "one ` alone &lt;i&gt;"
    assert str(mark_code("`a` and `b")) == "<code>a</code> and `b"
