"""An entry of `agent.tools`: its kinds, and how each is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import BeforeValidator, Field

from agentevo.config.field_words import InWords, describe_wrong_choice, entry_problem
from agentevo.config.mcp import PATH, MCPFileSection, MCPManagerSection, MCPServerSection
from agentevo.config.sources import with_absolute_paths
from agentevo.config.tools import FunctionToolSection, ToolSection, VerlToolsSection
from agentevo.runtime.section import Section

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


PLACE = "agent.tools"
AGENTS = ("code_agent", "tool_agent")
"""The agents with such entries."""
SHOWN = ("read_only", "read_write")
"""Keys of a sandbox that name files and folders of the host."""


def read_tools(agent: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The section of an agent, as written in a recipe in `folder`, with the entries of its tools
    written out, and a line about each problem. A server that is started runs in the recipe's
    folder, independent of where the run was started. Another agent's section is not changed."""
    raw_entries = agent.get("tools")
    if agent.get("type") not in AGENTS or not isinstance(raw_entries, (list, tuple)):
        return dict(agent), []

    entries: list[Any] = []
    lines: list[str] = []
    for index, entry in enumerate(raw_entries):
        read, problems = _read(f"{PLACE}[{index}]", entry, folder)
        lines += problems
        entries += [] if problems else [read]

    # Where the recipe is refused anyway, the section reports no further problems of them.
    return {**agent, "tools": ["refused"] if lines else entries}, lines


def _read(place: str, entry: Any, folder: Path) -> tuple[Any, list[str]]:
    meant = meant_type(entry) if isinstance(entry, Mapping) else None
    if meant is not None:
        key, kind = meant
        return None, [
            f"{place}: an entry without a type is a registered tool, which has no {key}: add "
            f"type: {kind}"
        ]

    options = with_type(entry)
    if isinstance(options, Section):
        return options, []
    if not isinstance(options, Mapping):
        return None, [f"{place}: got {entry!r}; needs the name of a tool, or a mapping with a type"]

    kind = options["type"]
    model = KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        return None, [describe_wrong_choice(place, options, "type", list(KINDS))]

    options = with_absolute_paths(dict(options), ("cwd", "file"), folder)
    if model is MCPServerSection and options.get("command") and options.get("cwd") is None:
        options = _with_folder(options, folder.resolve())

    try:
        model.model_validate(options)
    except pydantic.ValidationError as error:
        return None, [entry_problem(place, model, detail) for detail in error.errors()]

    return options, []


def _with_folder(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A server's options with its working folder, the recipe's. In a sandbox it has its own folder,
    and its program and files are searched in the recipe's folder."""
    sandbox = options.get("sandbox")
    if sandbox is None or sandbox is False:
        return {**options, "cwd": str(folder)}

    changed = {**options, "sandbox": with_absolute_paths(sandbox, SHOWN, folder)}
    command = options["command"]
    if isinstance(command, str) and os.path.dirname(command):
        changed["command"] = str(folder / os.path.expanduser(command))
    return changed
