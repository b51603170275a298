"""Spans and events of OpenTelemetry's conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/), in each of their recorded forms:

    attributes of a span, or of its event    gen_ai.input.messages, gen_ai.output.messages,
                                             gen_ai.system_instructions, gen_ai.tool.definitions
    events of a span, and log records        gen_ai.system.message, gen_ai.user.message,
                                             gen_ai.assistant.message, gen_ai.tool.message,
                                             gen_ai.choice
    numbered attributes                      gen_ai.prompt.0.role, gen_ai.completion.0.content

A row is an exporter's output: OTLP as JSON (resourceSpans, resourceLogs), or a span as the SDKs
print it. The records of a span are combined, even from different rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentevo.data.row_report import RowError
from agentevo.data.traces.call import CUT_OFF, RecordedCall, message, parse_value, text_of, tools_of

_INPUT = "gen_ai.input.messages"
_OUTPUT = "gen_ai.output.messages"
_SYSTEM = "gen_ai.system_instructions"
_TOOLS = "gen_ai.tool.definitions"
_MESSAGES = (_INPUT, _OUTPUT, _SYSTEM, _TOOLS)
_EVENT = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")
_NUMBERED = re.compile(r"gen_ai\.(prompt|completion)\.(\d+)\.(.+)")
_TOOL_NUMBERED = re.compile(r"llm\.request\.functions\.(\d+)\.(\w+)")
_OPERATIONS = ("chat", "text_completion", "generate_content", "completion")
_UNCAPTURED = (
    "its messages were not captured: let the instrumentation record them (in most, "
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT)"
)


def is_telemetry(row: Mapping[str, Any]) -> bool:
    """Whether a row is an exporter's output."""
    keys = ("resourceSpans", "resource_spans", "resourceLogs", "resource_logs")
    is_printed = "attributes" in row and ("context" in row or "span_id" in row or "spanId" in row)
    return any(key in row for key in keys) or is_printed


@dataclass
class ImportedSpan:
    """The known facts about a span."""

    where: str
    name: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    failed: str = ""

    @property
    def is_model_call(self) -> bool:
        """Whether the span is a call of a model, and not of a tool or an agent."""
        operation = self.attributes.get("gen_ai.operation.name")
        if operation is not None:
            return operation in _OPERATIONS

        names = [*self.attributes, *(name for name, _ in self.events)]
        return any(
            _NUMBERED.match(name)
            or _EVENT.match(name)
            or name in (_INPUT, _OUTPUT, "gen_ai.choice")
            for name in names
        )


def add_spans(spans: dict[str, ImportedSpan], where: str, row: Mapping[str, Any]) -> None:
    """Adds a row's records to the spans, by trace and span."""
    for number, (kind, record) in enumerate(_records(row)):
        context = record.get("context") or record
        name = f"{_id(context, 'trace')}/{_id(context, 'span')}"
        if name == "/":
            name = f"{where}#{number}"

        span = spans.setdefault(
            name, ImportedSpan(f"{where}, span {name.rpartition('/')[2] or number}")
        )
        attributes = _attributes(record.get("attributes"))
        if kind == "log":
            event = record.get("eventName") or record.get("event_name")
            body = _value(record.get("body"))
            fields = attributes | (dict(body) if isinstance(body, Mapping) else {})
            span.events.append((str(event or attributes.get("event.name")), fields))
            continue

        span.name = str(record.get("name", ""))
        span.attributes |= attributes
        for event in record.get("events") or ():
            span.events.append((str(event.get("name")), _attributes(event.get("attributes"))))

        status = record.get("status") or {}
        code = str(status.get("code", status.get("status_code", "")))
        if code in ("2", "ERROR", "STATUS_CODE_ERROR"):
            failed = status.get("message") or status.get("description") or "its status is an error"
            span.failed = str(failed)


