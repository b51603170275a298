"""The recipe's keys for a profile of a few steps."""

from __future__ import annotations

from pydantic import Field

from agentevo.config.section import Section


class ProfileSection(Section):
    """A look at where the time and memory of a few steps go: `profile/` in the run's folder gets a
    trace for https://ui.perfetto.dev and a table (docs/observability.md). `profile=true` is short
    for profile.enabled=true. Profiled steps are slower; results are the same."""

    enabled: bool = False
    """Profile some steps of the run."""
    after: int = Field(default=2, ge=0)
    """Steps that warm up first, counted from where the run starts or is resumed."""
    steps: int = Field(default=1, ge=1)
    """Steps that are profiled then, in one trace; evaluations and checkpoints that follow them are
    part of it."""
    nsight: bool = False
    """Mark these steps for NVIDIA's Nsight Systems instead, phases and operators as NVTX ranges:
    `nsys profile --capture-range=cudaProfilerApi agentevo train ...`. It needs a CUDA GPU, and
    writes nothing into the run's folder."""
