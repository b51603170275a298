"""Converts recorded calls to rows without repetitions.

An agent's calls repeat its history: each has all earlier messages. So if another call continues a
call's whole conversation, the call is left out as part of it (`continued`). An equal call is a
duplicate. Of the remaining calls, an answer is trained if a record has it as the answer of a call.
Other assistant messages in a history, such as examples, are context. A row that `agentevo sft`
would refuse is left out here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from agentevo.data.conversation import check_text, conversation_of
from agentevo.data.row_report import RowError, RowReport
from agentevo.data.rows import SourceRow, json_value, read_rows, skip_blank
from agentevo.data.traces import api_logs, opentelemetry
from agentevo.data.traces.call import RecordedCall
from agentevo.errors import ConfigError

FORMS = ("auto", "openai", "anthropic", "opentelemetry")


@dataclass(frozen=True)
class Imported:
    """The conversations of the sources, and the report."""

    rows: list[dict[str, Any]]
    """In the form `messages`."""
    report: RowReport
    num_other_spans: int
    """The number of spans that are not calls of a model."""


def import_traces(sources: Sequence[str], form: str = "auto") -> Imported:
    """The conversations in records of any of the known forms. `auto` decides for each row."""
    report = RowReport("import")
    calls = list[RecordedCall]()
    spans: dict[str, opentelemetry.ImportedSpan] = {}
    for row in (row for source in sources for row in _rows(source)):
        try:
            with _refusing_unknown_forms():
                row_calls = _read(row, form, spans)
            report.rows += len(row_calls)
            calls += row_calls
        except RowError as error:
            report.rows += 1
            report.add(row.where, error)

    num_others = 0
    for span in spans.values():
        if not span.is_model_call:
            num_others += 1
            continue

        report.rows += 1
        try:
            with _refusing_unknown_forms():
                calls.append(opentelemetry.call_of(span))
        except RowError as error:
            report.add(span.where, error)

    return Imported(list(_merge_calls(calls, report)), report, num_others)


def _read(
    row: SourceRow, form: str, spans: dict[str, opentelemetry.ImportedSpan]
) -> list[RecordedCall]:
    """The calls in a row. Adds the row's spans to `spans`."""
    if isinstance(row.value, RowError):
        raise row.value
    if not isinstance(row.value, dict):
        raise RowError("unknown_form", f"a {type(row.value).__name__}, not an object")

    check_text(row.value)
    if form == "opentelemetry" or (form == "auto" and opentelemetry.is_telemetry(row.value)):
        opentelemetry.add_spans(spans, row.where, row.value)
        return []

    if form == "anthropic" or (form == "auto" and api_logs.is_anthropic(row.value)):
        return api_logs.anthropic_calls(row.where, row.value)

    return api_logs.calls_of(row.where, row.value)


@contextmanager
def _refusing_unknown_forms() -> Iterator[None]:
    """A block in which an unexpected value of a record raises RowError for an unknown form."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise RowError(
            "unknown_form", f"a value is not what it should be ({type(error).__name__}: {error})"
        ) from error


def _merge_calls(calls: Sequence[RecordedCall], report: RowReport) -> Iterator[dict[str, Any]]:
    digests = [_digests(call) for call in calls]
    answered = {prefixes[-1] for call, prefixes in zip(calls, digests, strict=True) if prefixes}
    gone_on = {digest for prefixes in digests for digest in prefixes[:-1]}
    known_ends: set[bytes] = set()
    for call, message_digests in zip(calls, digests, strict=True):
        try:
            if not message_digests:
                raise RowError("empty", "no messages")
            if message_digests[-1] in gone_on:
                raise RowError("continued", "another record continues it, and has all of it")
            if message_digests[-1] in known_ends:
                raise RowError("duplicate", "an earlier record is the same")

            row = _row(call, message_digests, answered)
            known_ends.add(message_digests[-1])
            yield row
        except RowError as error:
            report.add(call.where, error)


def _row(call: RecordedCall, digests: list[bytes], answered: set[bytes]) -> dict[str, Any]:
    messages = [
        message | {"weight": 0}
        if message["role"] == "assistant" and not call.is_given and digest not in answered
        else message
        for message, digest in zip(call.messages, digests, strict=True)
    ]
    row = {"messages": messages, **({"tools": call.tools} if call.tools else {})}
    conversation = conversation_of(call.where, row)
    answers = [m for m in conversation.messages if m["role"] == "assistant"]
    if all(answer.get("weight") == 0 for answer in answers):
        raise RowError("cut_off", "its answer was cut off")

    about = {"model": call.model} if call.model else {}
    return {**row, **about, "source": call.where}


def _digests(call: RecordedCall) -> list[bytes]:
    """For each message, a digest of the conversation up to it. The digest ignores the ids of tool
    calls, which recorders create again, the spelling of arguments, and reasoning, which clients
    leave out."""
    digest = sha256(json.dumps(call.tools, sort_keys=True).encode())
    digests = []
    for message in call.messages:
        content = [message["role"], message["content"].strip(), *map(_said, _calls(message))]
        digest.update(json.dumps(content, sort_keys=True, default=str).encode())
        digests.append(digest.digest())
    return digests


def _calls(message: dict[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _said(call: Any) -> Any:
    """A tool call without its id."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = arguments.strip()

    return [function.get("name") if isinstance(function, dict) else None, arguments]


def _rows(source: str) -> Iterator[SourceRow]:
    """Like read_rows. Also reads JSON files with several objects, one after another, as exporters
    write them."""
    path = Path(source).expanduser()
    if path.suffix != ".json" or not path.is_file():
        yield from read_rows(source)
        return

    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read ({error}): write it again, in UTF-8") from error

    if not text.lstrip().startswith("{"):
        yield from read_rows(source)
        return

    place = skip_blank(text, 0)
    line = 1
    counted_to = 0
    while place < len(text):
        line += text.count("\n", counted_to, place)
        counted_to = place
        value, place = json_value(
            text, place, f"{path}:{line}", "write one object on each line of a file named .jsonl"
        )
        yield SourceRow(f"{path}:{line}", value)
