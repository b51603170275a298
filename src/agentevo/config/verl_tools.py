"""The entry of `agent.tools` for a tool configuration file of verl."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from agentevo.config.tools import ToolSection


class VerlToolsSection(ToolSection):
    """The tools of verl's tool_config_path: {tools: [{class_name: MODULE.CLASS, config: {...},
    tool_schema: {type: function, function: {...}}}]}. A row's extra_info.tools_kwargs gives the
    arguments of each tool. The reward that `execute` returns is the reward of the turn."""

    type: Literal["verl_tools"] = "verl_tools"
    name: str = Field(default="verl", pattern=r"^[A-Za-z0-9_-]{1,40}$")
    """Name of this entry, which distinguishes its tools from others of the same name."""
    file: Path
    """The file, such as gsm8k_tool_config.yaml. Its classes come from `import`, from installed
    packages, or from verl."""
