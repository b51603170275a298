"""The section of a sandbox: where code of a model runs, and what it may use. A tool, a scorer and
an agent that runs code have one each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from agentevo.config.section import Section

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
HERE = ("auto", "bubblewrap", "landlock", "none")
OWN_VARIABLES = ("HOME", "LD_PRELOAD", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")


class SandboxSection(Section):
    """Where code of a model runs, and what it may use."""

    type: str = "auto"
    """`bubblewrap`, `landlock`, `remote` (on another machine), `none` (no protection: for code that
    you wrote), the name of a registered sandbox, or `auto`: the first of bubblewrap and landlock
    that works here."""
    url: str | None = Field(default=None, pattern=r"^https?://[^/\s]+(/\S*)?$")
    """Where the server of sandboxes is that are not on this machine, such as
    https://boxes.example.org:8700."""
    api_key: str | None = None
    """`${env:NAME}`, the environment variable that holds the server's key."""
    memory_mib: int = Field(default=1024, ge=64)
    """Memory of all processes together, in MiB; of each also its address space."""
    cpu_s: float = Field(default=600.0, gt=0)
    """CPU seconds of each process, over its whole life."""
    processes: int = Field(default=32, ge=1, le=4096)
    """Processes and threads at once that the code may have."""
    cpus: float | None = Field(default=None, ge=0.01)
    """Cores that all processes together may keep busy; needs cgroups of version 2. Default: no
    limit but that of processes."""
    disk_mib: int = Field(default=64, ge=1)
    """What the work folder may hold, in MiB; in memory where the sandbox has a file system of its
    own, besides `memory_mib`."""
    file_mib: int = Field(default=16, ge=1, le=1024)
    """Size of one file, in MiB."""
    max_files: int = Field(default=10_000, ge=10)
    """Files and folders that the work folder may hold."""
    output_kib: int = Field(default=32, ge=1, le=16_384)
    """What is kept of stdout, of stderr and of a value, each: half of it from the beginning, half
    from the end."""
    start_timeout_s: float = Field(default=30.0, gt=0)
    """How long a sandbox may take to start."""
    timeout_s: float = Field(default=30.0, gt=0, lt=1e6)
    """How long one call may take."""
    max_tool_calls: int = Field(default=100, ge=0)
    """Calls of tools that the code of one call may make."""
    max_sandboxes: int = Field(default=64, ge=1)
    """Sandboxes at once; another one waits until one is closed."""
    wait_timeout_s: float = Field(default=600.0, gt=0)
    """How long to wait for another sandbox to be closed."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the code's environment. It has none of this process's."""
    packages: bool = False
    """Whether the packages of this Python can be imported; otherwise only its standard library."""

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not _VARIABLE.fullmatch(name) or "\0" in value:
                raise ValueError(f"{name!r} is no variable of an environment")
            if name in OWN_VARIABLES:
                raise ValueError(f"{name} is the sandbox's own: leave it out")
        return env

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.type in HERE and (self.url or self.api_key):
            raise ValueError(
                f"a sandbox of type {self.type} is on this machine: leave url and api_key out, or "
                "give type: remote"
            )

        if self.type == "remote" and not self.url:
            raise ValueError("type remote needs the url of its server")

        if self.type == "remote" and self.cpus is not None:
            raise ValueError(
                "cpus is chosen by the server: start it with cpus=..., or leave it out"
            )

        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.file_mib > self.disk_mib:
            raise ValueError(
                f"file_mib {self.file_mib} is more than disk_mib {self.disk_mib}: lower it"
            )
        return self


class ProgramSandboxSection(Section):
    """What a program in a sandbox of bubblewrap's may see and use, beside the system's files and
    its own."""

    network: bool = False
    """Whether it has the network of this machine."""
    read_only: tuple[Path, ...] = ()
    """Files and folders that it may read."""
    read_write: tuple[Path, ...] = ()
    """Files and folders that it may change, as far as their modes let anybody."""
    memory_mib: int = Field(default=2048, ge=64)
    """Memory of all its processes together, in MiB."""
    disk_mib: int = Field(default=256, ge=1)
    """What its work folder may hold, in MiB, in memory."""
    processes: int = Field(default=128, ge=1)
    """Processes and threads at once."""
