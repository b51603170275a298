"""The nursery, and small runs to be killed."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fault_world  # noqa: F401 (registers its environment)
import pytest
from fault_lives import Component, Nursery, finish

from agentevo.config import RunConfig, build_config

SMALL: dict[str, Any] = {
    "environment": {"type": "lottery"},
    "model": {"name": "tiny", "device": "cpu", "tiny": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "context_length": 256}},
    "agent": {"format": "plain", "max_turns": 2},
    "sampling": {"max_new_tokens": 4},
    "algorithm": {"drop_zero_variance": False},
    "trainer": {"steps": 20, "groups_per_step": 2, "group_size": 3, "learning_rate": 3e-3},
    "engine": {"timeout_s": 20, "max_running": 32, "kv_cache_tokens": 4096},
    "evaluation": {"tasks": 1, "every": 0, "samples": 0},
    "checkpoint": {"every": 3, "keep_last": 2},
    "rollout": {"staleness": 2, "lease_s": 1.0, "poll_s": 0.02},
    "tracking": {"tensorboard": False, "report": False},
    "run": {"seed": 5, "threads": 1},
}
"""Some 40 ms of computing per step."""


@pytest.fixture(scope="session")
def kills() -> int:
    """Per component."""
    return int(os.environ.get("AGENTEVO_FAULT_KILLS", "50"))


@pytest.fixture(scope="session")
def nursery() -> Nursery:
    return Nursery()


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., RunConfig]:
    """`small("a.b=c", ..., name="run")`."""

    def make(*overrides: str, name: str = "run") -> RunConfig:
        return build_config(copy.deepcopy(SMALL), [f"run.dir={tmp_path / name}", *overrides])

    return make


@pytest.fixture(scope="session")
def whole_run(nursery: Nursery) -> Callable[..., RunConfig]:
    """`whole_run(folder, "a.b=c", ...)`: a run to which nothing happens, in one process."""

    def make(folder: Path, *overrides: str) -> RunConfig:
        config = build_config(copy.deepcopy(SMALL), [f"run.dir={folder / 'run'}", *overrides])
        finish([Component(nursery, "train", "whole", config, folder)])
        return config

    return make


Members = Callable[..., list[Component]]


@pytest.fixture
def members(nursery: Nursery, tmp_path: Path) -> Iterator[Members]:
    """`members(config, "serve", "sample", "learn", before=...)`: components of one run, named after their kinds. None outlives the test."""
    made: list[Component] = []

    def make(config: RunConfig, *kinds: str, before: str | None = None) -> list[Component]:
        names = [f"{config.run_dir.name}-{kind}-{index}" for index, kind in enumerate(kinds)]
        found = [Component(nursery, kind, name, config, tmp_path, before=before) for kind, name in zip(kinds, names, strict=True)]
        made.extend(found)
        return found

    yield make
    for member in made:
        if member.process is not None and member.process.is_alive():
            member.kill()
