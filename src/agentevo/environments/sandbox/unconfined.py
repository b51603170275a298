"""No protection: code runs as this user, with its network and files. Used only if the recipe sets
`type: none`."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from agentevo.environments.sandbox.launch import (
    INSIDE,
    SandboxLaunch,
    python_program,
    supervisor_settings,
)
from agentevo.environments.sandbox.local import LocalKind
from agentevo.environments.sandbox.sandbox import sandboxes
from agentevo.environments.sandbox.stale_folders import new_folder

if TYPE_CHECKING:
    from agentevo.environments.sandbox.section import SandboxSection


@sandboxes.register("none")
class Unconfined(LocalKind):
    """No protection except limits of memory, time and sizes: for code that you wrote."""

    name = "none"

    def obstacle(self) -> str:
        return ""

    def launch(self, section: SandboxSection) -> SandboxLaunch:
        folder = new_folder()
        return SandboxLaunch(
            [python_program(), "-I", "-S", "-B", str(INSIDE / "supervisor.py")],
            supervisor_settings(section, work=str(folder), is_alone=False, counts_processes=False),
            folder=folder,
            has_namespace=False,
            work=str(folder),
            clean=lambda: shutil.rmtree(folder, ignore_errors=True),
        )
