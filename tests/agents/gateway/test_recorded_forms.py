"""What real clients ask of an answer's form is drawn so: JSON by a model of pydantic, strict tools,
biases. tests/support/record_forms.py makes the files, each with a client's real package."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from constrained import policy_of

FOLDER = Path(__file__).parent / "recorded_forms"
FILES = sorted(FOLDER.glob("*.json"))


def said_in(path, answer):
    """The text and the calls of an answer."""
    if path == "/chat/completions":
        message = answer["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return message["content"], calls
    texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
    return "".join(texts), [item for item in answer["output"] if item["type"] == "function_call"]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_what_a_client_asks_of_the_form_is_what_it_gets(gateway_of, file):
    exchanges = json.loads(file.read_text())

    async def talk():
        async with gateway_of([]) as opened:
            results = []
            for exchange in exchanges:
                policy = policy_of(opened)
                path = exchange["path"].removeprefix("/v1")
                limit = "max_output_tokens" if path == "/responses" else "max_tokens"
                body = {limit: 150} | exchange["request"]
                answer = await opened.post(policy, body, path)
                assert answer.status_code == 200, answer.text
                results.append((path, body, answer.json(), policy.conversation.turns[0]))

            return results

    for path, body, answer, turn in asyncio.run(talk()):
        text, calls = said_in(path, answer)
        assert turn.constraint is not None and turn.constraint.masks

        wanted = body.get("text", {}).get("format") or body.get("response_format")
        if wanted is not None and turn.finish_reason == "stop":
            assert calls or isinstance(json.loads(text), dict)
        if wanted is not None and wanted["type"] == "json_schema" and not calls:
            assert '"left"' in text or '"right"' in text
        if "logit_bias" in body:
            assert turn.penalties.logit_bias == ((5, -100.0),)
