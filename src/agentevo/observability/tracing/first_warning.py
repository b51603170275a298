"""Reports only the first failure that OpenTelemetry's packages log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Self

from agentevo.errors import describe_error
from agentevo.runtime.credentials import without_passwords

MAX_PROBLEM_CHARS = 500
"""The maximum number of characters of a reported failure, which may be a server's answer."""
_PACKAGE = logging.getLogger("opentelemetry")
_HEADERS_LOGGER = "opentelemetry.util.re"
"""This logger reports a header that it can't read with its value, which may be a key."""


class FirstWarning(logging.Handler):
    """Reports the first warning of OpenTelemetry's loggers between `open` and `close`. No warning
    reaches the program's handlers."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.problem = ""
        """The failure that was reported."""
        self._notify = notify

    def open(self) -> Self:
        """Receives warnings from now on."""
        _PACKAGE.addHandler(self)
        _PACKAGE.propagate = False
        return self

    def close(self) -> None:
        """See logging.Handler."""
        _PACKAGE.removeHandler(self)
        _PACKAGE.propagate = not any(isinstance(h, FirstWarning) for h in _PACKAGE.handlers)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if record.name == _HEADERS_LOGGER:
            self.warn("OTEL_EXPORTER_OTLP_HEADERS has a piece that is not KEY=VALUE")
        else:
            self.warn(record.getMessage())

    def warn(self, problem: str | Exception) -> None:
        """Reports a problem if it is the first."""
        if self.problem:
            return

        words = problem if isinstance(problem, str) else describe_error(problem)
        words = without_passwords(words)[:MAX_PROBLEM_CHARS]
        self.problem = "".join(c if c.isprintable() else "?" for c in words)
        self._notify(f"tracing: spans may be missing (reported once): {self.problem}")

    def mute(self) -> None:
        """Reports nothing from now on."""
        self._notify = lambda line: None
