"""A thought that the template opens only after the result of a tool is reasoning."""

from __future__ import annotations

import asyncio

import pytest
from chat_templates import R1_DISTIL, THINKS_AFTER_RESULTS

QUESTION = {"role": "user", "content": "1+1?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "2"}


@pytest.mark.parametrize(
    ("loaded", "text", "expected"),
    [
        (THINKS_AFTER_RESULTS, "so</think>two", ("so", "two")),
        (R1_DISTIL, "two", (None, "two")),  # opens a thought only after a question
    ],
    indirect=["loaded"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_to_a_result_is_read_after_its_own_prompt(gateway_of, text, expected, stream):
    body = {"messages": [QUESTION, CALL, RESULT], "max_tokens": 60, "stream": stream}

    async def work():
        async with gateway_of([text]) as opened:
            policy = opened.policy(context_length=2048)
            return await opened.post(policy, body), policy

    answer, policy = asyncio.run(work())
    assert answer.status_code == 200, answer.text
    opening = policy.conversation.opening(policy.turns[0])
    assert opening == ("<think>\n" if expected[0] else "")
    if stream:
        assert ("reasoning_content" in answer.text) == bool(expected[0])
        assert "</think>" not in answer.text
    else:
        message = answer.json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == expected
