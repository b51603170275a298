"""The run's configuration under rollout.weights.url, by which machines that share no folder know
that they mean the same run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentevo.config import RunConfig
from agentevo.errors import ConfigError, StoreUnavailableError
from agentevo.event_loop import in_thread
from agentevo.inference.object_names import (
    CONFIG_FILE,
    ID_FILE,
    WRITER_FILE,
    is_others,
    others_weights,
)
from agentevo.parsing import ParseError, parse_yaml
from agentevo.retry import with_retries

if TYPE_CHECKING:
    from agentevo.inference.objects import Objects


class SharedConfig:
    """See the module."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    @classmethod
    def of(cls, config: RunConfig) -> SharedConfig | None:
        """Of a run; None for one whose weights go through no object store. Raises ConfigError for
        an address that can't be used."""
        from agentevo.inference.objects import Objects

        url = config.rollout.weights.url
        return cls(Objects(url)) if url is not None else None

    @property
    def place(self) -> str:
        return self._objects.url

    async def read(self, within_s: float, tell: Callable[[str], None]) -> dict[str, Any]:
        """Its tree; empty where there is none yet. A store that is away is waited for. Raises
        StoreUnavailableError after `within_s`, ConfigError for what is no configuration."""

        content = await self._content(CONFIG_FILE, within_s, tell)
        try:
            tree = parse_yaml(content.decode())
        except (UnicodeDecodeError, ParseError) as error:
            raise self._wrong() from error

        if tree is not None and not isinstance(tree, dict):
            raise self._wrong()
        return tree or {}

    async def check_writer(
        self, folder: Path, within_s: float, tell: Callable[[str], None]
    ) -> None:
        """Raises ConfigError where the weights are not those of the trainer of this folder; nobody
        else may change what holds for its run. Waits as `read` does."""
        own = folder / ID_FILE
        there = (await self._content(WRITER_FILE, within_s, tell)).decode(errors="replace")
        if is_others(there, own.read_text() if own.is_file() else ""):
            raise ConfigError(others_weights(self.place))

    async def _content(self, file: str, within_s: float, tell: Callable[[str], None]) -> bytes:
        async def attempt() -> bytes:
            try:
                return await in_thread(self._objects.get, file)
            except FileNotFoundError:
                return b""
            except OSError as error:
                raise StoreUnavailableError(f"{self.place}: {error}") from error

        return await with_retries(
            attempt, within_s=within_s, what="looking for the run in its object store", tell=tell
        )

    def write(self, text: str) -> None:
        """Raises StoreUnavailableError."""
        try:
            self._objects.put(CONFIG_FILE, text.encode())
        except OSError as error:
            raise StoreUnavailableError(f"{self.place}: {error}") from error

    def _wrong(self) -> ConfigError:
        return ConfigError(
            f"{self.place}/{CONFIG_FILE} is no configuration of a run: give rollout.weights.url an "
            "address of its own"
        )
