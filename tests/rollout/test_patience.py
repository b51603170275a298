from __future__ import annotations

import asyncio

import pytest

from agentevo.errors import DeadlineExceededError, StoreError, StoreUnavailableError
from agentevo.rollout import patience
from agentevo.rollout.patience import patiently


def calls(*results):
    left, made = list(results), []

    async def call():
        made.append(1)
        result = left.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result

    return call, made


def test_again_while_the_database_is_away(monkeypatch):
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.001)
    call, made = calls(StoreUnavailableError("refused"), DeadlineExceededError("late"), StoreUnavailableError("refused"), 7)
    assert asyncio.run(patiently(call, within_s=5, what="x")) == 7
    assert len(made) == 4


def test_a_refusal_is_raised_at_once():
    call, made = calls(StoreError("moved on"), 7)
    with pytest.raises(StoreError, match="moved on"):
        asyncio.run(patiently(call, within_s=5, what="x"))
    assert len(made) == 1


def test_patience_ends(monkeypatch):
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    call, made = calls(*[DeadlineExceededError("late")] * 99)
    with pytest.raises(StoreUnavailableError, match=r"leasing: given up after 0.1 s: late"):
        asyncio.run(patiently(call, within_s=0.1, what="leasing"))
    assert 3 <= len(made) <= 5, "the pauses double"
