"""Every form becomes the same messages; every rule that a row breaks is told with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentevo.data import ChatRow, RowError, RowReport, read_conversations
from agentevo.data.conversation import conversation_of

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def read(folder: Path, rows: list[Any], form: str = "auto") -> tuple[list[ChatRow], RowReport]:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    report = RowReport("train")
    return list(read_conversations(str(path), form, report)), report


def only(folder: Path, row: Any, form: str = "auto") -> ChatRow:
    found, report = read(folder, [row], form)
    assert not report.bad, report.bad
    return found[0]


def said(*pairs: str) -> list[dict[str, str]]:
    return [
        {"role": role, "content": text} for role, _, text in (pair.partition(":") for pair in pairs)
    ]


def test_messages_with_tools_and_calls(tmp_path):
    """Arguments as a JSON text or an object, in or out of OpenAI's nesting, come out the same;
    other keys stay."""
    for call in (
        {**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}},
        CALL,
        {"id": "c1", "name": "add", "arguments": {"a": 1}},
    ):
        messages = [
            *said("system:s", "user:q"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "", "tool_call_id": "c1", "name": "add"},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                "reasoning_content": "r",
            },
            *said("user:nobody answers this"),
        ]
        for tools in (TOOLS, json.dumps(TOOLS)):
            found = only(tmp_path, {"messages": messages, "tools": tools, "source": "x"})
            assert found.where == f"{tmp_path}/rows.jsonl:1"
            assert found.tools == TOOLS
            assert found.messages == [
                *said("system:s", "user:q"),
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "", "tool_call_id": "c1", "name": "add"},
                {"role": "assistant", "content": "ab", "reasoning_content": "r"},
            ]


def test_messages_may_be_called_conversations_or_be_json_text(tmp_path):
    talk = said("user:q", "assistant:a")
    assert only(tmp_path, {"conversations": talk}).messages == talk
    assert only(tmp_path, {"messages": json.dumps(talk)}).messages == talk


def test_sharegpt(tmp_path):
    spoken = [
        ("human", "q"),
        ("function_call", '{"name": "add", "arguments": {"a": 1}}'),
        ("observation", "2"),
        ("gpt", "it is 2"),
    ]
    row = {
        "system": "s",
        "conversations": [{"from": who, "value": what} for who, what in spoken],
        "tools": json.dumps(TOOLS),
    }
    found = only(tmp_path, row)
    assert found.tools == TOOLS
    assert found.messages == [
        *said("system:s", "user:q"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": CALL["function"]}],
        },
        *said("tool:2", "assistant:it is 2"),
    ]


def test_alpaca(tmp_path):
    row = {
        "instruction": "add",
        "input": "1 1",
        "output": "2",
        "system": "s",
        "history": [["q", "a"]],
    }
    assert only(tmp_path, row).messages == said(
        "system:s", "user:q", "assistant:a", "user:add\n\n1 1", "assistant:2"
    )

    row = {"instruction": "add", "input": "", "output": "2", "system": "", "history": []}
    assert only(tmp_path, row).messages == said("user:add", "assistant:2")


BAD: list[tuple[str, Any]] = [
    (
        "template",
        {
            "messages": said("user:q", "assistant:a"),
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ),
    ("unknown_form", [1, 2]),
    ("unknown_form", {"text": "only a text"}),
    ("unknown_form", {"messages": "not json"}),
    ("media", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("unknown_form", {"messages": [{"role": "user", "content": 7}]}),
    ("unknown_form", {"instruction": "another form", "output": "than the file's first row"}),
    (
        "unknown_form",
        {"messages": [*said("user:q"), {"role": "assistant", "content": "a", "weight": 0.5}]},
    ),
    ("empty", {"messages": []}),
    ("empty", {"messages": said("user:q", "assistant: \n")}),
    ("empty", {"messages": said("user:", "assistant:a")}),
    ("wrong_roles", {"messages": said("user:q", "bot:a")}),
    ("wrong_roles", {"messages": [{"content": "no role"}]}),
    ("wrong_roles", {"messages": said("user:q")}),
    ("wrong_roles", {"messages": said("assistant:a", "user:q", "assistant:a")}),
    ("wrong_roles", {"messages": said("system:s", "assistant:a")}),
    ("wrong_roles", {"messages": said("user:q", "system:s", "assistant:a")}),
    ("wrong_roles", {"messages": said("user:q", "assistant:a", "assistant:b")}),
    ("wrong_roles", {"messages": said("user:q", "tool:t", "assistant:a")}),
    *(
        (
            "bad_tool_call",
            {
                "messages": [
                    *said("user:q"),
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"name": "f", "id": call_id}],
                    },
                    {"role": "tool", "content": "t", "tool_call_id": result_id},
                    *said("assistant:a"),
                ]
            },
        )
        for call_id, result_id in (([], "x"), ("x", {}))
    ),
    (
        "bad_tool_call",
        {
            "messages": [
                *said("user:q"),
                {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]},
            ]
        },
    ),
    (
        "bad_tool_call",
        {
            "messages": [
                *said("user:q"),
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"name": "f", "arguments": "{"}],
                },
            ]
        },
    ),
    (
        "bad_tool_call",
        {
            "messages": [
                *said("user:q"),
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"name": "f", "arguments": [1]}],
                },
            ]
        },
    ),
    (
        "bad_tool_call",
        {
            "messages": [
                {"role": "user", "content": "q", "tool_calls": [CALL]},
                *said("assistant:a"),
            ]
        },
    ),
    (
        "bad_tool_call",
        {
            "messages": [
                *said("user:q"),
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "x", "tool_call_id": "c2"},
                *said("assistant:a"),
            ]
        },
    ),
    ("bad_tool_call", {"messages": said("user:q", "assistant:a"), "tools": "{"}),
    ("bad_tool_call", {"messages": said("user:q", "assistant:a"), "tools": {"name": "f"}}),
    ("not_utf8", {"messages": said("user:cut \ud83d", "assistant:a")}),
    ("not_utf8", {"messages": said("user:q", "assistant:a"), "tools": [{"name\ud83d": 1}]}),
]


def test_every_bad_row_is_told_with_its_line_and_reason(tmp_path):
    good = {"messages": said("user:q", "assistant:a")}
    found, report = read(tmp_path, [good, *(row for _, row in BAD), good])
    assert [one.where for one in found] == [
        f"{tmp_path}/rows.jsonl:1",
        f"{tmp_path}/rows.jsonl:{len(BAD) + 2}",
    ]
    assert [(row.where, row.reason) for row in report.bad] == [
        (f"{tmp_path}/rows.jsonl:{line}", reason) for line, (reason, _) in enumerate(BAD, start=2)
    ]
    assert report.rows == len(BAD) + 2 and report.used == 2


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "narrator", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": "no json"},
            ]
        },
        {"conversations": "text"},
        {"messages": []},
    ],
)
def test_bad_sharegpt_rows(tmp_path, row):
    found, report = read(tmp_path, [row], "sharegpt")
    assert not found and len(report.bad) == 1


@pytest.mark.parametrize(
    "extra",
    [
        {"history": "text"},
        {"history": [["one"]]},
        {"instruction": None},
        {"output": ""},
        {"output": 3},
    ],
)
def test_bad_alpaca_rows(tmp_path, extra):
    found, report = read(tmp_path, [{"instruction": "q", "output": "a", **extra}], "alpaca")
    assert not found and len(report.bad) == 1


def test_the_report_counts_and_names_the_first(tmp_path):
    rows = [{"messages": said("user:q")}] * 7 + [
        {"messages": []},
        {"messages": said("user:q", "assistant:a")},
    ]
    _, report = read(tmp_path, rows, "messages")
    path = f"{tmp_path}/rows.jsonl"

    assert report.counts() == {"wrong_roles": 7, "empty": 1}
    assert report.summary() == {
        "rows": 9,
        "used": 1,
        "shortened": 0,
        "left_out": {
            "wrong_roles": {"count": 7, "first": [f"{path}:{n}" for n in range(1, 6)]},
            "empty": {"count": 1, "first": [f"{path}:8"]},
        },
    }
    assert report.lines()[0] == "train: 1 of 9 rows are used"
    assert (
        report.lines()[1]
        == f"train: 7 left out, wrong roles: {', '.join(f'{path}:{n}' for n in range(1, 6))}, "
        "and 2 more"
    )
    assert report.metrics()["data/train/left_out/wrong_roles"] == 7.0

    report.write(tmp_path / "bad.jsonl")
    told = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [one["where"] for one in told] == [f"{path}:{n}" for n in range(1, 9)]


@pytest.mark.parametrize(
    ("mark", "trained"),
    [
        ({"weight": 0}, False),
        ({"weight": 1.0}, True),
        ({"weight": None}, True),
        ({"train": False}, False),
        ({"train": True}, True),
        ({"training": False}, False),
        ({"loss": False}, False),
        ({"loss": 0.0}, False),
        ({"loss_scale": 0}, False),
        ({"loss": True, "weight": 1}, True),
        ({"masked": True}, False),
        ({"masked": False, "train": None}, True),
        ({"train_detail": None}, True),
    ],
)
@pytest.mark.parametrize("form", ["messages", "sharegpt"])
def test_every_mark_of_an_untrained_answer_is_honoured(mark, trained, form):
    """Also where it stands in every message, as it does in a table."""
    asked = dict.fromkeys(mark)
    if form == "messages":
        row = {
            "messages": [
                {"role": "user", "content": "q", **asked},
                {"role": "assistant", "content": "a", **mark},
            ]
        }
    else:
        row = {
            "conversations": [
                {"from": "human", "value": "q", **asked},
                {"from": "gpt", "value": "a", **mark},
            ]
        }

    question, answer = conversation_of("x", row, form).messages
    assert question == {"role": "user", "content": "q"} | {
        key: None for key in mark if key == "train_detail"
    }
    assert answer.get("weight", 1) == (1 if trained else 0)
    assert set(answer) <= {"role", "content", "weight", "train_detail"}


@pytest.mark.parametrize(
    ("mark", "problem"),
    [
        ({"weight": 0.5}, "weight 0.5"),
        ({"loss": 0.5}, "loss 0.5"),
        ({"train": "no"}, "train 'no'"),
        ({"train": False, "loss": True}, "contradict each other"),
        ({"masked": True, "weight": 1}, "contradict each other"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, "train_detail"),
    ],
)
def test_a_mark_that_can_not_be_honoured_makes_a_bad_row(mark, problem):
    said_so = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **mark}]
    with pytest.raises(RowError, match=problem):
        conversation_of("x", {"messages": said_so})


@pytest.mark.parametrize("mark", [{"train": True}, {"loss": 1}, {"masked": False}])
def test_words_of_the_user_that_are_to_be_trained_make_a_bad_row(mark):
    said_so = [{"role": "user", "content": "q", **mark}, {"role": "assistant", "content": "a"}]
    if "masked" in mark:  # torchtune says it of every message, and of the user's too
        assert conversation_of("x", {"messages": said_so}).messages
    else:
        with pytest.raises(RowError, match="only the assistant's messages are trained"):
            conversation_of("x", {"messages": said_so})
