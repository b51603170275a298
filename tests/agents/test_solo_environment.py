"""An environment outside of attempts: it may do what it likes, and costs no more than its call."""

from __future__ import annotations

import threading

import pytest

from agentevo.agents import environment_thread
from agentevo.agents.environment_thread import MAX_HUNG_ALONE, SoloEnvironment
from agentevo.errors import ConfigError, EnvironmentFailure


class Environment:
    def __init__(self, closes=lambda: None) -> None:
        self._closes = closes

    def close(self) -> None:
        self._closes()


def raising(error: BaseException):
    def work(*arguments: object) -> None:
        raise error

    return work


def solo(make, notes=None, within_s=300.0) -> SoloEnvironment:
    notes = [] if notes is None else notes
    return SoloEnvironment(make, within_s=within_s, note=notes.append)


ERRORS = [ValueError("bad"), SystemExit(3), KeyboardInterrupt(), StopIteration(), GeneratorExit()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_it_raises_is_a_failure_of_its_call(error):
    notes: list[str] = []
    with solo(lambda: Environment(raising(error)), notes) as one:
        with pytest.raises(EnvironmentFailure, match=type(error).__name__):
            one.call(raising(error))
        assert one.call(lambda environment: 3) == 3
    assert "Environment was not closed properly" in notes[0] and type(error).__name__ in notes[0]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_one_that_can_not_be_made_is_refused(error):
    with pytest.raises(ConfigError, match=f"it can't be made: {type(error).__name__}"):
        solo(raising(error))


def test_one_that_hangs_is_replaced_a_few_times(monkeypatch):
    monkeypatch.setattr(environment_thread, "CLOSE_S", 0.1)
    go = threading.Event()
    made = []

    def make() -> Environment:
        made.append(1)
        return Environment()

    with solo(make, within_s=0.5) as one:
        for _ in range(MAX_HUNG_ALONE):
            with pytest.raises(
                EnvironmentFailure, match=r"hangs: no answer in agent\.timeout_s=0\.5 s"
            ):
                one.call(lambda environment: go.wait(300))
        with pytest.raises(EnvironmentFailure, match="has hung 3 times"):
            one.call(lambda environment: 3)

    go.set()
    assert len(made) == MAX_HUNG_ALONE
