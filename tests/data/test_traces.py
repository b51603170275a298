"""Records of calls, in every form that they are written in, as conversations that `agentevo sft`
reads; what is left out, and why."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.cli.main import main
from agentevo.data import RowReport, read_conversations
from agentevo.data.traces import import_traces
from examples import examples

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}  # fmt: skip
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "1 + 2?"}
CALL = {"id": "x1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASKS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "x1"}
SAID = {"role": "assistant", "content": "3"}
HISTORY = [SYSTEM, USER, ASKS, RESULT]
WANTED = [
    ("system", "Be brief."),
    ("user", "1 + 2?"),
    ("assistant", ""),
    ("tool", "3"),
    ("assistant", "3"),
]


def choice(message, finish="stop"):
    return {"index": 0, "finish_reason": finish, "message": message}


def otlp(value):
    """A plain value as OTLP's AnyValue."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [otlp(item) for item in value]}}
    return {"kvlistValue": {"values": pairs(value)}}


def pairs(mapping):
    return [{"key": key, "value": otlp(value)} for key, value in mapping.items()]


def span(attributes, events=(), number=1, **more):
    return {
        "traceId": "t",
        "spanId": f"s{number}",
        "name": "chat m",
        "attributes": pairs(attributes),
        "events": [{"name": name, "attributes": pairs(fields)} for name, fields in events],
        **more,
    }


def spans(*given):
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(given)}]}]}


