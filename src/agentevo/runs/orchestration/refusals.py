"""Runs independent checks, and raises all their problems together."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from agentevo.errors import ConfigError, SeveralProblemsError

P = ParamSpec("P")
T = TypeVar("T")


class Refusals:
    """The refusals so far."""

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []

    def collect(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Returns the result of the check; None if it refuses."""
        try:
            return check(*args, **kwargs)
        except SeveralProblemsError as error:
            self._errors += error.problems
        except ConfigError as error:
            self._errors.append(error)
        return None

    def raise_all(self) -> None:
        """Raises SeveralProblemsError for several refusals, a single refusal as it was raised, or
        nothing."""
        if len({str(error) for error in self._errors}) == 1:
            raise self._errors[0]
        if self._errors:
            raise SeveralProblemsError(self._errors)
