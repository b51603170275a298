"""The commands on attempts parse the answers of models that see, also of those whose chat templates
leave out a content that is not a list of parts."""

from __future__ import annotations

import pytest
from tiny_vision import FAMILIES, tiny_vision

from agentevo.cli.trajectories import _reader_of
from agentevo.types import Message, Turn


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_read(family: str) -> None:
    tokenizer = tiny_vision(family).tokenizer
    turn = Turn(
        index=0,
        prompt_ids=tokenizer.encode("look"),
        completion_ids=[1],
        logprobs=[0.0],
        versions=[0],
        finish_reason="stop",
        messages=[Message("assistant", "a cat")],
    )
    assert _reader_of(tokenizer)(turn, "")["content"] == "a cat"
