"""Runs an environment outside of attempts and event loops: in the checks before a run, for the
vocabulary of a tiny policy, and for demonstrations. As in an attempt, any exception becomes an
EnvironmentFailure, and an environment that hangs is abandoned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from agentevo.agents.environment_thread import EnvironmentThread, Pace
from agentevo.environments import TextEnvironment
from agentevo.errors import ConfigError, EnvironmentFailure, describe_error
from agentevo.runtime.tracebacks import describe_failure

T = TypeVar("T")

MAX_HUNG = 3
"""After this many environments hang, no further environment is tried."""


class SoloEnvironment:
    """See the module. The time limit of every call is `within_s`. If close() fails, `note` gets a
    message, and there is no other effect."""

    def __init__(
        self, make: Callable[[], TextEnvironment], *, within_s: float, note: Callable[[str], None]
    ) -> None:
        """Raises ConfigError for an environment that can't be made."""
        self._make = make
        self._within_s = within_s
        self._note = note
        self._num_hung = 0
        self._begin()

    def _begin(self) -> None:
        self._thread = EnvironmentThread(Pace())
        self._made: list[TextEnvironment] = []
        environments = self._made
        try:
            self._thread.call_now(lambda: environments.append(self._make()), self._within_s)
        except ConfigError:
            self._thread.end_now(partial(_close_all, self._made))
            raise
        except Exception as error:
            self._thread.end_now(partial(_close_all, self._made))
            raise ConfigError(
                f"environment: it can't be made: {describe_failure(error)}"
            ) from error

    @property
    def name(self) -> str:
        return type(self._made[0]).__name__

    def call(self, work: Callable[[TextEnvironment], T]) -> T:
        """Calls `work` with the environment, or with a new one if the last one hung, and returns
        the result. Raises EnvironmentFailure."""
        if self._thread.is_busy:
            self._thread.end_now(partial(_close_all, self._made))
            self._num_hung += 1
            if self._num_hung < MAX_HUNG:
                self._begin()

        if self._num_hung >= MAX_HUNG:
            raise EnvironmentFailure(f"{self.name} has hung {self._num_hung} times")

        try:
            return self._thread.call_now(lambda: work(self._made[0]), self._within_s)
        except EnvironmentFailure:
            raise
        except Exception as error:
            raise EnvironmentFailure(describe_error(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        problem = self._thread.end_now(partial(_close_all, self._made))
        if problem is not None:
            self._note(f"the environment {self.name} was not closed properly: {problem}")


def _close_all(environments: list[TextEnvironment]) -> None:
    for environment in environments:
        environment.close()