def call_of(span: ImportedSpan) -> RecordedCall:
    """The call of a span. Raises RowError."""
    if span.failed:
        raise RowError("failed_call", f"it failed: {span.failed[:200]}")

    attributes = dict(span.attributes)
    for _, fields in span.events:  # some recorders have the same attributes in an event of the span
        attributes |= {key: fields[key] for key in _MESSAGES if key in fields}

    tools = tools_of(attributes.get(_TOOLS)) or _numbered_tools(attributes)
    for read in (_of_attributes, _of_events, _of_numbered):
        messages = read(attributes, span.events)
        if messages:
            break
    else:
        raise RowError("no_content", _UNCAPTURED)

    if messages[-1]["role"] != "assistant":
        raise RowError("empty", "no answer was recorded")

    model = attributes.get("gen_ai.response.model", attributes.get("gen_ai.request.model", ""))
    return RecordedCall(span.where, messages, tools, model=str(model))


def _of_attributes(attributes: Mapping[str, Any], events: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of gen_ai.input.messages and similar attributes, as objects or as JSON."""
    if _INPUT not in attributes and _OUTPUT not in attributes:
        return []

    messages: list[dict[str, Any]] = []
    instructions = parsed_or_text(attributes.get(_SYSTEM))
    if instructions:
        messages.append({"role": "system", "content": text_of(instructions)})

    for key in (_INPUT, _OUTPUT):
        values = parse_value(attributes.get(key), key) or []
        if not isinstance(values, Sequence):
            raise RowError("unknown_form", f"{key} is not a list")
        for value in values[:1] if key == _OUTPUT else values:
            messages += _of_parts(value)

    return messages


def parsed_or_text(value: Any) -> Any:
    """The value of a JSON text. Any other text stays unchanged."""
    try:
        return parse_value(value, "")
    except RowError:
        return value


def _of_parts(value: Any) -> list[dict[str, Any]]:
    """A message of parts in OpenAI's form. Results of tools become separate messages."""
    if not isinstance(value, Mapping) or "parts" not in value:
        return [message(value)]

    answer = message({"role": value.get("role")})
    results: list[dict[str, Any]] = []
    for part in value["parts"]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            answer["content"] += text_of(part.get("content"))
        elif kind in ("reasoning", "thinking"):
            thought = answer.get("reasoning_content", "") + text_of(part.get("content"))
            answer["reasoning_content"] = thought
        elif kind == "tool_call":
            function = {"name": part.get("name"), "arguments": part.get("arguments") or {}}
            call = {"type": "function", "function": function}
            id_field = {"id": part["id"]} if part.get("id") else {}
            answer.setdefault("tool_calls", []).append({**id_field, **call})
        elif kind == "tool_call_response":
            output = part.get("response", part.get("result"))
            content = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            named = {"tool_call_id": part["id"]} if part.get("id") else {}
            results.append({"role": "tool", "content": content, **named})
        else:
            raise RowError("unknown_form", f"a message has a part {kind!r}, which is not text")

    if value.get("finish_reason") in CUT_OFF:
        answer["weight"] = 0

    is_said = answer["content"] or answer.get("tool_calls") or answer.get("reasoning_content")
    return [*results, *([answer] if is_said or not results else [])]


def _of_events(attributes: Mapping[str, Any], events: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of gen_ai.user.message and similar events. Of several choices, the first one
    counts."""
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None
    for name, event_attributes in events:
        fields = {
            k.removeprefix("gen_ai.event."): parsed_or_text_of(v)
            for k, v in event_attributes.items()
        }
        if (kind := _EVENT.fullmatch(name)) is not None:
            content = parsed_or_text_of(fields.get("content"))
            messages.append(message({"role": kind[1], **fields, "content": content}))
        elif name == "gen_ai.choice" and answer is None:
            reply = fields.get("message", fields)
            reply = reply if isinstance(reply, Mapping) else {"content": reply}
            calls = reply.get("tool_calls") or fields.get("tool_calls")
            answer = message({**reply, "role": "assistant", "tool_calls": calls})
            if fields.get("finish_reason") in CUT_OFF:
                answer["weight"] = 0

    if not any(
        entry["content"] or entry.get("tool_calls")
        for entry in [*messages, *filter(None, [answer])]
    ):
        return []

    return messages if answer is None else [*messages, answer]


def parsed_or_text_of(value: Any) -> Any:
    """An attribute of an event: lists and objects are parsed from JSON, and any other value stays a
    text."""
    if isinstance(value, str) and value[:1] in "[{":
        inner = parsed_or_text(value)
        is_structure = isinstance(inner, list) and inner and isinstance(inner[0], Mapping)
        return inner if is_structure or isinstance(inner, Mapping) else value
    return value


def _of_numbered(attributes: Mapping[str, Any], events: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of gen_ai.prompt.0.role and similar attributes."""
    halves: dict[str, dict[int, dict[str, Any]]] = {"prompt": {}, "completion": {}}
    for key, value in attributes.items():
        if (place := _NUMBERED.fullmatch(key)) is not None:
            halves[place[1]].setdefault(int(place[2]), {})[place[3]] = value

    messages = []
    for half, numbered in halves.items():
        for number in sorted(numbered)[: 1 if half == "completion" else None]:
            fields = numbered[number]
            calls: dict[int, dict[str, Any]] = {}
            for key, value in fields.items():
                if (
                    call := re.fullmatch(r"tool_calls\.(\d+)\.(id|name|arguments)", key)
                ) is not None:
                    calls.setdefault(int(call[1]), {})[call[2]] = value

            role = fields.get("role", "assistant" if half == "completion" else None)
            content = parsed_or_text_of(fields.get("content"))
            numbered_message = {**fields, "role": role, "content": content}
            numbered_message["tool_calls"] = [calls[n] for n in sorted(calls)]
            messages.append(message(numbered_message))
            if fields.get("finish_reason") in CUT_OFF:
                messages[-1]["weight"] = 0

    return messages


def _numbered_tools(attributes: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        if (place := _TOOL_NUMBERED.fullmatch(key)) is not None:
            is_schema = place[2] == "parameters"
            tools.setdefault(int(place[1]), {})[place[2]] = (
                parse_value(value, "a tool's parameters") if is_schema else value
            )

    return tools_of([tools[number] for number in sorted(tools)])


def _records(row: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields ("span" or "log", record) for each record of a row."""
    is_wrapped = False
    for kind, outer, scopes, inner in (
        ("span", "resourceSpans", "scopeSpans", "spans"),
        ("log", "resourceLogs", "scopeLogs", "logRecords"),
    ):
        for resource in _either(row, outer):
            is_wrapped = True
            for scope in [
                *_either(resource, scopes),
                *_either(resource, "instrumentationLibrarySpans"),
            ]:
                for record in _either(scope, inner):
                    yield kind, record

    if not is_wrapped:
        yield ("log" if "body" in row else "span"), row


def _either(value: Mapping[str, Any], name: str) -> list[Any]:
    """A list under its name in camel case or in snake case."""
    snake = re.sub(r"([A-Z])", lambda letter: f"_{letter[1].lower()}", name)
    items = value.get(name, value.get(snake)) or []
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise RowError("unknown_form", f"{name} is not a list of objects")
    return items


def _id(record: Mapping[str, Any], kind: str) -> str:
    return str(record.get(f"{kind}Id", record.get(f"{kind}_id", "")) or "")


def _attributes(attributes: Any) -> dict[str, Any]:
    """Attributes as a mapping, from a mapping or from OTLP's list of keys and values."""
    if isinstance(attributes, Mapping):
        return dict(attributes)
    if attributes is None:
        return {}
    if not isinstance(attributes, Sequence):
        raise RowError("unknown_form", "attributes is not a list")
    return {
        str(attribute.get("key")): _value(attribute.get("value"))
        for attribute in attributes
        if isinstance(attribute, Mapping)
    }


def _value(value: Any) -> Any:
    """OTLP's AnyValue as a plain value."""
    if not isinstance(value, Mapping):
        return value

    for key in ("stringValue", "boolValue", "doubleValue", "bytesValue"):
        if key in value:
            return value[key]

    if "intValue" in value:
        return int(value["intValue"])
    if "arrayValue" in value:
        return [_value(item) for item in (value["arrayValue"] or {}).get("values", [])]
    if "kvlistValue" in value:
        return _attributes((value["kvlistValue"] or {}).get("values", []))

    return dict(value)
