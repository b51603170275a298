"""What `contains` takes for an answer in free words, and that naming candidates earns nothing."""

import asyncio

import msgspec
import pytest
from judged_attempts import said

from agentevo.rewards import make_reward
from agentevo.rewards.reward import reward_config
from agentevo.types import Task

COUNT = Task(id="t", query="How many of the 120 cars of 2024 are red?", answer="38")
NAME = Task(id="t", query="Who wrote the book?", answer="Jane Austen")
ALL = " ".join(map(str, range(100)))
NAMES = ["Jane Austen", "Mark Twain", "Emily Bronte", "Leo Tolstoy"]


def value(reply, task, **changes):
    scorer = make_reward(reward_config("contains")(name="contains"))
    changed = msgspec.structs.replace(task, **changes)
    return asyncio.run(scorer.score(said("a", reply), changed)).value


@pytest.mark.parametrize(
    "reply",
    [
        "38",
        "There are 38 red cars.",
        "38 of the 120 cars are red.",
        "In 2024, 38 cars were red.",
        "There are 38.0 red cars.",
        "3 rows of 12, and 2 more: 3 * 12 + 2 = 38",
        "\u5171\u670938\u8f86",
        "\u7b54\u6848\u662f\uff13\uff18\u3002",
        r"It is \boxed{38}.",
        "<answer>38 cars</answer>",
        "38 of them, which are 38 in all",
    ],
)
def test_a_number_in_a_reply_is_an_answer(reply):
    assert value(reply, COUNT) == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        ALL,
        ALL.replace(" ", ", "),
        ALL.replace(" ", "\n"),
        "36 37 38",
        "36, 37, 38",
        "36,37,38",
        "36; 37; 38",
        "37 or 38",
        "38 or 39",
        "37/38",
        "37 \u6216 38",
        "37\u300138",
        "[36, 37, 38]",
        "138",
        "3.38",
        "38.5",
        "-38",
        "380",
        "There are 38 red cars, and 4 blue ones.",
        "",
    ],
)
def test_a_list_of_numbers_or_another_number_is_none(reply):
    assert value(reply, COUNT) == 0.0


def test_numbers_are_compared_as_values_and_only_the_questions_are_passed_over():
    assert value("It costs $1,250.50.", COUNT, answer="1250.5") == 1.0
    assert value("It costs 1250.50 in all.", COUNT, answer=1250.5) == 1.0
    assert value("1 000 of 120", COUNT, answer="1,000") == 1.0
    assert value("Half of them: 50%", COUNT, answer="50%") == 1.0
    assert value("It is 120, not 38.", COUNT, answer="120") == 0.0
    assert value("It is not 38 but 120.", COUNT, answer="120") == 1.0
    assert value("120 2024", COUNT, query="Which is less, 120 or 2024?", answer="120") == 0.0


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("jane austen.", "Jane Austen"),
        ("It was written by Jane\nAusten, who lived in England.", "Jane Austen"),
        ("**Jane Austen** wrote it.", "Jane Austen"),
        ("\u7b54\u6848\u662f\u5317\u4eac\u3002", "\u5317\u4eac"),
        ("\u9996\u90fd\u662fParis\u3002", "Paris"),
        ("The capital is Paris, France.", "Paris"),
        ("The series is Tom and Jerry.", "Tom and Jerry"),
        ("They live in St. Louis, MO.", "St. Louis, MO"),
        ("C++ it is", "C++"),
        ("It was shipped on 2024-05-01.", "2024-05-01"),
        ("Yes. Jane Austen.", "Jane Austen"),
    ],
)
def test_words_in_a_reply_are_an_answer(reply, answer):
    assert value(reply, NAME, answer=answer) == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        ", ".join(NAMES),
        "\n".join(NAMES),
        "\n".join(f"- {name}" for name in NAMES),
        "\n".join(f"{place}. {name}" for place, name in enumerate(NAMES)),
        ". ".join(NAMES),
        "; ".join(reversed(NAMES)),
        " ".join(NAMES * 1) + " or Jane Austen",
        "Jane Austen or Mark Twain",
        "It is either Mark Twain or Jane Austen.",
        "Jane Austen and Mark Twain",
        "Jane Austen/Mark Twain",
        "The writer is Jane Austen, Mark Twain or somebody else.",
        '["Jane Austen", "Mark Twain", "Leo Tolstoy"]',
        "Mark Twain, Leo Tolstoy, Jane Austen. It is Jane Austen.",
        " ".join(f"name{n}" for n in range(60)) + " Jane Austen",
        "Jane Austenson",
        "Jane",
        "",
    ],
)
def test_a_list_of_names_or_another_name_is_none(reply):
    assert value(reply, NAME) == 0.0


@pytest.mark.parametrize(
    "reply",
    [
        "\u5317\u4eac\u3001\u4e0a\u6d77\u3001\u5e7f\u5dde",
        "\u5317\u4eac\u6216\u4e0a\u6d77",
        "\u5317\u4eac\u8fd8\u662f\u4e0a\u6d77",
        "\u5317\u4eac\uff0c\u4e0a\u6d77\uff0c\u5e7f\u5dde",
    ],
)
def test_a_list_of_names_in_chinese_is_none(reply):
    assert value(reply, NAME, answer="\u5317\u4eac") == 0.0


@pytest.mark.parametrize(
    ("reply", "answer", "expected"),
    [
        ("Yes.", "yes", 1.0),
        ("Nobody knows, but yes", "Yes", 1.0),
        ("yes no", "yes", 0.0),
        ("yes no", "no", 0.0),
        ("True, False", "true", 0.0),
        ("It is true, so not FALSE", "False", 0.0),
        ("\u662f\u3002", "\u662f", 1.0),
        ("\u662f \u5426", "\u662f", 0.0),
    ],
)
def test_a_word_beside_its_opposite_is_none(reply, answer, expected):
    assert value(reply, NAME, answer=answer) == expected
