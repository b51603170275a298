"""An entry of `agent.tools`: which kinds there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from agentevo.config.mcp import MCPFileSection, MCPServerSection
from agentevo.config.mcp_manager import MCPManagerSection
from agentevo.config.tools import FunctionToolSection
from agentevo.config.verl_tools import VerlToolsSection


def with_type(given: Any) -> Any:
    """The entry with its type, where it can be none but that: a name is a registered tool's."""
    if isinstance(given, str):
        return {"type": "function", "name": given}
    if isinstance(given, Mapping) and "type" not in given:
        return {"type": "function", **given}
    return given


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
]
"""An entry of `agent.tools`."""
