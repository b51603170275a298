"""The section of a sandbox: where a model's code runs, and what it may use. Tools, scorers and
agents that run code each have one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from agentevo.runtime.section import Section

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
HERE = ("auto", "bubblewrap", "landlock", "none")
OWN_VARIABLES = ("HOME", "LD_PRELOAD", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")


class SandboxSection(Section):
    """Where a model's code runs, and what it may use."""

    type: str = "auto"
    """`bubblewrap`, `landlock`, `remote` (on another machine), `none` (no protection: for code that
    you wrote), the name of a registered sandbox, or `auto`: the first of bubblewrap and landlock
    that works here."""
    url: str | None = Field(default=None, pattern=r"^https?://[^/\s]+(/\S*)?$")
    """URL of the sandbox server for type remote, such as https://boxes.example.org:8700."""
    api_key: str | None = None
    """`${env:NAME}`, the environment variable that holds the server's key."""
    memory_mib: int = Field(default=1024, ge=64)
    """Memory limit of all processes together, in MiB. It also limits the address space of each
    process."""
    cpu_s: float = Field(default=600.0, gt=0)
    """CPU time limit of each process, in seconds."""
    processes: int = Field(default=32, ge=1, le=4096)
    """Maximum number of concurrent processes and threads of the code."""
    cpus: float | None = Field(default=None, ge=0.01)
    """CPU cores for all processes together; needs cgroups version 2. Default: no limit except that
    of `processes`."""
    disk_mib: int = Field(default=64, ge=1)
    """Size limit of the work folder, in MiB. If the sandbox has its own file system, the folder is
    in memory, in addition to `memory_mib`."""
    file_mib: int = Field(default=16, ge=1, le=1024)
    """Size limit of one file, in MiB."""
    max_files: int = Field(default=10_000, ge=10)
    """Maximum number of files and folders in the work folder."""
    output_kib: int = Field(default=32, ge=1, le=16_384)
    """Size limit of stdout, of stderr and of a value, each, in KiB. A longer output keeps its
    beginning and its end, half of this size each."""
    start_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit of a sandbox's start, in seconds."""
    timeout_s: float = Field(default=30.0, gt=0, lt=1e6)
    """Time limit of one call, in seconds."""
    max_tool_calls: int = Field(default=100, ge=0)
    """Maximum number of tool calls by the code of one call."""
    max_sandboxes: int = Field(default=64, ge=1)
    """Maximum number of open sandboxes. A further one waits until one is closed."""
    wait_timeout_s: float = Field(default=600.0, gt=0)
    """Time limit of that wait, in seconds."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the code. It gets none of this process's variables."""
    packages: bool = False
    """Whether the code can import the packages of this Python; otherwise only the standard
    library."""

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not _VARIABLE.fullmatch(name) or "\0" in value:
                raise ValueError(f"{name!r} is not a valid environment variable")
            if name in OWN_VARIABLES:
                raise ValueError(f"{name} is set by the sandbox itself: remove it")
        return env

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.type in HERE and (self.url or self.api_key):
            raise ValueError(
                f"a sandbox of type {self.type} runs on this machine: remove url and api_key, or "
                "set type: remote"
            )

        if self.type == "remote" and not self.url:
            raise ValueError("type remote needs the url of its server")

        if self.type == "remote" and self.cpus is not None:
            raise ValueError("the server sets cpus: start it with cpus=..., or remove the key here")

        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.file_mib > self.disk_mib:
            raise ValueError(
                f"file_mib {self.file_mib} is more than disk_mib {self.disk_mib}: lower it"
            )
        return self


class ProgramSandboxSection(Section):
    """What a program in a bubblewrap sandbox may see and use, in addition to the system's files and
    its own."""

    network: bool = False
    """Whether it can use this machine's network."""
    read_only: tuple[Path, ...] = ()
    """Files and folders that it may read."""
    read_write: tuple[Path, ...] = ()
    """Files and folders that it may change, if their file modes also allow it."""
    memory_mib: int = Field(default=2048, ge=64)
    """Memory limit of all its processes together, in MiB."""
    disk_mib: int = Field(default=256, ge=1)
    """Size limit of its work folder, in MiB. The folder is in memory."""
    processes: int = Field(default=128, ge=1)
    """Maximum number of concurrent processes and threads."""
