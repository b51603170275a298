"""Makes a span of each recorded call.

    attempt      invoke_agent AGENT     the whole attempt; scorers come after its end
    policy       chat MODEL             in process, or CLIENT where the engine is another process
    remote       chat MODEL             CLIENT
    tool         execute_tool TOOL
    scorer       score REWARD           with an event gen_ai.evaluation.result
    any other    KIND NAME              environment, process, sandbox, and what an agent records

A span's parent is the call around it. If a client's request made the call, the parent is the span
that the request named, provided that span is in the attempt's trace. Otherwise the request's span
is linked.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import NamedTuple

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

import agentevo
from agentevo.observability.tracing import conventions as names
from agentevo.observability.tracing.texts import SpanTexts
from agentevo.store.trace_context import AttemptTrace, TracedMessage, TracePlace, span_of
from agentevo.types import Call

_ATTEMPT = re.compile(
    r"(?P<task>.*)/(?P<label>[^/@]+)@(?P<step>\d{1,9})(?::(?P<agent>[^#/@]{0,200}))?#(?P<number>\d{1,9})",
    re.DOTALL,
)
"""The parts of a trajectory's id, which sampler.group_name and types.group_of_agent build."""
_OUTPUT = ("stdout", "stderr", "whole_result", "summary_problem", "ending")
"""The facts of a call whose values are texts, in addition to those with a name in the
conventions."""
_NANO = 10**9
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
Value = str | bool | int | float | list[str]


class RunFacts(NamedTuple):
    """The facts that all spans of a run share."""

    name: str
    id: str
    model: str
    """The policy's name."""
    is_remote: bool
    """Whether the engine is another process."""


def run_resource() -> Resource:
    """The resource of the spans, from OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, else
    AgentEvo's."""
    attributes = {names.SERVICE_NAME: names.SCOPE, "process.pid": str(os.getpid())}
    return Resource(attributes).merge(OTELResourceDetector().detect())


