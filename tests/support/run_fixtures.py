"""Small whole runs, and what must be the same in two finished runs for them to be equal."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentevo.config import RunConfig, build_config
from agentevo.observability import LiveView, read_metrics
from agentevo.runs.folder.run_folder import read_store
from agentevo.training.checkpoint import Checkpoints

SMALL: dict[str, Any] = {
    "environment": {
        "type": "frozen_lake",
        "size": 3,
        "slippery": False,
        "view": "words",
        "max_actions": 4,
    },
    "model": {"name": "tiny", "tiny": {"hidden_size": 32, "num_layers": 1, "num_heads": 2}},
    "agent": {"format": "plain", "max_turns": 4},
    "sampling": {"max_new_tokens": 3},
    "algorithm": {"kl_coef": 0.02, "entropy_coef": 0.01},
    "trainer": {
        "steps": 4,
        "groups_per_step": 3,
        "group_size": 4,
        "learning_rate": 3e-3,
        "minibatches": 2,
        "schedule": "cosine",
    },
    "cold_start": {"episodes": 24, "batch_episodes": 8, "learning_rate": 1e-2},
    "evaluation": {"tasks": 2, "every": 2},
    "checkpoint": {"every": 2},
    "tracking": {"tensorboard": False, "report": False},
    "run": {"seed": 5, "threads": 1},
}
"""Multi-turn, with a cold start and everything that keeps state between steps switched on."""
TIMINGS = re.compile(r"^(time$|timing_s/|perf/|engine/)")
"""Metrics that differ between equal runs: timings, and counts of the engine's work, because
attempts that a resumed run finds in the store are not generated again."""


def _small_config(folder: Path, *overrides: str) -> RunConfig:
    return build_config(SMALL, [f"run.dir={folder}", *overrides])


class InterruptingView(LiveView):
    """Says nothing; presses Ctrl-C when `phase` comes with `detail`, or after `step`."""

    def __init__(self, *, phase: tuple[str, str] | None = None, step: int | None = None) -> None:
        super().__init__("test", stream=io.StringIO(), plain=True)
        self._at_phase = phase
        self._at_step = step

    def phase(self, name: str, detail: str = "") -> None:
        super().phase(name, detail)
        if (
            self._at_phase is not None
            and name == self._at_phase[0]
            and detail.startswith(self._at_phase[1])
        ):
            os.kill(os.getpid(), signal.SIGINT)

    def step(self, step: int, *args: Any, **kwargs: Any) -> None:
        super().step(step, *args, **kwargs)
        if step == self._at_step:
            os.kill(os.getpid(), signal.SIGINT)


def _without_timings(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not TIMINGS.match(key)}


def _outcome_of(folder: Path) -> dict[str, Any]:
    """The result of a run without its timings: weights, optimizer, counters, metrics, store and
    summary."""
    checkpoints = Checkpoints(folder / "checkpoints", 1)
    last = checkpoints.find("last")
    trainer, state = checkpoints.load(last)
    state["progress"].pop("wall_s")
    state.pop("chain")  # of records, which hold times
    summary = json.loads((folder / "summary.json").read_text())
    summary.pop("wall_s")

    async def stored(store: Any) -> Any:
        found = {}
        async for trajectory in store.trajectories():
            t = trajectory.trajectory
            turns = [
                (
                    turn.prompt_ids,
                    turn.completion_ids,
                    turn.logprobs,
                    turn.versions,
                    turn.seed,
                    turn.reward,
                )
                for turn in t.turns
            ]
            found[t.id] = (
                t.reward,
                t.success,
                t.status,
                t.error,
                turns,
                trajectory.split,
                trajectory.step,
                trajectory.state,
                trajectory.trained_step,
                trajectory.drop_reason,
            )

        records = [
            (record.step, _without_timings(record.record["metrics"]), record.num_trajectories)
            for record in await store.steps()
        ]
        return found, records, await store.counts()

    trajectories, records, counts = read_store(folder, stored)
    return {
        "step": checkpoints.steps()[-1],
        "weights": load_file(next(last.glob("*model.safetensors"))),  # the model's or its adapter's
        "trainer": trainer,
        "state": state,
        "metrics": [_without_timings(row) for row in read_metrics(folder / "metrics.jsonl")],
        "trajectories": trajectories,
        "records": records,
        "counts": counts,
        "summary": summary,
    }


def _assert_same(one: Any, other: Any, where: str = "") -> None:
    """Checks that two values, tensors included, are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), f"{where}: differ by {(one - other).abs().max()}"
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            _assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), f"{where}: {len(one)} and {len(other)} entries"
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            _assert_same(a, b, f"{where}[{index}]")
    else:
        assert one == other, where


@pytest.fixture(scope="session")
def small_config() -> Callable[..., RunConfig]:
    """`small_config(folder, "a.b=c", ...)`: SMALL with overrides, as a run in that folder."""
    return _small_config


@pytest.fixture(scope="session")
def quiet_view() -> Callable[..., LiveView]:
    """`quiet_view()`; with `step=2` or `phase=("evaluating", "before")` it presses Ctrl-C there."""
    return InterruptingView


@pytest.fixture(scope="session")
def outcome_of() -> Callable[[Path], dict[str, Any]]:
    return _outcome_of


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Any, Any], None]:
    return _assert_same
