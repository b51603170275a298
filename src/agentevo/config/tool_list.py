"""Reads `agent.tools`: resolves the paths of each entry, or reports its problems."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic

from agentevo.config.agents import SECTIONS
from agentevo.config.field_words import describe_wrong_choice, entry_problem
from agentevo.config.mcp import MCPServerSection
from agentevo.config.tasks import with_absolute_paths
from agentevo.config.tool_entries import KINDS, meant_type, with_type
from agentevo.runtime.section import Section

PLACE = "agent.tools"
SHOWN = ("read_only", "read_write")
"""Keys of a sandbox that name files and folders of the host."""


def read_tools(agent: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The section of an agent, as written in a recipe in `folder`, with the entries of its tools
    written out, and a line about each problem. A server that is started runs in the recipe's
    folder, independent of where the run was started. Another agent's section is not changed."""
    raw_entries = agent.get("tools")
    is_ours = "tools" in SECTIONS.get(str(agent.get("type")), Section).model_fields
    if not is_ours or not isinstance(raw_entries, (list, tuple)):
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