def parts(message):
    """A message as the newest convention writes it."""
    if message["role"] == "tool":
        part = {"type": "tool_call_response", "id": "x1", "response": message["content"]}
        return {"role": "tool", "parts": [part]}

    said = [{"type": "text", "content": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        said.append({"type": "tool_call", "id": call["id"], "name": "add", "arguments": arguments})

    return {"role": message["role"], "parts": said}


def flat(fields):
    """The attributes of an event: lists and objects as JSON."""
    return {key: v if isinstance(v, str | int) else json.dumps(v) for key, v in fields.items()}


CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
BY_ATTRIBUTES = CHAT | {
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
    "gen_ai.input.messages": json.dumps([parts(one) for one in HISTORY[1:]]),
    "gen_ai.output.messages": json.dumps([parts(SAID) | {"finish_reason": "stop"}]),
    "gen_ai.tool.definitions": json.dumps([TOOL]),
}
STRUCTURED = CHAT | {
    "gen_ai.input.messages": [parts(one) for one in HISTORY],
    "gen_ai.output.messages": [parts(SAID) | {"finish_reason": "stop"}],
    "gen_ai.tool.definitions": [TOOL["function"]],
}
EVENTS = [
    ("gen_ai.system.message", {"content": "Be brief."}),
    ("gen_ai.user.message", {"content": "1 + 2?"}),
    ("gen_ai.assistant.message", {"tool_calls": [CALL]}),
    ("gen_ai.tool.message", {"content": "3", "id": "x1"}),
    ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": {"content": "3"}}),
]
NUMBERED = {
    "gen_ai.request.model": "m",
    "llm.request.functions.0.name": "add",
    "llm.request.functions.0.description": "Adds.",
    "llm.request.functions.0.parameters": json.dumps(TOOL["function"]["parameters"]),
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "Be brief.",
    "gen_ai.prompt.1.role": "user",
    "gen_ai.prompt.1.content": "1 + 2?",
    "gen_ai.prompt.2.role": "assistant",
    "gen_ai.prompt.2.tool_calls.0.id": "x1",
    "gen_ai.prompt.2.tool_calls.0.name": "add",
    "gen_ai.prompt.2.tool_calls.0.arguments": '{"a": 1}',
    "gen_ai.prompt.3.role": "tool",
    "gen_ai.prompt.3.content": "3",
    "gen_ai.prompt.3.tool_call_id": "x1",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "3",
    "gen_ai.completion.0.finish_reason": "stop",
}
LOG = {
    "resourceLogs": [
        {
            "scopeLogs": [
                {
                    "logRecords": [
                        {
                            "traceId": "t",
                            "spanId": "s1",
                            "eventName": name,
                            "attributes": pairs({"gen_ai.system": "openai"}),
                            "body": otlp(body),
                        }
                        for name, body in EVENTS
                    ]
                }
            ]
        }
    ]
}
PRINTED = {
    "name": "chat m",
    "context": {"trace_id": "0x1", "span_id": "0x2"},
    "attributes": BY_ATTRIBUTES,
    "events": [],
    "status": {"status_code": "UNSET"},
}
BLOCKS = {
    "model": "m",
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        USER,
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "x1", "name": "add", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "x1",
             "content": [{"type": "text", "text": "3"}]},
        ]},
    ],
    "tools": [
        {"name": "add", "description": "Adds.", "input_schema": TOOL["function"]["parameters"]},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
}  # fmt: skip
DETAILS = ("gen_ai.client.inference.operation.details", BY_ATTRIBUTES)
RECORDS = {
    "conversation": [{"messages": [*HISTORY, SAID], "tools": [TOOL]}],
    "request and response": [
        {
            "request": {"messages": HISTORY, "tools": [TOOL], "model": "m"},
            "response": {"choices": [choice(SAID)], "model": "m"},
        }
    ],
    "stored completion": [{"messages": HISTORY, "tools": [TOOL], "choices": [choice(SAID)]}],
    "batch": [
        {
            "custom_id": "1",
            "body": {"messages": HISTORY, "tools": [TOOL]},
            "response": {"status_code": 200, "body": {"choices": [choice(SAID)]}},
        }
    ],
    "legacy functions": [
        {
            "messages": [
                SYSTEM,
                USER,
                {"role": "assistant", "function_call": CALL["function"]},
                {"role": "function", "name": "add", "content": "3"},
                SAID,
            ],
            "functions": [TOOL["function"]],
        }
    ],
    "response": [
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
                {"type": "reasoning", "id": "r", "summary": []},
                {"type": "function_call", "call_id": "x1", "name": "add", "arguments": '{"a":1}'},
                {"type": "function_call_output", "call_id": "x1", "output": "3"},
            ],
            "output": [
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "3", "annotations": []}],
                }
            ],
            "tools": [{"type": "function", "strict": True, **TOOL["function"]}],
            "status": "completed",
        }
    ],
    "items": [
        {
            "items": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": "1 + 2?"},
                {"type": "function_call", "call_id": "x1", "name": "add", "arguments": '{"a":1}'},
                {"type": "function_call_output", "call_id": "x1", "output": "3"},
                {"role": "assistant", "content": "3"},
            ],
            "tools": [TOOL],
        }
    ],
    "anthropic's messages": [
        {"request": BLOCKS, "response": {"type": "message", "role": "assistant", "model": "m",
         "content": [{"type": "text", "text": "3"}], "stop_reason": "end_turn"}}
    ],
    "anthropic's messages in one": [
        BLOCKS | {"content": [{"type": "text", "text": "3"}], "stop_reason": "end_turn"}
    ],
    "anthropic's conversation": [
        BLOCKS | {"messages": [*BLOCKS["messages"], {"role": "assistant", "content": "3"}]}
    ],
    "attributes as JSON": [spans(span(BY_ATTRIBUTES))],
    "attributes as structures": [spans(span(STRUCTURED))],
    "event of details": [spans(span(CHAT, [DETAILS]))],
    "events of the span": [
        spans(
            span(
                CHAT | {"gen_ai.tool.definitions": json.dumps([TOOL])},
                [(name, flat(fields)) for name, fields in EVENTS],
            )
        )
    ],
    "log records": [spans(span(CHAT | {"gen_ai.tool.definitions": json.dumps([TOOL])})), LOG],
    "numbered attributes": [spans(span(NUMBERED))],
    "printed span": [PRINTED],
}  # fmt: skip


KEYS = ("role", "content", "parts", "type", "attributes", "choices", "message", "tool_calls", "key")


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def imported(tmp_path, *rows, **options):
    return import_traces([write(tmp_path / "in.jsonl", rows)], **options)


