"""The secret with which a client proves that it belongs to an engine's run: 32 random bytes in
hexadecimal. They are in RUN/engines/secret, which only its owner can read. If machines share no
folder, they are in an environment variable that the recipe names (`reference`, ${env:NAME}).

The first process that needs the secret creates the file atomically. Both sides read the secret at
every handshake, so a deleted or replaced secret takes effect at the next one. Clients send it as
`Authorization: Bearer ...`, between machines only with TLS (`certificate.py`).
"""

from __future__ import annotations

import hmac
import re
import secrets
from pathlib import Path

from agentevo.errors import ConfigError, EngineError
from agentevo.runtime.credentials import key_of
from agentevo.runtime.files import create_atomic

NAME = "secret"
_HEADER = re.compile("Bearer [0-9a-f]{64}", re.ASCII)


class RunSecret:
    """The secret of a run. See the module. `folder` is the run's `engines`."""

    def __init__(self, folder: Path, reference: str | None = None) -> None:
        self.file = folder / NAME
        self._reference = reference

    def check(self) -> None:
        """Raises ConfigError if the recipe names an environment variable and it has no secret."""
        self._from_environment()

    def _from_environment(self) -> str | None:
        secret = key_of("rollout.engine_secret", self._reference)
        if secret is not None and not re.fullmatch("[0-9a-f]{64}", secret):
            raise ConfigError(
                f"rollout.engine_secret: the value of {self._reference} is not a secret: set it "
                "to 64 hexadecimal digits, such as from `openssl rand -hex 32`"
            )
        return secret

    def value(self) -> str:
        """The secret, 64 hexadecimal digits; created if there is none. Raises EngineError if the
        file can't be used. If an environment variable has the secret, no file is created or
        read."""
        configured = self._from_environment()
        if configured is not None:
            return configured

        try:
            try:
                secret = self.file.read_text(encoding="ascii").strip()
            except FileNotFoundError:
                self._make()
                secret = self.file.read_text(encoding="ascii").strip()
        except OSError as error:
            raise EngineError(
                f"{self.file} can't be used ({error.strerror or error}): only its owner can use "
                "it; run all processes of a run as one user"
            ) from error
        except UnicodeDecodeError:
            secret = ""

        if not re.fullmatch("[0-9a-f]{64}", secret):
            raise EngineError(
                f"{self.file} holds no secret: delete it, and the next process that needs it "
                "makes a new one"
            )

        return secret

    def header(self) -> dict[str, str]:
        """The header that a client sends."""
        return {"Authorization": f"Bearer {self.value()}"}

    def matches_header(self, authorization: str | None) -> bool:
        """Whether the received header has the secret. The comparison takes the same time for every
        wrong secret of the right form. For headers of another form the file is not read."""
        if authorization is None or not _HEADER.fullmatch(authorization):
            return False
        return hmac.compare_digest(authorization.encode(), f"Bearer {self.value()}".encode())

    def _make(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        create_atomic(self.file, secrets.token_hex(32) + "\n", mode=0o600)
