"""Checks that a recipe's judges may be used for training: the results of `agentevo judge` for each
judge must reach the thresholds of the recipe."""

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

_OPTIONS_OUTSIDE_DIGEST = {
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
_MODEL_SETTINGS_IN_DIGEST = {
    "api",
    "model",
    "temperature",
    "top_p",
    "max_new_tokens",
    "extra",
    "dtype",
}


def judge_digest(judge: JudgeOptions, sections: Mapping[str, RemoteModelSection]) -> str:
    """A digest of everything that determines a judge's answers: its models, their settings and its
    prompts. The digest does not depend on the servers' addresses, nor on whether a default is
    written out."""
    models = [
        sections[name].model_dump(mode="json", include=_MODEL_SETTINGS_IN_DIGEST)
        for name in judge.models
        if name in sections
    ]
    options = judge.model_dump(mode="json", exclude={*_OPTIONS_OUTSIDE_DIGEST, "models"})
    canonical_json = json.dumps([options, models], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical_json.encode()).hexdigest()


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

    problems = missed_thresholds(judge, values)
    if not problems:
        return ""

    return f"{'; '.join(problems)} ({path}): choose another judge or rubric, or relax the threshold"


def missed_thresholds(judge: JudgeOptions, values: Mapping[str, Any]) -> list[str]:
    """A text for each threshold that a judge does not reach. `values`: threshold -> measured value;
    None if the value could not be measured."""
    problems = []
    for name, (quantity, is_lower_bound) in THRESHOLDS.items():
        value = values.get(name)
        threshold = getattr(judge, name)
        if value is None:
            if is_lower_bound:
                problems.append(
                    f"{quantity} could not be measured, but the threshold is {name}={threshold:g}"
                )
        elif (value < threshold) if is_lower_bound else (abs(value) > threshold):
            problems.append(
                f"{quantity} is {value:.3g}, {'below' if is_lower_bound else 'above'} "
                f"{name}={threshold:g}"
            )

    return problems
