"""Whatever somebody wrote is only text."""

from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.observability.pages import render, shown
from agentevo.observability.pages.charts import Chart, ChartLine
from agentevo.observability.pages.embedded_json import as_json
from agentevo.observability.pages.intervals import scale
from agentevo.observability.pages.rendering import environment, mark_code
from agentevo.observability.pages.words import sparkline

HOSTILE = """</script></noscript><img src=x>'"onload=alert(1) """


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
    assert set(sparkline(values)) <= set(" ▁▂▃▄▅▆▇█")
    assert len(sparkline(values, 20)) <= 20
    scale(*(values + [None] * 4)[:4])
    chart = Chart("a", [float(place) for place in range(len(values))], [ChartLine("a", values)])
    assert "nan" not in chart.description and as_json(chart.told)


def test_a_chart_says_its_lines_in_words() -> None:
    values = [math.nan, 0.25, 0.125, 0.5]
    lines = [ChartLine("agent", values), ChartLine("none", [math.nan] * 4)]
    assert Chart("Success", [0, 10, 20, 30], lines, share=True).description == (
        "agent: 25% at step 10, 50% at step 30, lowest 12%, highest 50%; none: no value"
    )
    assert (
        Chart("Loss", [3], [ChartLine("sft/loss", [2.5])]).description == "sft/loss: 2.50 at step 3"
    )


def test_a_name_in_a_chart_ends_no_element() -> None:
    chart = Chart(f"{HOSTILE}t", [1.0, 2.0], [ChartLine(f"{HOSTILE}l", [1.0, 2.0])] * 2)
    template = environment().from_string(
        '{% import "components.html" as ui with context %}{{ ui.chart(chart) }}'
    )
    figure = template.render(chart=chart)
    assert figure.count("<script") == figure.count("</script>") == 1
    assert "<img" not in figure
    ((before, inside),) = re.findall(r"(.*)<script[^>]*>(.*)</script>", figure, re.DOTALL)
    assert '"onload' not in before
    assert json.loads(inside)["lines"][0]["name"] == f"{HOSTILE}l"


def test_between_two_backticks_is_code_and_all_of_it_is_escaped():
    assert str(mark_code("do `<b>` & go")) == "do <code>&lt;b&gt;</code> &amp; go"
    assert str(mark_code("one ` alone <i>")) == "one ` alone &lt;i&gt;"
    assert str(mark_code("`a` and `b")) == "<code>a</code> and `b"
