"""The gateway's OpenAPI page and what it counts of itself."""

from __future__ import annotations

import asyncio
import re

import pytest
import schemathesis_run

from agentevo.agents.gateway.metrics import SECONDS, Durations

USER = {"role": "user", "content": "left or right ?"}
ASK = {"model": "any", "messages": [USER]}


def values_of(text):
    """Name and labels -> value. Every line is a comment or a value in Prometheus's form."""
    values = {}
    for line in text.splitlines():
        if not line.startswith("# "):
            name, value = re.fullmatch(r"([a-z_]+(?:\{[^{}]*\})?) ([0-9.]+)", line).groups()
            values[name] = float(value)
    return values


@pytest.mark.slow
def test_metrics_count_answers_tokens_and_sessions(gateway_of):
    async def talk():
        async with gateway_of(["left", "right", "left"]) as opened:
            policy = opened.policy()
            url = policy.session.base + "/metrics"
            before = (await opened.http.get(url)).text
            first = (await opened.post(policy, ASK)).json()
            said = first["choices"][0]["message"]
            more = {"messages": [USER, said, USER], "stream": True}
            await opened.post(policy, {**ASK, **more})
            await opened.post(policy, {"messages": 5})
            await opened.http.post(policy.base_url + "/responses", json={})
            after = await opened.http.get(url)
            key = policy.api_key
            await policy.close()
            return before, after, (await opened.http.get(url)).text, key, first["usage"], policy

    before, answer, last, key, usage, policy = asyncio.run(talk())
    name = "agentevo_gateway_{}".format
    text = answer.text

    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert values_of(before)[name("sessions")] == values_of(text)[name("sessions")] == 1
    assert values_of(last)[name("sessions")] == 0

    counts = values_of(text)
    chat = 'path="/chat/completions"'
    other = 'path="/responses"'

    assert counts[name("requests_total{" + chat + ',status="200"}')] == 2
    assert counts[name("requests_total{" + chat + ',status="400"}')] == 1
    assert counts[name("requests_total{" + other + ',status="401"}')] == 1
    assert counts[name("request_seconds_count{" + chat + "}")] == 3
    assert counts[name("request_seconds_bucket{" + chat + ',le="+Inf"}')] == 3
    assert counts[name("requests_under_way")] == 0
    assert counts[name('tokens_total{kind="completion"}')] == sum(
        len(turn.completion_ids) for turn in policy.turns
    )
    assert counts[name('tokens_total{kind="cached"}')] == usage["total_tokens"]
    assert counts[name('tokens_total{kind="prompt"}')] == sum(
        len(turn.prompt_ids) for turn in policy.turns
    )
    assert key not in text and "left" not in text


def test_a_duration_is_in_the_bucket_of_the_next_greater_bound():
    durations = Durations()
    for seconds in (0.0, 0.005, 0.006, 1e6):
        durations.add(seconds)

    lines = list(durations.lines("x", 'a="b"'))
    assert lines[0] == 'x_bucket{a="b",le="0.005"} 2'
    assert lines[1] == 'x_bucket{a="b",le="0.01"} 3'
    assert lines[len(SECONDS)] == 'x_bucket{a="b",le="+Inf"} 4'
    assert lines[-1] == 'x_count{a="b"} 4'


def test_the_page_has_every_route_once_and_says_who_may_ask(gateway_of):
    async def talk():
        async with gateway_of([]) as opened:
            base = opened.policy().session.base
            page = (await opened.http.get(base + "/openapi.json")).json()
            unknown = [
                (await opened.http.get(base + "/docs")).status_code,
                (await opened.http.get(base + "/v1/responses")).status_code,
            ]
            return page, unknown

    page, unknown = asyncio.run(talk())
    paths = page["paths"]
    assert {path for path in paths if path.startswith("/v1")} == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{name}",
    }
    assert set(paths) - {path for path in paths if path.startswith("/v1")} == {
        "/s/{key}/reward",
        "/health",
        "/metrics",
    }

    for path, methods in paths.items():
        for route in methods.values():
            assert bool(route.get("security")) == path.startswith("/v1"), path

    assert set(page["components"]["securitySchemes"]) == {"bearer", "key"}
    assert unknown == [404, 405]


@pytest.mark.soak
def test_schemathesis_finds_no_500(gateway_of, tmp_path):
    program = schemathesis_run.installed(tmp_path)

    async def talk():
        async with gateway_of(["left"] * 100_000) as opened:
            policy = opened.policy(context_length=512)
            key = policy.api_key
            return await schemathesis_run.found(
                program,
                policy.session.base + "/openapi.json",
                "--max-examples",
                "25",
                "-H",
                f"Authorization: Bearer {key}",
                "-H",
                f"x-api-key: {key}",
                "--phases",
                "examples,coverage,fuzzing",
                cwd=tmp_path,
            )

    code, said = asyncio.run(talk())
    assert code == 0, said[:5000]
