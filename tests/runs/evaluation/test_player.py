"""What a player tells of requests, without a model."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from agentevo.runs.evaluation import player_words as words
from agentevo.runs.evaluation.player import CheckpointPlayer
from agentevo.types import Message


def test_what_is_stopped_before_it_begins_is_told_to_have_ended() -> None:
    told: list[Any] = []

    async def ask_and_stop_at_once() -> None:
        asked = CheckpointPlayer(None, told.append)
        request = words.Chat(id="b", conversation="c", messages=[Message("user", "Where?")])
        asked.take_line(msgspec.json.encode(request))
        asked.take_line(msgspec.json.encode(words.Stop("b")))
        async with asyncio.timeout(300):
            while len(told) < 2:
                await asyncio.sleep(0.01)

    asyncio.run(ask_and_stop_at_once())
    assert told == [words.FailedChat("b", "stopped"), words.Done("b")]
