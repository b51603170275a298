"""Attempts for the dashboard's lists: enough for several pages, with something for each filter, and
texts that somebody hostile wrote."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from agentevo.store import open_store
from agentevo.types import Call, Message, Task, ToolCall, Trajectory, Turn

STEP = 3
NUM_GROUPS = 20
SIZE = 6
WORD = "unicorn"
"""Said in every fifth attempt."""


def apart(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs it on a thread of its own: Playwright's loop may be running in this one."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work())
        except BaseException as error:  # noqa: BLE001 (raised again below)
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    if errors:
        raise errors[0]


def attempt_name(number: int) -> str:
    """The id of one of `many`."""
    group, member = divmod(number, SIZE)
    return f"train-{STEP}/g{group}@{STEP}#{member}"


def conversation(number: int) -> list[Turn]:
    """Two turns; the second goes on from the first, but every seventh begins anew."""
    length = 4 + number % 9
    said = f"I look for the {WORD}" if number % 5 == 0 else f"I go {number} steps to the left"
    call = ToolCall("look", f'{{"where": "room {number}"}}', f"c{number}")
    return [
        Turn(
            index=index,
            parent=index - 1 if index and number % 7 else None,
            messages=messages,
            prompt_ids=[10, 11, 12],
            completion_ids=[20 + (number + place) % 60 for place in range(length)],
            logprobs=[-0.01 - ((number * 7 + place) % 11) / 3 for place in range(length)],
            versions=[max(STEP - 1 - number % 3, 0)] * length,
            finish_reason="stop",
        )
        for index, messages in enumerate(
            (
                [
                    Message("user", f"Task {number // SIZE}: find it."),
                    Message("assistant", said, tool_calls=(call,)),
                ],
                [
                    Message("tool", "a door", tool_call_id=call.id, name="look"),
                    Message("assistant", f"done by {number}"),
                ],
            )
        )
    ]


def many() -> list[Trajectory]:
    """NUM_GROUPS groups of SIZE attempts of two agents at three kinds of tasks."""
    made = []
    for number in range(NUM_GROUPS * SIZE):
        group, attempt = divmod(number, SIZE)
        is_failed = number % 11 == 3
        reward = 0.0 if is_failed else ((number * 5) % 7) / 6
        made.append(
            Trajectory(
                id=attempt_name(number),
                task_id=f"task-{group}",
                group_id=f"train-{STEP}/g{group}@{STEP}:{('planner', 'player')[group % 2]}",
                attempt=attempt,
                turns=conversation(number),
                reward=reward,
                reward_parts={"rule": reward},
                success=reward > 0.6,
                status="failed" if is_failed else "completed",
                error="TimeoutError: no answer from the tool" if is_failed else None,
                truncated=number % 13 == 0,
                metrics={"num_actions": number % 4},
                started_at=1.7e9 + number,
                duration_s=1.0 + number % 5,
            )
        )

    return made


def add_many(store_url: str) -> None:
    """Writes and commits them as a step of their own; a group of each kind is dropped."""

    async def work() -> None:
        async with await open_store(store_url) as store:
            made = many()
            kinds = ("map", "maze", "puzzle")
            tasks = [
                Task(id=f"task-{group}", query="find", metadata={"kind": kinds[group % 3]})
                for group in range(NUM_GROUPS)
            ]
            await store.add_tasks(tasks, queue=False)
            await store.write_trajectories(made, split="train", step=STEP)
            whole = [one.id for one in made if one.status == "completed"]
            groups = {one.id: one.group_id for one in made}
            dropped = [name for name in whole if int(groups[name][9:].partition("@")[0]) < 3]
            kept = [name for name in whole if name not in dropped]
            await store.reserve(kept, STEP)
            why = {"no-spread": dropped}
            await store.commit_step(STEP, {"chain": "x", "plan": {"dropped": why}}, dropped=why)

    apart(work)


CANARY = "window.executed = true"
HOSTILE = (
    f"<script>{CANARY}</script><img src=x onerror='{CANARY}'></script></pre></div>"
    f"<svg/onload={CANARY}> \"'`> {{{{7*7}}}} ${{7*7}} javascript:{CANARY} <!-- ]]> "
    "\x1b[31mred\x1b[2J\x1b]0;title\x07 \u202eright to left\u202c \u05d0\u05d1\u05d2 "
    "\x00\x08\x7f\x9b \ufffe \u2028 \ud800lone http://example.com/x.png"
)
"""All of it is only text, wherever it stands."""
CLEAN = HOSTILE.encode("utf-8", "replace").decode()
"""The same for what can hold no lone surrogate, as files and databases."""
LARGE = 5_000_000


def hostile() -> list[Trajectory]:
    """Attempts whose every text is hostile: names, errors, tools, rewards, one of 5 MB."""
    long = (CLEAN + "\n") * (LARGE // len(CLEAN) + 1)
    call = ToolCall(CLEAN, f'{{"{CLEAN}": 1', CLEAN[:40])
    said = [
        Message("system", CLEAN),
        Message("user", CLEAN, name=CLEAN),
        Message("assistant", CLEAN, tool_calls=(call,), reasoning=CLEAN),
    ]
    answered = [
        Message("tool", CLEAN, tool_call_id=CLEAN[:40], name=CLEAN),
        Message("assistant", "</script>" * 40),
    ]
    turns = {"said": [said, answered], "long": [[Message("user", long)]]}

    return [
        Trajectory(
            id=f"{kind}{CLEAN}@1#{number}".replace("\x00", ""),
            task_id="hostile",
            group_id=f"{CLEAN}@1:{CLEAN[:60]}".replace("\x00", ""),
            attempt=number,
            turns=[
                Turn(
                    index=index,
                    parent=index - 1 if index else None,
                    messages=messages,
                    prompt_ids=[1, 2, 3],
                    completion_ids=[5, 6, 7, 8],
                    logprobs=[-0.1, -2.0, -9.0, -0.5],
                    versions=[0, 0, 0, 0],
                    finish_reason="stop",
                )
                for index, messages in enumerate(conversation)
            ],
            reward=0.5 + number,
            reward_parts={CLEAN.replace("\x00", ""): 0.5},
            metrics={CLEAN.replace("\x00", ""): 1.0},
            success=number == 0,
            status="completed" if number == 0 else "failed",
            error=None if number == 0 else CLEAN,
        )
        for number, (kind, conversation) in enumerate(turns.items())
    ]


def add_hostile(store_url: str) -> None:
    """Writes them as a step, with calls whose names, errors and reasons are hostile."""

    async def work() -> None:
        async with await open_store(store_url) as store:
            made = hostile()
            kind = {"kind": CLEAN}
            await store.add_tasks([Task(id="hostile", query=CLEAN, metadata=kind)], queue=False)
            await store.write_trajectories(made, split="train", step=STEP)
            name = made[0].id
            facts: dict[str, Any] = {"trajectory_id": name, "started_at": 1.0, "ended_at": 2.0}
            await store.write_calls(
                [
                    Call(id="h-1", kind="attempt", name=CLEAN, status="completed", **facts),
                    Call(
                        id="h-2",
                        kind="tool",
                        name=CLEAN,
                        status="failed",
                        error=CLEAN,
                        parent="h-1",
                        **facts,
                    ),
                    Call(
                        id="h-3",
                        kind="scorer",
                        name=CLEAN,
                        status="completed",
                        attributes={"score": 0.5, "reason": CLEAN},
                        parent="h-1",
                        **facts,
                    ),
                ]
            )
            await store.reserve([name], STEP)
            await store.commit_step(STEP, {"chain": "x"}, dropped={})

    apart(work)


def store_of(folder: Path) -> str:
    """The URL of the store in a run's folder."""
    return f"sqlite:///{folder / 'store.sqlite'}"
