"""The OpenAPI page of `serve --gateway`: what it says of the session routes is what they do."""

from __future__ import annotations

import pytest
import schemathesis_run
from opened_sessions import TASK, asked, opened

from agentevo.runtime.event_loop import run_coroutine


@pytest.mark.slow
def test_the_page_has_the_session_routes_with_the_forms_of_their_answers(gateways):
    async def work():
        async with gateways(["left"]) as gateway:
            page = (await gateway.http.get("/openapi.json")).json()
            session = await opened(gateway, task=TASK)
            await asked(gateway, session)
            path = f"/sessions/{session['id']}"
            await gateway.http.post(f"{path}/reward", json={"reward": 0.5})

            answers = {
                ("/sessions/{session}/end", "post"): await gateway.http.post(f"{path}/end"),
                ("/sessions/{session}", "get"): await gateway.http.get(path),
                ("/sessions/{session}/trajectory", "get"): await gateway.http.get(
                    f"{path}/trajectory"
                ),
                ("/sessions", "get"): await gateway.http.get("/sessions"),
                ("/stats", "get"): await gateway.http.get("/stats"),
            }
            answers = {place: answer.json() for place, answer in answers.items()}
            return page, answers | {("/sessions", "post"): session}

    page, answers = run_coroutine(work())
    assert "/v1/chat/completions" in page["paths"] and "/s/{key}/reward" in page["paths"]
    for (path, method), answer in answers.items():
        route = page["paths"][path][method]
        told = route["responses"]["201" if (path, method) == ("/sessions", "post") else "200"]
        schema = told["content"]["application/json"]["schema"]
        if "$ref" in schema:
            schema = page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            assert set(schema["required"]) <= set(answer) <= set(schema["properties"])

        assert schema["type"] == "object"
        assert route["security"] == [{"bearer": []}, {"key": []}]


@pytest.mark.slow
def test_a_session_s_key_and_wrong_keys_are_limited_and_the_gateway_s_is_not(gateways):
    async def work():
        async with gateways([], "gateway.requests_per_s=0.01") as gateway:
            session = await opened(gateway)
            path = f"/sessions/{session['id']}"
            mine, wrong = ({"Authorization": f"Bearer {key}"} for key in (session["key"], "none"))
            return [
                [(await gateway.http.get(path, headers=mine)).status_code for _ in range(2)],
                [
                    (await gateway.http.get(place, headers=wrong)).status_code
                    for place in ("/stats", "/stats", "/v1/models")
                ],
                [(await gateway.http.get(path)).status_code for _ in range(4)],
            ]

    assert run_coroutine(work()) == [[200, 429], [401, 429, 429], [200] * 4]


@pytest.mark.soak
def test_schemathesis_finds_no_500_and_no_other_form_of_answer(gateways, tmp_path):
    """Links of the page lead it from a session that it opens to all that can be asked about it."""
    program = schemathesis_run.installed(tmp_path)

    async def work():
        async with gateways([], "agent.timeout_s=600") as gateway:
            url = str(gateway.http.base_url.join("/openapi.json"))
            key = gateway.http.headers["authorization"]
            return await schemathesis_run.found(
                program,
                url,
                "--max-examples",
                "25",
                "--include-path-regex",
                "^/(sessions|st)",
                "-H",
                f"Authorization: {key}",
                checks=f"{schemathesis_run.CHECKS},response_schema_conformance",
                cwd=tmp_path,
            )

    code, said = run_coroutine(work())
    assert code == 0, said[:5000]