@pytest.mark.parametrize("form", list(RECORDS))
def test_every_form_of_a_record_is_the_same_conversation(form, tmp_path):
    result = imported(tmp_path, *RECORDS[form])
    assert result.report.bad == []

    (row,) = result.rows
    said = [(one["role"], one["content"]) for one in row["messages"]]
    assert said == WANTED

    out = write(tmp_path / "out.jsonl", result.rows)
    report = RowReport("train")
    (read,) = read_conversations(out, "auto", report)
    assert report.bad == []

    call = read.messages[2]["tool_calls"][0]["function"]
    assert call == {"name": "add", "arguments": {"a": 1}}

    schema = {key: TOOL["function"][key] for key in ("name", "description", "parameters")}
    assert read.tools == [{"type": "function", "function": schema}]


def test_the_calls_of_one_agent_are_one_row_and_only_recorded_answers_are_taught(tmp_path):
    example = [
        USER,
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "No. Again"},
    ]
    respelt = {**ASKS, "tool_calls": [{**CALL, "id": "other", "function": {
        "name": "add", "arguments": '{ "a":1 }'}}]}  # fmt: skip
    result = {**RESULT, "tool_call_id": "other"}
    calls = [
        {"request": {"messages": example}, "response": {"choices": [choice(ASKS)]}},
        {"request": {"messages": [*example, respelt, result]},
         "response": {"choices": [choice(SAID)]}},
        {"request": {"messages": [*example, respelt, result]},
         "response": {"choices": [choice(SAID)]}},
    ]  # fmt: skip
    found = imported(tmp_path, *calls)
    (row,) = found.rows
    answers = [one for one in row["messages"] if one["role"] == "assistant"]
    assert [answer.get("weight", 1) for answer in answers] == [0, 1, 1]
    assert found.report.counts() == {"continued": 1, "duplicate": 1}


@pytest.mark.parametrize(
    ("row", "reason", "words"),
    [
        ({"a": 1}, "unknown_form", "has a; a record of OpenAI's"),
        ([1], "unknown_form", "a list, not an object"),
        ({"messages": []}, "empty", "messages"),
        ({"messages": [USER]}, "wrong_roles", "no message of role assistant"),
        ({"messages": [{"role": "narrator", "content": ""}]}, "wrong_roles", "narrator"),
        ({"messages": [USER], "choices": []}, "empty", "choices"),
        (
            {"messages": [USER], "choices": [choice(SAID, "length")]},
            "cut_off",
            "its answer was cut off",
        ),
        ({"request": {"messages": [USER]}, "response": None}, "failed_call", "no answer"),
        ({"request": {"messages": [USER]}, "response": {"text": "3"}}, "unknown_form",
         "its response has text; that of a chat completion has choices"),
        ({"request": {"messages": [USER]}, "response": {"content": [{"type": "text", "text": "3"}],
          "stop_reason": "max_tokens"}}, "cut_off", "its answer was cut off"),
        ({"request": BLOCKS, "response": {"type": "error", "error": {"message": "busy"}}},
         "failed_call", "busy"),
        ({"request": BLOCKS, "response": {"content": [], "stop_reason": "end_turn"}}, "empty",
         "its answer is empty"),
        ({"system": "a", "messages": [{"role": "user", "content": [{"type": "image"}]}],
          "content": [{"type": "text", "text": "3"}]}, "unknown_form", "'image'"),
        (
            {"request": {"messages": [USER]}, "response": {"error": {"message": "busy"}}},
            "failed_call",
            "busy",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}],
             "choices": [choice(SAID)]},
            "unknown_form",
            "image_url",
        ),
        (
            {"messages": [USER], "choices": [choice({**ASKS, "tool_calls": [{"function": {}}]})]},
            "bad_tool_call",
            "no name",
        ),
        (
            {"input": "And?", "previous_response_id": "r", "output": []},
            "unknown_form",
            "previous_response_id",
        ),
        (
            {"input": "?", "output": [{"type": "web_search_call"}]},
            "unknown_form",
            "web_search_call",
        ),
        (spans(span(CHAT)), "no_content", "CAPTURE_MESSAGE_CONTENT"),
        (
            spans(span(BY_ATTRIBUTES, status={"code": 2, "message": "rate limit"})),
            "failed_call",
            "rate limit",
        ),
        (
            spans(span({"gen_ai.input.messages": "[{", **CHAT})),
            "not_json",
            "gen_ai.input.messages",
        ),
        (
            spans(span({"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "?"})),
            "empty",
            "no answer",
        ),
        ({"resourceSpans": 3}, "unknown_form", "resourceSpans"),
    ],
)  # fmt: skip
def test_what_is_left_out_is_named_with_its_reason(row, reason, words, tmp_path):
    found = imported(tmp_path, row)
    assert found.rows == []
    (bad,) = found.report.bad
    assert bad.reason == reason
    assert words in bad.detail
    assert "in.jsonl:1" in bad.where


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "chat", "user", "[{"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=examples(40), deadline=None)
@given(form=st.sampled_from(list(RECORDS)), data=st.data())
def test_a_record_with_anything_anywhere_is_a_row_or_is_left_out(form, data):
    def broken(value):
        """A copy in which some value is another one."""
        if data.draw(st.integers(0, 12)) == 0 or not isinstance(value, (dict, list)) or not value:
            return data.draw(JSON) if data.draw(st.integers(0, 6)) == 0 else value
        if isinstance(value, list):
            return [broken(item) for item in value]
        return {key: broken(item) for key, item in value.items()}

    with tempfile.TemporaryDirectory() as folder:
        rows = [broken(row) for row in RECORDS[form]]
        found = import_traces([write(Path(folder) / "in.jsonl", rows)])
        out = write(Path(folder) / "out.jsonl", found.rows)
        report = RowReport("train")
        assert len(list(read_conversations(out, "messages", report))) == len(found.rows)
        assert report.bad == []


