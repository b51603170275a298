"""The results of an environment's `reset` and `step`, in the form of Gymnasium: (observation, info)
and (observation, reward, terminated, truncated, info).

The old API of gym also works: its reset returns only the observation, and its step returns
(observation, reward, done, info). `info["TimeLimit.truncated"]` marks an end by a limit.

An observation that is a text has no halves of surrogate pairs (observation.py, which also reads the
observations with images).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from agentevo.environments.observation import without_half_pairs
from agentevo.errors import EnvironmentFailure

TRUNCATED = "TimeLimit.truncated"


class StepResult(NamedTuple):
    """The result of a step, in Gymnasium's form."""

    observation: Any
    reward: Any
    terminated: Any
    truncated: Any
    info: Any


def read_step(result: object) -> StepResult:
    """Reads the result of `step`. Raises EnvironmentFailure for a result of any other form."""
    if not isinstance(result, tuple):
        raise EnvironmentFailure(
            f"the environment's step() returned a {type(result).__name__}: return (observation, "
            "reward, terminated, truncated, info)"
        )

    if len(result) == 5:
        return StepResult(_cleaned(result[0]), *result[1:])

    if len(result) != 4:
        raise EnvironmentFailure(
            f"the environment's step() returned {len(result)} values: return (observation, "
            "reward, terminated, truncated, info)"
        )

    observation, reward, done, info = result
    limited = done and isinstance(info, dict) and bool(info.get(TRUNCATED, False))
    return StepResult(_cleaned(observation), reward, False if limited else done, limited, info)


def read_reset(result: object) -> Any:
    """The observation of a result of `reset`."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return _cleaned(result[0])
    return _cleaned(result)


def _cleaned(observation: Any) -> Any:
    return without_half_pairs(observation) if isinstance(observation, str) else observation
