"""W3C's traceparent at the gateway: a client's span is the parent of its calls, and the answer says
which span the call was."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentevo.store.call_log import AttemptCalls, CallLog
from agentevo.store.trace_context import AttemptTrace, TracePlace, read_traceparent
from agentevo.types import Task

ASK = {"messages": [{"role": "user", "content": "Go."}]}


class Ended:
    """Tracing that keeps the calls that have ended."""

    contents = token2text = False

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def trace_of(self, trajectory_id: str) -> AttemptTrace:
        return AttemptTrace(99, True)

    def end_span(self, call: Any) -> None:
        self.calls.append(call)


class Nowhere:
    async def write_calls(self, calls: Any) -> None: ...
    async def renew_calls(self, recorder: str) -> None: ...
    async def close(self) -> None: ...


async def nowhere() -> Any:
    return Nowhere()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", ["ours", "another", "none", "bad", "twice"])
def test_the_gateway_takes_a_place_in_a_trace_and_gives_one(gateway_of, stream, asked) -> None:
    ours = TracePlace(99, 5, True)
    another = TracePlace(7, 5, True)
    headers = {
        "ours": [("traceparent", ours.header)],
        "another": [("traceparent", another.header), ("tracestate", "a=b")],
        "none": [],
        "bad": [("traceparent", "00-" + "0" * 1000)],
        "twice": [("traceparent", ours.header), ("traceparent", another.header)],
    }[asked]
    ended = Ended()

    async def scenario() -> Any:
        async with gateway_of(["Yes."]) as opened, CallLog(nowhere, tracing=ended) as log:
            calls = AttemptCalls(log, "a")
            with calls.attempt("Player"):
                policy = opened.policy("a", calls=calls)
                answer = await opened.http.post(
                    policy.base_url + "/chat/completions",
                    json={**ASK, "stream": stream},
                    headers=[("authorization", f"Bearer {policy.api_key}"), *headers],
                )

            await policy.close()
            return answer

    answer = asyncio.run(scenario())
    assert answer.status_code == 200

    (call,) = (one for one in ended.calls if one.kind == "policy")
    assert read_traceparent(answer.headers["traceparent"]) == call.place

    named = {"ours": ours, "twice": ours, "another": another}
    assert call.asker == named.get(asked)


def test_an_untraced_attempt_says_nothing_of_traces(gateway_of) -> None:
    async def scenario() -> Any:
        async with gateway_of(["Yes."]) as opened:
            policy = opened.policy("a")
            answer = await opened.post(policy, ASK)
            await policy.close()
            return answer

    assert "traceparent" not in asyncio.run(scenario()).headers


def test_a_program_is_told_its_place_in_its_environment() -> None:
    from agentevo.agents.command import variables
    from agentevo.agents.policy import AttemptSession

    session = AttemptSession("http://127.0.0.1:1", "key")
    with variables(Task(id="t"), session, TracePlace(1, 2, True).header) as told:
        assert read_traceparent(str(told["TRACEPARENT"])) == TracePlace(1, 2, True)
    with variables(Task(id="t"), session) as told:
        assert told["TRACEPARENT"] is None
