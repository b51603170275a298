"""A registry of tools that a test has for itself."""

from __future__ import annotations

import pytest

from agentevo.agents.tools import toolbox
from agentevo.config import tools as tool_config


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(tool_config.tools, "_items", {})
    monkeypatch.setattr(tool_config, "_cached", set())
    monkeypatch.setattr(toolbox, "RETRY_PAUSE_S", 0.001)
