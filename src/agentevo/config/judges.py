"""Checks that a recipe's judges may be used for training: the results of `agentevo judge`
for each judge, and the bars that they must reach."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentevo.config.remote_models import RemoteModelSection
from agentevo.errors import ConfigError
from agentevo.rewards import RewardConfig
from agentevo.rewards.judging import THRESHOLDS, JudgeOptions
from agentevo.runtime.parsing import read_json_object

_NOT_OF_THE_JUDGE = {
    "weight",
    "timeout_s",
    "requires",
    "label",
    "from_step",
    "until_step",
    "seed",
    "solved_from",
    "equal_score",
    "skip_equal",
    "calibration",
    "uncalibrated",
    *THRESHOLDS,
}
_OF_THE_MODEL = {"api", "model", "temperature", "top_p", "max_new_tokens", "extra", "dtype"}


def judge_digest(judge: JudgeOptions, sections: Mapping[str, RemoteModelSection]) -> str:
    """A digest of everything that determines a judge's answers: its models, their settings and its
    prompts. It does not depend on the servers' addresses, nor on whether a default is written
    out."""
    models = [
        sections[name].model_dump(mode="json", include=_OF_THE_MODEL)
        for name in judge.models
        if name in sections
    ]
    options = judge.model_dump(mode="json", exclude={*_NOT_OF_THE_JUDGE, "models"})
    written = json.dumps([options, models], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(written.encode()).hexdigest()


def check_calibrated(
    rewards: Sequence[RewardConfig], sections: Mapping[str, RemoteModelSection]
) -> None:
    """Raises ConfigError, before anything is created, for a judge that may not be used for
    training."""
    for reward in rewards:
        if isinstance(reward, JudgeOptions) and reward.weight:
            problem = _problem(reward, judge_digest(reward, sections))
            if problem:
                raise ConfigError(f"rewards: {reward.title}: {problem}")


def _problem(judge: JudgeOptions, digest: str) -> str:
    if judge.calibration is None:
        if not judge.needs_calibration:
            return ""
        return (
            "this judge's agreement with the truth is not measured, so it can't be used for "
            "training: measure it (`agentevo judge RECIPE --rows FILE --out FILE`) and "
            "give calibration=FILE, or accept the risk with uncalibrated=true "
            "(docs/rewards.md#judges)"
        )

    path = Path(judge.calibration).expanduser()
    remedy = "measure it again with `agentevo judge`"
    try:
        report = read_json_object(path)
        measured = report["measured"]
        measured_digest = str(report["digest"])
        values = {name: measured[name]["value"] for name in THRESHOLDS}
    except (ConfigError, OSError, KeyError, TypeError, ValueError) as error:
        return f"calibration: {path} is not a report of `agentevo judge` ({error}): {remedy}"

    if measured_digest != digest:
        return (
            f"calibration: {path} belongs to another judge (other models, settings, rubric or "
            f"votes): {remedy}"
        )

    problems = below_bars(judge, values)
    if not problems:
        return ""

    return f"{'; '.join(problems)} ({path}): choose another judge or rubric, or lower the bar"


def below_bars(judge: JudgeOptions, values: Mapping[str, Any]) -> list[str]:
    """The bars that a judge does not reach, in words. `values`: the measurements by the names of
    the bars; None if a value could not be measured."""
    problems = []
    for name, (what, at_least) in THRESHOLDS.items():
        value = values.get(name)
        bar = getattr(judge, name)
        if value is None:
            if at_least:
                problems.append(f"{what} could not be measured, but the bar is {name}={bar:g}")
        elif (value < bar) if at_least else (abs(value) > bar):
            problems.append(
                f"{what} is {value:.3g}, {'below' if at_least else 'above'} {name}={bar:g}"
            )

    return problems
