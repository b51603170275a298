"""The profile of a few steps of a run (`profile` in the recipe): a trace and a table in `profile/`
in the run's folder.

    trace.json.gz  for https://ui.perfetto.dev or chrome://tracing        table.txt  for people

With `profile.nsight` the steps are marked for Nsight Systems, and nothing is written: phases and
operators are NVTX ranges, and CUDA's profiler API says when the steps begin and end.

A profile that fails gives a warning and does not affect the run otherwise. Its files are written
and read between steps.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil
import torch

from agentevo.config import ProfileSection, RunConfig
from agentevo.errors import ConfigError
from agentevo.models.compute.device_peak import device_peak
from agentevo.observability.profile_table import (
    OTHER,
    PREFIX,
    PROFILE_TABLE,
    Profile,
    format_bytes,
    read_profile,
    table_text,
)
from agentevo.runtime.devices import find, has_nvtx, marked_for_nsight, profiled_activity

NUM_OPERATORS = 25


def check_profile(config: RunConfig) -> None:
    """Raises ConfigError, before anything is created, if this machine can't mark steps for Nsight
    Systems."""
    section = config.profile
    if section.enabled and section.nsight and not has_nvtx(find(config.model.device)):
        raise ConfigError(
            "profile.nsight marks what a CUDA GPU does, and this run has none: leave it out for a "
            "profile by PyTorch"
        )


class Profiling:
    """Profiles a few steps. The object is entered once around all steps, `step` around each."""

    def __init__(
        self,
        section: ProfileSection,
        run_dir: Path,
        model: torch.nn.Module,
        *,
        warn: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self.section = section
        self.table = run_dir / PROFILE_TABLE
        self.warn = warn
        self.note = note
        parameter = next(p for p in model.parameters() if p.is_floating_point())
        self.device = parameter.device
        self.dtype = parameter.dtype
        self._kernels = profiled_activity(self.device)
        self.summary: dict[str, Any] = {}
        """The profile's entry in summary.json; empty if nothing was profiled."""
        self._steps_left = section.after + section.steps if section.enabled else 0
        self._profiled: list[int] = []
        self._profiler: Any = None
        self._whole_range: Any = None
        self._ranges = ExitStack()
        """The ranges that are open while steps are marked for Nsight."""
        self._base_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if self._is_on:
            self._safely(self._end)
        elif self._steps_left and not self._profiled and kind is None:
            self.warn(
                "profile: no step was profiled, because the run ended within "
                f"profile.after={self.section.after} steps: set it lower"
            )

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context around step `number` and what follows it until the next step."""
        if self._steps_left and self._steps_left <= self.section.steps:
            if not self._is_on:
                self._safely(self._begin)
            if self._is_on:
                self._profiled.append(number)

        yield
        if self._steps_left:
            self._steps_left -= 1
            if self._steps_left == 0 and self._is_on:
                self._safely(self._end)

    @property
    def _is_on(self) -> bool:
        return self._profiler is not None or self._whole_range is not None

    def _begin(self) -> None:
        if self.section.nsight:
            self._mark()
            return

        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._kernels is not None:
            activities.append(self._kernels)

        self._base_bytes = 0 if self._kernels is not None else psutil.Process().memory_info().rss
        profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        profiler.start()
        self._profiler = profiler
        self._whole_range = torch.profiler.record_function(PREFIX + OTHER)
        self._whole_range.__enter__()

    def _mark(self) -> None:
        with ExitStack() as opened:
            # Inside it, phases are marked as ranges too: they check whether a profiler is active.
            opened.enter_context(marked_for_nsight())
            self._whole_range = torch.profiler.record_function(PREFIX + OTHER)
            self._whole_range.__enter__()
            self._ranges = opened.pop_all()

    def _end(self) -> None:
        profiler = self._profiler
        self._profiler = None
        whole_range = self._whole_range
        self._whole_range = None
        whole_range.__exit__(None, None, None)

        if profiler is None:
            self._ranges.close()
            self.note(f"{self._steps()} are marked for Nsight Systems")
            return

        profiler.stop()
        self.table.parent.mkdir(parents=True, exist_ok=True)
        trace = self.table.with_name("trace.json.gz")
        profiler.export_chrome_trace(str(trace))

        with gzip.open(trace, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]

        profile = read_profile(events, gpu=self._kernels is not None, base_bytes=self._base_bytes)
        self.table.write_text(
            table_text(profile, self._heading(), num_operators=NUM_OPERATORS), encoding="utf-8"
        )
        self.summary = _summary(profile, self._profiled)
        self.note(
            f"profile of {self._steps()}: {self.table}, and {trace} for https://ui.perfetto.dev"
        )

    def _heading(self) -> list[str]:
        peak = device_peak(self.device, self.dtype)
        memory_line = (
            "memory: bytes that PyTorch's allocator held on the GPU"
            if self._kernels is not None
            else f"memory: {format_bytes(self._base_bytes)} that the process held when profiling "
            "began, and tensors since then"
        )
        return [
            f"profile of {self._steps()}",
            f"device: {peak.source}, {peak.flops_per_s / 1e12:,.2f} TFLOP/s",
            memory_line,
        ]

    def _steps(self) -> str:
        first = self._profiled[0]
        last = self._profiled[-1]
        return f"step {first}" if first == last else f"steps {first} to {last}"

    def _safely(self, work: Callable[[], None]) -> None:
        """The only boundary between the profiler and the run: calls the profiler, and reports its
        failure as a warning."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 (any failure becomes a warning)
            self._profiler = None
            self._whole_range = None
            self._steps_left = 0

            with suppress(Exception):  # from ranges open for Nsight; the reason is reported below
                self._ranges.close()

            self.warn(
                f"profile: it failed and is left out; the run continues: {type(error).__name__}: "
                f"{error}"
            )


def _summary(profile: Profile, steps: list[int]) -> dict[str, Any]:
    entries: dict[str, Any] = msgspec.to_builtins(profile)
    return {"steps": steps, **entries, "operators": entries["operators"][:NUM_OPERATORS]}
