"""Failures that only a program's own loop meets."""

from __future__ import annotations

from agentevo.errors import AgentEvoError, EngineUnavailableError


class SealError(AgentEvoError):
    """Submitted groups have tokens that the run's engine did not sample."""


class UnknownAttemptError(EngineUnavailableError):
    """An attempt is not running: the server was restarted, or ended it."""


class ModelNotOpenError(EngineUnavailableError):
    """A server has not opened the model: it was restarted, or has closed it."""
