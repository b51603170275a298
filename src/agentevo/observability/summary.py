"""Reads summary.json and checks it, because other programs can change the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from agentevo.errors import ConfigError
from agentevo.runtime.parsing import read_json_object


class _EvaluationSummary(msgspec.Struct):
    before: float | None
    after: float | None
    sampled: dict[str, float | None] = {}
    n: int | None = None
    random: float | None = None
    optimal: float | None = None
    cold_start_before: float | None = None
    failed: dict[str, float | None] | None = None


class _ModelUsage(msgspec.Struct):
    model: str
    role: str
    answers: int
    from_cache: int
    failed_requests: int
    tokens: int
    cost: float


class _RemoteModelUsage(msgspec.Struct):
    asked: list[_ModelUsage] = []
    budget_left: dict[str, dict[str, float]] = {}


class _Summary(msgspec.Struct):
    """The fields that tables and reports read, and their types."""

    name: str
    eval: _EvaluationSummary
    seed: int = 0
    steps: int = 0
    wall_s: float = 0.0
    environment: str | None = None
    model: str | None = None
    planned_steps: int | None = None
    stopped_early: str | None = None
    """Why the run ended before its last step, as its recipe allows."""
    warnings: list[str | dict[str, Any]] = []
    findings: list[dict[str, Any]] = []
    tokens: dict[str, int] = {}
    best: dict[str, float | None] = {}
    kept: dict[str, float] | None = None
    """`step`, `gap` and `attempts` of the best checkpoint, where a gap chose it
    (sft.stop_at_gap)."""
    remote_models: _RemoteModelUsage | None = None


def is_complete(summary: Mapping[str, Any], planned_steps: int) -> bool:
    """Whether a run has done all of its steps, or ended early as its recipe allows."""
    return summary["steps"] >= planned_steps or bool(summary.get("stopped_early"))


def read_summary(path: Path) -> dict[str, Any]:
    """The contents of a summary.json. Raises ConfigError for a damaged file."""
    summary = read_json_object(path)
    try:
        msgspec.convert(summary, _Summary)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: is damaged: {error}: restore or delete it") from error
    return summary
