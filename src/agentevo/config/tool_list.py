"""Reading `agent.tools`: entries with the paths that a recipe means, or what is wrong with each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic

from agentevo.config.agents import SECTIONS
from agentevo.config.entry_problems import entry_problem
from agentevo.config.mcp import MCPFileSection, MCPServerSection
from agentevo.config.mcp_manager import MCPManagerSection
from agentevo.config.section import Section
from agentevo.config.tasks import with_absolute_paths
from agentevo.config.tool_entries import with_type
from agentevo.config.tools import FunctionToolSection
from agentevo.config.verl_tools import VerlToolsSection
from agentevo.registry import nearest

_KINDS: dict[str, type[Section]] = {
    "function": FunctionToolSection,
    "mcp": MCPServerSection,
    "mcp_file": MCPFileSection,
    "mcp_manager": MCPManagerSection,
    "verl_tools": VerlToolsSection,
}


def read_tools(agent: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The section of an agent, as written in a recipe that lies in `folder`, with the entries of
    its tools written out: a server that is started runs beside the recipe, wherever the run was
    started. With a line about each problem. Another agent's section stays as it is."""
    given = agent.get("tools")
    is_ours = "tools" in SECTIONS.get(str(agent.get("type")), Section).model_fields
    if not is_ours or not isinstance(given, (list, tuple)):
        return dict(agent), []
    entries: list[Any] = []
    lines: list[str] = []
    for index, entry in enumerate(given):
        read, problems = _read(f"agent.tools[{index}]", entry, folder)
        lines += problems
        entries += [] if problems else [read]
    # Where the recipe is refused anyway, the section says no more about them.
    return {**agent, "tools": ["refused"] if lines else entries}, lines


def _read(place: str, entry: Any, folder: Path) -> tuple[Any, list[str]]:
    options = with_type(entry)
    if isinstance(options, Section):
        return options, []
    if not isinstance(options, Mapping):
        return None, [f"{place}: got {entry!r}; needs the name of a tool, or a mapping with a type"]
    kind = options["type"]
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        guess = nearest(kind, list(_KINDS)) if isinstance(kind, str) else None
        hint = f" did you mean {guess}?" if guess else ""
        choices = ", ".join(_KINDS)
        return None, [f"{place}.type: got {kind!r};{hint} choose one of {choices}"]
    options = with_absolute_paths(dict(options), ("cwd", "file"), folder)
    if model is MCPServerSection and options.get("command") and options.get("cwd") is None:
        options["cwd"] = str(folder.resolve())
    try:
        model.model_validate(options)
    except pydantic.ValidationError as error:
        return None, [entry_problem(place, model, wrong) for wrong in error.errors()]
    return options, []
