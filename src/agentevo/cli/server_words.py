"""A server of tools in words of the command line."""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.config.tools import ToolSection


_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S*", re.I)


def server_section(words: Sequence[str], api_key: str | None = None) -> ToolSection:
    """The server of a URL (of a manager's node, where it ends with /mcpapi), a file such as
    mcp_config.json, or a command with its arguments, also as a text that a shell would split.
    `api_key`: `${env:NAME}`, for a URL. Raises ConfigError."""
    from pathlib import Path

    import pydantic

    from agentevo.agents.tools.mcp_connection import UNNAMED
    from agentevo.config.mcp import PATH, MCPFileSection, MCPManagerSection, MCPServerSection

    words = _command_words(words)
    first = words[0]
    try:
        if "://" in first and first.rstrip("/").endswith(PATH):
            return MCPManagerSection(url=first, api_key=api_key)

        if "://" in first:
            is_sse = first.rstrip("/").endswith("/sse")
            transport: Literal["sse", "http"] = "sse" if is_sse else "http"
            return MCPServerSection(name=UNNAMED, url=first, transport=transport, api_key=api_key)

        if api_key is not None:
            raise ConfigError(f"{first}: a key is for a URL: a command reads its own variables")

        if len(words) == 1 and first.endswith(".json"):
            return MCPFileSection(file=Path(first))

        return MCPServerSection(name=UNNAMED, command=first, args=tuple(words[1:]))
    except pydantic.ValidationError as error:
        raise ConfigError(f"{first}: {error.errors()[0]['msg']}") from error


def _command_words(words: Sequence[str]) -> Sequence[str]:
    """The words of a command that is written as one. Raises ConfigError."""
    if len(words) > 1 or _URL.fullmatch(words[0]) or os.path.exists(words[0]):
        return words

    try:
        split = shlex.split(words[0])
    except ValueError as error:
        raise ConfigError(f"{words[0]}: it can't be read as a command: {error}") from error
    if not split:
        raise ConfigError("the server is empty: give a URL, a file, or a command and its arguments")

    return split


def tool_sections(
    words: Sequence[str], *, choose: Mapping[str, Any], tells_world: bool
) -> Sequence[ToolSection]:
    """The tools of a server, or of a recipe (`agent.tools`). `choose`: `include` and `exclude`.
    `tells_world`: a server gets each attempt's task. Raises ConfigError."""
    from agentevo.config.mcp import MCPSection

    if len(words) == 1 and words[0].endswith((".yaml", ".yml")):
        from agentevo.config import load_config

        config = load_config(words[0], [], needs_environment=False)
        sections = tuple(getattr(config.agent, "tools", ()))
        if not sections:
            raise ConfigError(f"{words[0]}: agent.type={config.agent.type} has no tools")
    else:
        sections = (server_section(words),)

    changed = []
    for section in sections:
        update: dict[str, Any] = {key: tuple(values) for key, values in choose.items() if values}
        if tells_world and isinstance(section, MCPSection) and section.session == "attempt":
            update["send_task"] = True
        changed.append(section.model_copy(update=update))

    return changed
