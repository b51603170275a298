"""What a program writes into an attempt beside its tokens: it is refused, and the run goes on."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
from own_loop import TASKS, gathered, loop

import agentevo
from agentevo.api.loop.records import NewAttempt, ServiceRequest
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.types import Message, Task, Trajectory

replaced = msgspec.structs.replace
WRONG = {
    "a large reward": {"reward": 1e300},
    "no number": {"reward": "1.0"},
    "not finite": {"reward": math.nan},
    "a bool": {"reward": True},
    "a large part": {"reward_parts": {"a": 1e308}},
    "a long name": {"reward_parts": {"a" * 5000: 1.0}},
    "many metrics": {"metrics": {f"m{n}": 1.0 for n in range(3000)}},
    "a large metric": {"metrics": {"m": 1e308}},
    "a metric that is no number": {"metrics": {"m": "x"}},
    "success": {"success": "x"},
    "truncated": {"truncated": 7},
    "no status": {"status": "weird"},
    "an error of half a character": {"status": "failed", "error": "\ud800"},
    "a long error": {"status": "failed", "error": "e" * 10**6},
    "no time": {"started_at": math.nan},
}


async def greedily(model):
    """A group of the likeliest tokens under the name of one that is trained on."""
    made = []
    seals = {}
    for number in range(4):
        new = NewAttempt(task_id="g", group_id="g/train@1", number=number, greedy=True)
        opened = await model.connection.open(new)
        await model.connection.generate(
            opened, ServiceRequest(id="1", messages=[Message("user", "Hi.")])
        )
        ended = (await model.connection.end(opened)).agents[""]
        one = Trajectory(
            id=opened.names[""],
            task_id="g",
            group_id="g/train@1",
            attempt=number,
            turns=ended.turns,
            reward=float(number),
        )
        made.append(one)
        seals[one.id] = ended.seal

    return agentevo.Group(
        id="g/train@1", task=Task(id="g", query="Hi."), trajectories=made, seals=seals
    )


@pytest.mark.slow
def test_what_no_attempt_can_say_is_refused_and_ends_nothing(tmp_path):
    async def work(model):
        (group,) = await gathered(model, TASKS[0])
        first, *others = group.trajectories

        async def refused(what, *groups, why=""):
            said = None
            try:
                await model.train(groups)
            except AgentEvoError as error:
                said = str(error)
            assert said is not None and re.search(why, said), (what, said)

        for what, fields in WRONG.items():
            wrong = replaced(first, **fields)
            await refused(what, replaced(group, trajectories=[wrong, *others]))

        turn = replaced(first.turns[0], reward=1e300)
        wrong = replaced(first, turns=[turn])
        await refused("a turn", replaced(group, trajectories=[wrong, *others]), why="up to 1e")

        for seal in ("é", 7):
            seals = dict.fromkeys(group.seals, seal)
            await refused("a seal", replaced(group, seals=seals), why="is not what")

        task = replaced(group.task, metadata={"x": object()})
        await refused("metadata", replaced(group, task=task))
        await refused("nothing", replaced(group, trajectories=[]), why="has no attempt")
        await refused("greedy", await greedily(model), why="is greedy")

        with pytest.raises(ConfigError, match="up to 1e"):
            group.with_rewards([1e13, 0.0, 0.0, 0.0])
        with pytest.raises(ConfigError, match="at most 1000 characters"):
            await gathered(model, {"id": "t" * 900_000, "query": "?"})

        largest = group.with_rewards([1e12, -1e12, 1e12, 0.0])
        assert (await model.train([largest])).step == 1

    loop(tmp_path / "run", work)
    assert agentevo.load_run(tmp_path / "run").audit().ok
