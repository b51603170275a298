"""Sandboxes for unreviewed code: one warm Python interpreter for each trajectory, without access to
the network, to host files or to host variables."""

from agentevo.environments.sandbox import (  # noqa: F401 (they register themselves)
    bubblewrap,
    landlock,
    local,
    remote,
)
from agentevo.environments.sandbox.open_sandbox import Sandboxes
from agentevo.environments.sandbox.sandbox import (
    Execution,
    Failure,
    ProgramRun,
    Sandbox,
    SandboxTool,
    sandboxes,
)

__all__ = ["Execution", "Failure", "ProgramRun", "Sandbox", "SandboxTool", "Sandboxes", "sandboxes"]
