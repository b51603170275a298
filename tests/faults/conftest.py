"""The fork server, and small runs to be killed."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_attacks import finish
from fault_environment import SMALL
from fault_processes import Component, ForkServer

from agentevo.config import RunConfig, build_config


@pytest.fixture(scope="session")
def kills() -> int | None:
    """Random kills per component (`make soak`). None: each of its phases is aimed at once."""
    number = os.environ.get("AGENTEVO_FAULT_KILLS")
    return int(number) if number is not None else None


@pytest.fixture(scope="session")
def fork_server() -> ForkServer:
    return ForkServer()


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., RunConfig]:
    """`small("a.b=c", ..., name="run")`."""

    def make(*overrides: str, name: str = "run") -> RunConfig:
        return build_config(copy.deepcopy(SMALL), [f"run.dir={tmp_path / name}", *overrides])

    return make


@pytest.fixture(scope="session")
def whole_run(fork_server: ForkServer) -> Callable[..., RunConfig]:
    """`whole_run(folder, "a.b=c", ...)`: a run to which nothing happens, in one process."""

    def make(folder: Path, *overrides: str) -> RunConfig:
        config = build_config(copy.deepcopy(SMALL), [f"run.dir={folder / 'run'}", *overrides])
        finish([Component(fork_server, "train", "whole", config, folder)])
        return config

    return make


Members = Callable[..., list[Component]]


@pytest.fixture
def members(fork_server: ForkServer, tmp_path: Path) -> Iterator[Members]:
    """`members(config, "serve", "sample", "learn", before=...)`: components of one run, named after
    their kinds. None outlives the test."""
    made: list[Component] = []

    def make(config: RunConfig, *kinds: str, before: str | None = None) -> list[Component]:
        names = [f"{config.run_dir.name}-{kind}-{index}" for index, kind in enumerate(kinds)]
        found = [
            Component(fork_server, kind, name, config, tmp_path, before=before)
            for kind, name in zip(kinds, names, strict=True)
        ]
        made.extend(found)
        return found

    yield make
    for member in made:
        if member.process is not None and member.process.is_alive():
            member.kill()