class Spans:
    """Makes spans of calls, with the ids of trace_context.py. `contents`: whether spans contain the
    messages."""

    def __init__(
        self, run: RunFacts, texts: SpanTexts, resource: Resource, *, contents: bool
    ) -> None:
        self._run = run
        self._texts = texts
        self._resource = resource
        self._scope = InstrumentationScope(names.SCOPE, agentevo.__version__, names.SCHEMA_URL)
        self._contents = contents
        self._attempt = lru_cache(4096)(self._attempt_facts)
        self._described = lru_cache(1024)(self._described_once)
        self._span_of = lru_cache(4096)(span_of)

    def of(
        self,
        call: Call,
        trace: AttemptTrace,
        *,
        traced_message: TracedMessage | None = None,
        asker: TracePlace | None = None,
        around: int | None = None,
    ) -> ReadableSpan:
        """The span of a call that has ended. `around`: the id of the enclosing span, if the call's
        record names none."""
        parent_id = around if call.parent is None else self._span_of(call.parent)
        links: tuple[Link, ...] = ()
        if asker is not None and asker.trace_id == trace.trace_id:
            parent_id = asker.span_id
        elif asker is not None:
            links = (Link(SpanContext(asker.trace_id, asker.span_id, True, _SAMPLED)),)

        is_known = call.kind != "tool" or not call.name.startswith("open ")
        name, kind, described = self._described(call.kind if is_known else "", call.name)
        attributes = {
            **self._attempt(call.trajectory_id),
            **described,
            **self._call_attributes(call, traced_message),
        }

        status = Status()
        if call.status == "failed":
            message = self._texts.shown(call.error or "")
            attributes[names.ERROR_TYPE] = _kind_of(message)
            if call.kind == "tool" and not self._contents:
                message = ""  # the text is the tool's result
            status = Status(StatusCode.ERROR, message)

        parent = None
        if parent_id is not None:
            parent = SpanContext(trace.trace_id, parent_id, False, _SAMPLED)

        ended_at = call.started_at if call.ended_at is None else call.ended_at
        end_ns = round(ended_at * _NANO)
        return ReadableSpan(
            name,
            context=SpanContext(trace.trace_id, self._span_of(call.id), False, _SAMPLED),
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            events=self._events(call, end_ns) if call.kind == "scorer" else (),
            links=links,
            kind=kind,
            instrumentation_scope=self._scope,
            status=status,
            start_time=round(call.started_at * _NANO),
            end_time=end_ns,
        )

    def _described_once(self, kind: str, name: str) -> tuple[str, SpanKind, dict[str, Value]]:
        """The span's name and kind, and the attributes that the conventions define for all calls of
        a kind and name. Without a kind, it is the opening of a tool."""
        model = self._run.model
        spoken = f"{ {'scorer': 'score'}.get(kind, kind) } {name}".strip()
        is_client = False
        attributes: dict[str, Value] = {}
        if kind == "attempt":
            spoken = f"{names.INVOKE_AGENT} {name}"
            attributes = {
                names.OPERATION: names.INVOKE_AGENT,
                names.AGENT_NAME: name,
                names.PROVIDER_NAME: names.PROVIDER,
                names.REQUEST_MODEL: model,
            }
        elif kind in ("policy", "remote"):
            model = name if kind == "remote" else model
            spoken = f"{names.CHAT} {model}"
            is_client = kind == "remote" or self._run.is_remote
            attributes = {
                names.OPERATION: names.CHAT,
                names.PROVIDER_NAME: names.PROVIDER,
                names.REQUEST_MODEL: model,
                names.RESPONSE_MODEL: model,
            }
        elif kind == "tool":
            spoken = f"{names.EXECUTE_TOOL} {name}"
            attributes = {names.OPERATION: names.EXECUTE_TOOL, names.TOOL_NAME: name}

        spoken = self._texts.shown(spoken, 200)
        return spoken, SpanKind.CLIENT if is_client else SpanKind.INTERNAL, attributes

    def _call_attributes(
        self, call: Call, traced_message: TracedMessage | None
    ) -> dict[str, Value]:
        """The attributes of this span alone."""
        attributes: dict[str, Value] = {names.CALL_ID: call.id, names.STATUS: call.status or ""}
        facts = call.attributes
        if call.kind in ("policy", "remote"):
            for fact, name in _COUNTS.items():
                if isinstance(count := facts.get(fact), int):
                    attributes[name] = count
        elif self._contents and call.kind == "tool" and not call.name.startswith("open "):
            for fact, name in _TOOL_CONTENTS.items():
                if isinstance(text := facts.get(fact), str):
                    attributes[name] = self._texts.shown(text)

        # Also the facts of the call that the conventions have no name for.
        named_facts = _NAMED_SCORER_FACTS if call.kind == "scorer" else _NAMED_FACTS
        for fact, value in facts.items():
            if fact not in named_facts and (self._contents or fact not in _OUTPUT):
                shown = self._texts.shown(value) if isinstance(value, str) else value
                attributes[names.OWN + fact] = shown

        return (
            attributes
            if traced_message is None
            else attributes | self._message_attributes(traced_message)
        )

    def _attempt_facts(self, trajectory_id: str) -> dict[str, Value]:
        """The attributes that all spans of a trajectory have."""
        shown = self._texts.shown(trajectory_id)
        attributes: dict[str, Value] = {
            names.RUN_NAME: self._run.name,
            names.RUN_ID: self._run.id,
            names.TRAJECTORY_ID: shown,
            names.CONVERSATION_ID: shown,
        }
        match = _ATTEMPT.fullmatch(trajectory_id)
        if match is not None:
            attributes |= {
                names.TASK_ID: self._texts.shown(match["task"]),
                names.GROUP_ID: self._texts.shown(trajectory_id.rpartition("#")[0]),
                names.LABEL: match["label"],
                names.STEP: int(match["step"]),
                names.ATTEMPT: int(match["number"]),
            }

        return attributes

    def _message_attributes(self, traced_message: TracedMessage) -> dict[str, Value]:
        attributes: dict[str, Value] = {}
        if traced_message.finish_reasons:
            attributes[names.FINISH_REASONS] = list(traced_message.finish_reasons)
        if traced_message.temperature is not None:
            attributes[names.REQUEST_TEMPERATURE] = traced_message.temperature

        if self._contents:
            reasons = traced_message.finish_reasons
            if traced_message.messages:
                attributes[names.INPUT_MESSAGES] = self._texts.messages(traced_message.messages)

            if traced_message.answers:
                answers = self._texts.messages(traced_message.answers, finish_reasons=reasons)
                attributes[names.OUTPUT_MESSAGES] = answers

            if traced_message.tools:
                attributes[names.TOOL_DEFINITIONS] = self._texts.shown(traced_message.tools)

        if traced_message.texts is not None:
            prompt, completions = traced_message.texts()
            attributes[names.PROMPT_TEXT] = self._texts.shown(prompt)
            shown = [self._texts.shown(text) for text in completions]
            attributes[names.COMPLETION_TEXT] = shown[0] if len(shown) == 1 else shown

        return attributes

    def _events(self, call: Call, at_ns: int) -> tuple[Event, ...]:
        score = call.attributes.get("score")
        if not isinstance(score, (int, float)):
            return ()

        attributes: dict[str, Value] = {
            names.EVALUATION_NAME: call.name,
            names.EVALUATION_SCORE: float(score),
        }
        reason = call.attributes.get("reason")
        if self._contents and isinstance(reason, str):
            attributes[names.EVALUATION_EXPLANATION] = self._texts.shown(reason)

        return (Event(names.EVALUATION_EVENT, attributes, at_ns),)


_COUNTS = {
    "prompt_tokens": names.INPUT_TOKENS,
    "completion_tokens": names.OUTPUT_TOKENS,
    "completions": names.REQUEST_CHOICES,
}
_TOOL_CONTENTS = {
    "arguments": names.TOOL_ARGUMENTS,
    "code": names.TOOL_ARGUMENTS,
    "result": names.TOOL_RESULT,
    "output": names.TOOL_RESULT,
}
_NAMED_FACTS = frozenset({*_COUNTS, *_TOOL_CONTENTS})
_NAMED_SCORER_FACTS = _NAMED_FACTS | {"reason"}


def attempt_of(trajectory_id: str) -> str:
    """The attempt that the trace of a trajectory belongs to. All its agents share the trace."""
    match = _ATTEMPT.fullmatch(trajectory_id)
    if match is None or match["agent"] is None:
        return trajectory_id
    return f"{match['task']}/{match['label']}@{match['step']}#{match['number']}"


def _kind_of(message: str) -> str:
    """The name of an error, as `described` puts it at the beginning of a message. There are only a
    few such names."""
    name = message.partition(":")[0]
    return name if name.isidentifier() and len(name) <= 100 else "error"
