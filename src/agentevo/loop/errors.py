"""Failures that only a program's own loop meets."""

from __future__ import annotations

from agentevo.errors import AgentEvoError, EngineUnavailableError


class SealError(AgentEvoError):
    """Groups were submitted whose tokens are not what the run's engine drew."""


class UnknownAttemptError(EngineUnavailableError):
    """An attempt is not under way: the server was restarted, or gave it up."""


class ModelNotOpenError(EngineUnavailableError):
    """A server has not opened the model: it was restarted, or has closed it."""
