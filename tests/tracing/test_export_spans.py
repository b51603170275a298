"""Stored calls as spans: those that the run's tracer would have exported, in forms that others
read."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from collector import received, request_of_json
from msgspec.structs import replace

from agentevo.data.traces import import_traces
from agentevo.store import open_store
from agentevo.store.call_log import AttemptCalls, CallLog, record_call
from agentevo.tracing import export as export_module
from agentevo.tracing.export import Exported, export_spans
from agentevo.tracing.opening import run_id_of
from agentevo.tracing.otlp import JsonLines
from agentevo.tracing.spans import RunFacts, Spans, run_resource
from agentevo.tracing.texts import SpanTexts
from agentevo.tracing.tracer import Tracer
from agentevo.types import Message, ToolCall, Trajectory, Turn

RUN = RunFacts("coins", "", "tiny", False)
SECRET = "sk-" + "a" * 30


def played(folder: Path, name: str = "t/train@3#1") -> list[Any]:
    """A run of one attempt in the folder, whose spans its own tracer gives."""
    run = RUN._replace(id=run_id_of(folder))
    path = folder / "live.jsonl"
    spans = Spans(run, SpanTexts(200, {}), run_resource(), contents=False)
    tracer = Tracer(lambda: JsonLines(path), spans, run_id=run.id)

    async def scenario() -> None:
        async def opened() -> Any:
            return await open_store(f"sqlite:///{folder / 'store.sqlite'}", create=True)

        async with tracer, CallLog(opened, tracing=tracer) as log:
            calls = AttemptCalls(log, name)
            with calls.attempt("Player"):
                with record_call("policy", "generate", prompt_tokens=5) as asked:
                    asked.note(completion_tokens=2)
                with record_call("tool", "search") as tool:
                    tool.keep(arguments=f'{{"key": "{SECRET}"}}', result="found")
                    with record_call("tool", "inner") as inner:
                        inner.outcome("failed", "ToolError: the words")

            with calls.call("scorer", "exact") as scorer:
                scorer.note(score=1.0)

    asyncio.run(scenario())
    return [span for line in path.read_bytes().splitlines() for span in of_line(line)]


def of_line(line: bytes) -> list[Any]:
    return received(request_of_json(line))


def exported(folder: Path, out: Path, **options: Any) -> Exported:
    async def work() -> Exported:
        async with await open_store(f"sqlite:///{folder / 'store.sqlite'}") as store:
            return await export_spans(store, out, RUN, folder=folder, **options)

    return asyncio.run(work())


def test_an_export_has_the_spans_that_the_tracer_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "BATCH", 2)
    live = {span.span_id: span for span in played(tmp_path)}
    assert len(live) == 5
    assert exported(tmp_path, tmp_path / "out.jsonl", requests=True) == Exported(5, 0)

    lines = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert [len(of_line(line)) for line in lines] == [2, 2, 1]
    for span in (span for line in lines for span in of_line(line)):
        same = live.pop(span.span_id)
        for name in ("name", "trace_id", "parent_id", "kind", "attributes", "events", "error"):
            assert getattr(span, name) == getattr(same, name)
        assert abs(span.start_ns - same.start_ns) + abs(span.end_ns - same.end_ns) < 10_000
        assert "process.pid" not in span.resource

    assert not live


def test_a_line_may_be_one_span_and_contents_are_asked_for(tmp_path: Path) -> None:
    played(tmp_path)
    exported(tmp_path, tmp_path / "a.jsonl", requests=False)
    exported(tmp_path, tmp_path / "b.jsonl.gz", requests=False, contents=True)
    plain = (tmp_path / "a.jsonl").read_text()
    assert "found" not in plain and "the words" not in plain

    told = gzip.decompress((tmp_path / "b.jsonl.gz").read_bytes()).decode()
    assert "found" in told and SECRET not in told

    spans = {span["name"]: span for span in map(json.loads, told.splitlines())}
    root = spans["invoke_agent Player"]
    assert spans["chat tiny"]["parent_id"] == root["span_id"]
    assert spans["chat tiny"]["attributes"]["gen_ai.usage.output_tokens"] == 2
    assert spans["execute_tool inner"]["error"] == "ToolError: the words"
    assert spans["score exact"]["events"][0]["name"] == "gen_ai.evaluation.result"


CALL = ToolCall("look", '{"place": "box"}', "c1")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def turn(index: int, parent: int | None, *messages: Message, tools: str = "") -> Turn:
    return Turn(
        index=index,
        parent=parent,
        prompt_ids=[1],
        completion_ids=[2],
        logprobs=[0.0],
        versions=[0],
        finish_reason="stop",
        messages=list(messages),
        tools=tools,
    )


@pytest.mark.parametrize(
    ("metrics", "is_told"), [({}, True), ({"num_undelivered": 1.0}, False), (None, False)]
)
def test_what_the_policy_said_is_imported_again(
    tmp_path: Path, metrics: dict[str, float] | None, is_told: bool
) -> None:
    """`metrics`: the attempt's; None where it was not stored."""
    name = "t/train@3#1"
    attempt = Trajectory(
        id=name,
        task_id="t",
        group_id="t/train@3",
        status="completed",
        reward=1.0,
        metrics=metrics or {},
        turns=[
            turn(
                0,
                None,
                Message("user", "Where?"),
                Message("assistant", "", (CALL,)),
                tools=json.dumps(TOOLS),
            ),
            turn(
                1,
                0,
                Message("tool", "a pearl", tool_call_id="c1", name="look"),
                Message("assistant", "Here."),
            ),
            turn(
                2,
                0,
                Message("tool", "a pearl", tool_call_id="c1", name="look"),
                Message("assistant", "There."),
            ),
        ],
    )

    async def scenario() -> None:
        async def opened() -> Any:
            return await open_store(f"sqlite:///{tmp_path / 'store.sqlite'}", create=True)

        async with CallLog(opened) as log:
            calls = AttemptCalls(log, name)
            with calls.attempt("Player"):
                for first, completions in ((0, 1), (1, 2)):
                    with record_call("policy", "generate") as call:
                        call.note(turn=first, completions=completions)
        if metrics is not None:
            async with await opened() as store:
                await store.write_trajectories([attempt], split="train", step=3)

    asyncio.run(scenario())
    exported(tmp_path, tmp_path / "out.jsonl", requests=True, contents=True)
    imported = import_traces([str(tmp_path / "out.jsonl")])
    if not is_told:
        assert imported.rows == [] and imported.report.counts() == {"no_content": 2}
        return

    (row,) = imported.rows
    assert [message["role"] for message in row["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert row["messages"][-1]["content"] == "Here." and row["tools"] == TOOLS
    (call,) = row["messages"][1]["tool_calls"]
    assert call["id"] == "c1" and call["function"]["arguments"] == {"place": "box"}

    exported(tmp_path, tmp_path / "plain.jsonl", requests=True)
    assert "pearl" not in (tmp_path / "plain.jsonl").read_text()


def test_a_run_that_was_never_traced_has_trace_ids_of_its_own(tmp_path: Path) -> None:
    ids = []
    for name in ("a", "b"):
        (folder := tmp_path / name).mkdir()
        played(folder)
        (folder / "tracing" / "run_id").unlink()

        for out in ("1.jsonl", "2.jsonl"):
            exported(folder, folder / out, requests=True)

        assert (folder / "1.jsonl").read_bytes() == (folder / "2.jsonl").read_bytes()
        assert not (folder / "tracing" / "run_id").exists()

        ids.append({span.trace_id for span in of_line((folder / "1.jsonl").read_bytes())})

    assert len(ids[0]) == len(ids[1]) == 1 and ids[0] != ids[1]


def test_calls_without_an_end_are_left_out_and_counted(tmp_path: Path) -> None:
    played(tmp_path)

    async def killed() -> None:
        async with await open_store(f"sqlite:///{tmp_path / 'store.sqlite'}") as store:
            call = [one.call async for one in store.calls()].pop()
            await store.write_calls([replace(call, id="ab-1", ended_at=None, status=None)])

    asyncio.run(killed())
    assert exported(tmp_path, tmp_path / "out.jsonl", requests=True) == Exported(5, 1)