def test_other_spans_are_counted_and_no_rows(tmp_path):
    tool = span({"gen_ai.operation.name": "execute_tool"}, number=2)
    http = span({"http.method": "POST"}, number=3)
    found = imported(tmp_path, spans(span(BY_ATTRIBUTES), tool, http))
    assert len(found.rows) == found.report.rows == 1
    assert found.num_other_spans == 2


def test_exporters_files_of_single_objects_are_read(tmp_path):
    path = tmp_path / "spans.json"
    other = {**PRINTED, "context": {"trace_id": "0x1", "span_id": "0x3"}}
    other["attributes"] = CHAT | {
        "gen_ai.input.messages": json.dumps([parts(USER)]),
        "gen_ai.output.messages": json.dumps([parts(SAID)]),
    }
    path.write_text(json.dumps(PRINTED, indent=1) + "\n" + json.dumps(other, indent=1) + "\n")
    assert len(import_traces([str(path)]).rows) == 2

    (tmp_path / "one.json").write_text(json.dumps(spans(span(BY_ATTRIBUTES)), indent=2))
    assert len(import_traces([str(tmp_path / "one.json")]).rows) == 1


def test_the_command_writes_rows_and_the_account(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", [*RECORDS["request and response"], {"a": 1}, spans(span({}))])
    assert main(["data", "convert", "in.jsonl", "out.jsonl.gz", "--to", "conversations"]) == 0

    shown = capsys.readouterr()
    assert "1 conversations written to out.jsonl.gz" in shown.out
    assert "1 left out, not in the file's form" in shown.err
    assert "1 spans are not model calls" in shown.err
    assert json.loads(Path("out.jsonl.gz.bad_rows.jsonl").read_text())["where"] == "in.jsonl:2"

    report = RowReport("train")
    assert len(list(read_conversations("out.jsonl.gz", "auto", report))) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.jsonl", "out.jsonl"], "does not exist"),
        (["in.jsonl", "out.jsonl", "--from", "xml"], "there are auto, openai"),
        (["in.jsonl", "out.jsonl"], "nothing was written"),
        (["in.jsonl", "out.txt"], "nothing was written"),
        (["in.jsonl", "in.jsonl"], "in.jsonl is also the input"),
        ([".", "./in.jsonl"], "in.jsonl is also the input"),
        (["in.jsonl", "out.jsonl", "--from=" + "- " * 9000], "--from - -"),
    ],
)
def test_bad_words_are_refused_and_nothing_is_written(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", [{"a": 1}])
    assert main(["data", "convert", *words, "--to", "conversations"]) == 2
    err = capsys.readouterr().err
    assert said in err and max(map(len, err.splitlines())) < 1500
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
