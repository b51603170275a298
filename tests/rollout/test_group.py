"""One attempt: whose time counts towards its limit."""

from __future__ import annotations

import asyncio

import pytest

from agentevo.agents import Outcome, Policy
from agentevo.inference.conversation import Conversation
from agentevo.inference.torch_engine import TorchEngine
from agentevo.rollout.group import Attempt
from agentevo.types import Message, SamplingParams, Task

LIMIT_S = 1.0
ASKED = [Message("user", "Go on.")]


class Asks:
    """Asks, waits for its tool so long, asks again."""

    def __init__(self, tool_s: float) -> None:
        self._tool_s = tool_s

    async def run(self, task, policy):
        reply = await policy.generate(ASKED)
        await asyncio.sleep(self._tool_s)
        await policy.generate([*ASKED, reply.message, *ASKED])
        return Outcome(reward=1.0, success=True)


@pytest.mark.parametrize("comes", ["before", "meanwhile"])
def test_what_the_engine_sleeps_is_not_the_attempts_time(comes, loaded, chat):
    """A training step longer than both limits, while one attempt waits for a quick tool, or for its
    first answer, and another hangs."""
    engine = TorchEngine(loaded.model, loaded.tokenizer)

    def attempt(name: str, tool_s: float) -> Attempt:
        sampling = SamplingParams(max_new_tokens=3)
        conversation = Conversation(
            engine, chat, sampling, name=name, seed=1, context_length=256, timeout_s=LIMIT_S
        )
        return Attempt(Asks(tool_s), Task(id="t"), Policy(conversation), name=name, limit_s=LIMIT_S)

    async def work():
        attempts = [attempt("quick", 0.1), attempt("hangs", 3600.0)]
        if comes == "meanwhile":
            await engine.sleep()
        running = [
            asyncio.create_task(one.run(task_id="t", group_id="g", number=n))
            for n, one in enumerate(attempts)
        ]
        if comes == "before":
            while not all(one.policy.turns for one in attempts):
                await asyncio.sleep(0)
            await engine.sleep()
        await asyncio.sleep(LIMIT_S + 0.5)
        assert not any(one.done() for one in running)
        await engine.wake()
        return await asyncio.wait_for(asyncio.gather(*running), 30)

    quick, hangs = asyncio.run(work())
    assert (quick.status, quick.error, len(quick.turns)) == ("completed", None, 2)
    assert (hangs.status, hangs.error) == (
        "failed",
        "the episode took longer than agent.timeout_s=1 s",
    )
    assert hangs.duration_s >= 2 * LIMIT_S, "its own second, and the engine's"
