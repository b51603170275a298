"""Our names are those of the pinned version of OpenTelemetry's conventions."""

from __future__ import annotations

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.semconv.schemas import Schemas

from agentevo.observability.tracing import conventions


def test_every_name_is_the_conventions_or_begins_as_ours_do() -> None:
    known = {
        value
        for module in (gen_ai_attributes, error_attributes)
        for value in vars(module).values()
        if isinstance(value, str)
    } | {"service.name", "gen_ai.evaluation.result"}
    ours = {
        value
        for name, value in vars(conventions).items()
        if name.isupper() and isinstance(value, str) and "." in value and not name.startswith("ENV")
    } - {conventions.VERSION, conventions.SCHEMA_URL}
    assert len(ours) > 30
    assert {name for name in ours - known if not name.startswith(conventions.OWN)} == set()
    assert Schemas.V1_44_0.value == conventions.SCHEMA_URL


def test_the_operations_are_the_conventions() -> None:
    theirs = {
        GenAiOperationNameValue.value
        for GenAiOperationNameValue in gen_ai_attributes.GenAiOperationNameValues
    }
    assert {conventions.CHAT, conventions.INVOKE_AGENT, conventions.EXECUTE_TOOL} <= theirs
