"""The recipe's keys for a profile of a few steps."""

from __future__ import annotations

from pydantic import Field

from agentevo.runtime.section import Section


class ProfileSection(Section):
    """Time and memory profile of a few steps: a trace for https://ui.perfetto.dev and a table, in
    `profile/` in the run's folder (docs/observability.md). `profile=true` is short for
    profile.enabled=true. Profiled steps are slower; results are the same."""

    enabled: bool = False
    """Profile some steps of the run."""
    after: int = Field(default=2, ge=0)
    """Warm-up steps before the profile, counted from the start or resumption of the run."""
    steps: int = Field(default=1, ge=1)
    """Number of profiled steps, in one trace. Evaluations and checkpoints that follow them are
    included."""
    nsight: bool = False
    """Mark these steps for NVIDIA Nsight Systems instead, with phases and operators as NVTX ranges:
    `nsys profile --capture-range=cudaProfilerApi agentevo train ...`. Needs a CUDA GPU, and writes
    nothing into the run's folder."""
