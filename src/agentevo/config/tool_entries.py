"""An entry of `agent.tools`: its kinds, and how each is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from agentevo.config.field_words import InWords
from agentevo.config.mcp import PATH, MCPFileSection, MCPManagerSection, MCPServerSection
from agentevo.config.tools import FunctionToolSection, ToolSection, VerlToolsSection

KINDS: Mapping[str, type[ToolSection]] = {
    "function": FunctionToolSection,
    "mcp": MCPServerSection,
    "mcp_file": MCPFileSection,
    "mcp_manager": MCPManagerSection,
    "verl_tools": VerlToolsSection,
}
"""Type -> its section."""


def with_type(entry: Any) -> Any:
    """The entry with its type added, if only one type is possible: a name belongs to a registered
    tool."""
    if isinstance(entry, str):
        return {"type": "function", "name": entry}
    if isinstance(entry, Mapping) and "type" not in entry:
        return {"type": "function", **entry}
    return entry


def meant_type(entry: Mapping[str, Any]) -> tuple[str, str] | None:
    """For an entry without a type that can't be a registered tool: the key that shows this, and the
    probable type."""
    if "type" in entry:
        return None
    if "command" in entry:
        return "command", "mcp"

    if "url" in entry:
        is_manager = str(entry["url"]).rstrip("/").endswith(PATH)
        return "url", "mcp_manager" if is_manager else "mcp"

    if "file" in entry:
        is_yaml = str(entry["file"]).endswith((".yaml", ".yml"))
        return "file", "verl_tools" if is_yaml else "mcp_file"

    return ("servers", "mcp_file") if "servers" in entry else None


ToolEntry = Annotated[
    Annotated[
        FunctionToolSection
        | MCPServerSection
        | MCPFileSection
        | MCPManagerSection
        | VerlToolsSection,
        Field(discriminator="type"),
    ],
    BeforeValidator(with_type),
    InWords(
        "name of a tool, or mapping with a type",
        "names of tools (`agentevo list tools`), or of mappings with a type "
        f"({', '.join(KINDS)}), such as [calculator, {{type: mcp, name: shop, command: ./shop}}]",
    ),
]
"""An entry of `agent.tools`."""
