"""What the clients of real frameworks have asked, asked again: each history extends the recorded
turns, in the ids that were drawn. tests/support/record_requests.py makes the files, each with a
client's real packages."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from chat_templates import HERMES
from recorded_ids import ids_in

TEMPLATE = HERMES

FOLDER = Path(__file__).parent / "recorded_requests"
RETOLD = FOLDER / "smolagents_agent.json"
"""Its later requests tell earlier calls as text."""
FILES = sorted(set(FOLDER.glob("*.json")) - {RETOLD})
OF_A_SERVER = ("claude_agent", "codex_agent")
"""Whose tool is an MCP server's, and is called by its name."""
COLOURS = ("red", "blue", "green")
SAYS = [
    *(
        f'<tool_call>{{"name": "open_box", "arguments": {{"colour": "{colour}"}}}}</tool_call>'
        for colour in COLOURS
    ),
    "pearl",
]
SUBMITS = '<tool_call>{"name": "submit", "arguments": {"answer": "pearl"}}</tool_call>'


def replayed(gateway_of, file, says):
    """The recorded turns, the prompts' ids, and what was counted of the conversation."""
    exchanges = json.loads(file.read_text())["exchanges"]

    async def talk():
        async with gateway_of(says) as opened:
            policy = opened.policy(context_length=20_000)
            key = {"Authorization": f"Bearer {policy.api_key}"}
            new_ids = {}
            for exchange in exchanges:
                body = json.dumps(exchange["request"])
                for old, new in new_ids.items():
                    body = body.replace(f'"{old}"', f'"{new}"')

                answer = await opened.http.request(
                    exchange["method"],
                    policy.session.base + exchange["path"],
                    content=body,
                    headers=exchange["headers"] | key,
                )
                assert answer.status_code == 200, answer.text
                new_ids |= zip(exchange["ids"], ids_in(answer.text), strict=True)

            prompts = [prompt for prompt, *_ in opened.engine.requests]
            return policy.turns, prompts, policy.conversation

    return asyncio.run(talk())


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_the_history_that_a_framework_sends_extends_the_recorded_turns(gateway_of, file):
    says = [*SAYS[:-1], SUBMITS] if file.stem == "dspy_agent" else SAYS
    if file.stem in OF_A_SERVER:
        says = [text.replace("open_box", "mcp__hunt__open_box") for text in says]

    turns, prompts, conversation = replayed(gateway_of, file, says)
    if file.stem == "dspy_agent":  # ends every prompt with a message that it then leaves out
        assert [turn.parent for turn in turns] == [None, 0, 0, 0]
        assert turns[3].messages[-1].text == SUBMITS
        return

    assert [turn.parent for turn in turns] == [None, 0, 1, 2]
    assert conversation.drift.branched == 0
    for turn, prompt, later in zip(turns, prompts, prompts[1:], strict=False):
        known = [*prompt, *turn.completion_ids]
        assert later[: len(known)] == known

    results = [
        message.text for turn in turns for message in turn.messages if message.role == "tool"
    ]
    found = ["A note: open the blue box.", "A note: open the green box.", "You find a pearl."]
    assert all(one in result for one, result in zip(found, results, strict=True))  # ADK: in JSON
    assert turns[3].messages[-1].text == "pearl"


def test_calls_that_a_framework_tells_as_text_begin_a_branch_with_each_turn(gateway_of):
    answer = '<tool_call>{"name": "final_answer", "arguments": {"answer": "pearl"}}</tool_call>'
    turns, _, conversation = replayed(gateway_of, RETOLD, [*SAYS[:-1], answer])
    assert [turn.parent for turn in turns] == [None] * 4
    assert conversation.drift.branched == 3

    seen = [turn.messages[-2].text for turn in turns]
    assert seen[1:] == [
        "Observation:\nA note: open the blue box.",
        "Observation:\nA note: open the green box.",
        "Observation:\nYou find a pearl.",
    ]
    assert turns[3].messages[-1].text == answer
