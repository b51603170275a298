"""What the clients of real frameworks have asked, asked again: each history extends the recorded
turns. tests/support/record_requests.py makes the files, each with a framework's real package."""

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
    """The recorded turns, and how many of them began a branch."""
    exchanges = json.loads(file.read_text())

    async def talk():
        async with gateway_of(says) as opened:
            policy = opened.policy(context_length=10_000)
            new_ids = {}
            for exchange in exchanges:
                body = json.dumps(exchange["request"])
                for old, new in new_ids.items():
                    body = body.replace(f'"{old}"', f'"{new}"')

                answer = await opened.post(
                    policy, json.loads(body), exchange["path"].removeprefix("/v1")
                )
                assert answer.status_code == 200, answer.text
                new_ids |= zip(exchange["ids"], ids_in(answer.text), strict=True)

            return policy.turns, policy.conversation.drift.branched

    return asyncio.run(talk())


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_the_history_that_a_framework_sends_extends_the_recorded_turns(gateway_of, file):
    says = [*SAYS[:-1], SUBMITS] if file.stem == "dspy_agent" else SAYS
    turns, branched = replayed(gateway_of, file, says)
    if file.stem == "dspy_agent":  # ends every prompt with a message that it then leaves out
        assert [turn.parent for turn in turns] == [None, 0, 0, 0]
        assert turns[3].messages[-1].text == SUBMITS
        return

    assert [turn.parent for turn in turns] == [None, 0, 1, 2]
    assert branched == 0

    results = [
        message.text for turn in turns for message in turn.messages if message.role == "tool"
    ]
    found = ["A note: open the blue box.", "A note: open the green box.", "You find a pearl."]
    assert all(one in result for one, result in zip(found, results, strict=True))  # ADK: in JSON
    assert turns[3].messages[-1].text == "pearl"


def test_calls_that_a_framework_tells_as_text_begin_a_branch_with_each_turn(gateway_of):
    answer = '<tool_call>{"name": "final_answer", "arguments": {"answer": "pearl"}}</tool_call>'
    turns, branched = replayed(gateway_of, RETOLD, [*SAYS[:-1], answer])
    assert [turn.parent for turn in turns] == [None] * 4
    assert branched == 3

    seen = [turn.messages[-2].text for turn in turns]
    assert seen[1:] == [
        "Observation:\nA note: open the blue box.",
        "Observation:\nA note: open the green box.",
        "Observation:\nYou find a pearl.",
    ]
    assert turns[3].messages[-1].text == answer
