"""Builders for the store's tests. Fixtures, so that no test depends on how pytest imports its
folder."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import agentevo.store
from agentevo.store import Now
from agentevo.types import Message, Task, Trajectory, Turn


@pytest.fixture
def url(any_store: str) -> str:
    return any_store


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.sqlite'}"


class ManualClock:
    """Goes only when told to."""

    def __init__(self) -> None:
        self.wall = 1.7e9
        self.steady = 1000.0

    def now(self) -> Now:
        return Now(self.wall, self.steady)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make_trajectory() -> Callable[..., Trajectory]:
    def make(name: str, *, num_turns: int = 2, **changes: Any) -> Trajectory:
        def turn(index: int) -> Turn:
            return Turn(
                index=index,
                parent=index - 1 if index else None,
                prompt_ids=[1, 2, 3 + index],
                completion_ids=[7, 8],
                logprobs=[struct.unpack("f", struct.pack("f", -0.1 * (index + 1)))[0], 0.0],
                versions=[4, 5],
                finish_reason="stop",
                reward=0.25,
                messages=[Message("user", f"look {index}"), Message("assistant", "go")],
            )

        fields: dict[str, Any] = {
            "id": name,
            "task_id": "task",
            "group_id": "group",
            "turns": [turn(i) for i in range(num_turns)],
            "reward": 1.0,
        }
        return Trajectory(**(fields | changes))

    return make


@pytest.fixture
def make_task() -> Callable[..., Task]:
    def make(name: str, **changes: Any) -> Task:
        return Task(id=name, environment="coins", seed=3, **changes)

    return make


@pytest.fixture
def start_script() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a Python program that sees the package under test; its output is read from `stdout`.
    None outlives the test."""
    source = Path(agentevo.store.__file__).parents[2]
    started: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(source)}
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
