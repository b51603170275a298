"""What is recorded of attempts that a sampler plays: policy, tools, slow environments, scorers."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentevo.agents import Outcome
from agentevo.agents.environment_agent import EnvironmentAgent
from agentevo.config import build_config
from agentevo.config.agents import EnvironmentAgentSection
from agentevo.environments import make
from agentevo.environments.coins import CoinsConfig
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.rewards import rewards
from agentevo.rollout.sampler import Sampler
from agentevo.store import open_store
from agentevo.store.call_log import call_log
from agentevo.types import Message, Task


class UsesATool:
    async def run(self, task, policy):
        messages = [Message("user", task.query)]
        async with policy.call("tool", "search", depth=1) as call:
            await policy.generate(messages)
            call.note(results=3)
        if task.id == "two":
            raise ValueError("no such page")
        return Outcome(reward=0.0, success=False)


@pytest.fixture
def record(tiny_policy, scripted_engine, tmp_path):
    """`record(agent, tasks, **config)` -> trajectory id -> its calls, in the order of writing."""
    loaded = tiny_policy()
    chat = ChatFormat(loaded.tokenizer)

    def run(agent, tasks, **config):
        config = build_config(config, needs_environment=False)
        engine = scripted_engine(loaded.tokenizer, chat.end_of_turn_id, ["left"] * 40)
        url = f"sqlite:///{tmp_path / 'store'}"

        async def work():
            async with await open_store(url) as store:
                async with call_log(url) as calls:
                    sampler = Sampler(config, engine, chat, agent, store, 256, calls=calls)
                    await sampler.sample(
                        tasks, attempts=2, temperature=1.0, split="train", step=1, label="train"
                    )

                found = {}
                async for stored in store.calls():
                    assert stored.state == "ended"
                    found.setdefault(stored.call.trajectory_id, []).append(stored.call)

                return found

        return asyncio.run(work())

    return run


@pytest.fixture
def registered(monkeypatch):
    """Two rewards that exist during a test: one for each attempt, one for whole groups."""

    class Compares:
        def __init__(self, config) -> None: ...

        async def score_group(self, trajectories, task):
            return [1.0 for _ in trajectories]

    names = {"half": lambda completion: 0.5, "compares": Compares}
    monkeypatch.setattr(rewards, "_items", rewards._items | names)


def test_policy_tools_and_scorers_are_calls_of_their_attempt(record, registered) -> None:
    tasks = [Task(id="one", query="left"), Task(id="two", query="right")]
    found = record(UsesATool(), tasks, rewards=["half", "compares"])
    assert sorted(found) == [f"{task}/train@1#{k}" for task in ("one", "two") for k in (0, 1)]

    for name, calls in found.items():
        by_id = {call.id: call for call in calls}
        tree = {
            f"{call.kind} {call.name}": call.parent and by_id[call.parent].kind for call in calls
        }
        assert tree.pop("attempt UsesATool") is None
        assert tree.pop("tool search") == "attempt"
        assert tree.pop("policy generate") == "tool"

        ends = {call.kind: (call.status, call.error) for call in calls}
        asked = next(call for call in calls if call.kind == "policy").attributes
        assert asked["turn"] == 0 and asked["completion_tokens"] == 2 and "version" in asked

        if name.startswith("two"):
            assert tree == {} and ends["attempt"] == ("failed", "ValueError: no such page")
        else:
            assert tree == {"scorer half": "attempt", "scorer compares": "attempt"}
            assert ends["attempt"] == ("completed", None)
            search = next(call for call in calls if call.kind == "tool")
            assert search.attributes == {"depth": 1, "results": 3}


@pytest.mark.slow
def test_an_environment_that_is_waited_for_is_a_call(record) -> None:
    section = EnvironmentAgentSection(max_turns=1)

    def slow():
        environment = make(CoinsConfig())
        reset = environment.reset
        environment.reset = lambda **arguments: (time.sleep(0.6), reset(**arguments))[1]
        return environment

    found = record(EnvironmentAgent(section, slow), [Task(id="one", seed=1)])
    for calls in found.values():
        kinds = [(call.kind, call.name) for call in calls]
        attempt = next(call for call in calls if call.kind == "attempt")
        assert attempt.attributes["ending"].strip()  # where it stood when the attempt was over
        assert ("environment", "reset") in kinds and ("environment", "make") not in kinds
