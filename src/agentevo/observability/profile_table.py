"""A table of the time and memory of profiled steps, made from a Chrome trace as torch's profiler
writes it.

Each moment belongs to the innermost open phase, so the phases add up to the whole time. A phase's
peak memory is the most that the allocator held at once while that phase was the innermost. An
operator's self time leaves out the operators that it called.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

PREFIX = "agentevo::"
"""The prefix of the names of phases in the trace."""
PROFILE_TABLE = "profile/table.txt"
"""The path of the table in the folder of a run."""
OTHER = "other"
"""The phase of all time that belongs to no other phase. Spans the whole profile."""
CPU = 0
"""The trace's number for the CPU as a kind of device."""
CUDA = 1
"""The trace's number for CUDA as a kind of device."""

Event = Mapping[str, Any]
"""An event of the trace's `traceEvents`. Its times are in microseconds."""


class Phase(msgspec.Struct, frozen=True):
    """A line of the table."""

    name: str
    seconds: float
    share: float
    """Share of the whole profile's time, 0..1."""
    times: int
    peak_bytes: int | None
    """In bytes. None if nothing was allocated or freed in the whole profile."""


class Operator(msgspec.Struct, frozen=True):
    """An operator on the CPU, or a kernel on the GPU."""

    name: str
    seconds: float
    """Self time."""
    share: float
    """Share of the self time of all operators."""
    calls: int


class Profile(msgspec.Struct, frozen=True):
    """The table's content: phases and operators of a trace."""

    seconds: float
    phases: tuple[Phase, ...]
    """Phases by falling time."""
    operators: tuple[Operator, ...]
    """All operators, by falling self time."""


def read_profile(events: Iterable[Event], *, gpu: bool = False, base_bytes: int = 0) -> Profile:
    """Makes the table from a trace's `traceEvents`. gpu: whether memory and operators are those of
    the GPU. base_bytes is added to every peak. It is the memory that was already held when
    profiling began, if the allocator does not count that."""
    spans: list[tuple[float, float, str]] = []
    allocations: list[tuple[float, int]] = []
    calls: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        category = event.get("cat")
        name = str(event.get("name"))
        if category == "user_annotation" and name.startswith(PREFIX):
            spans.append((event["ts"], event["ts"] + event["dur"], name.removeprefix(PREFIX)))
        elif name == "[memory]" and event["args"]["Device Type"] == (CUDA if gpu else CPU):
            allocations.append((event["ts"], event["args"]["Total Allocated"]))
        elif category == ("kernel" if gpu else "cpu_op"):
            calls[event["pid"], event["tid"]].append(
                (event["ts"], event["ts"] + event["dur"], name)
            )

    phases = _phases(spans, allocations, base_bytes)
    return Profile(sum(phase.seconds for phase in phases), phases, _operators(calls.values()))


def _phases(
    spans: Sequence[tuple[float, float, str]], allocations: Sequence[tuple[float, int]], base: int
) -> tuple[Phase, ...]:
    self_times = _self_times(spans)
    times = Counter(name for _, _, name in spans)
    peaks = _peaks(spans, sorted(allocations), base) if allocations else {}
    total = sum(self_times.values()) or 1.0
    phases = [
        Phase(name, spent / 1e6, spent / total, times[name], peaks.get(name))
        for name, spent in self_times.items()
    ]
    return tuple(sorted(phases, key=lambda phase: -phase.seconds))


def _operators(threads: Iterable[Sequence[tuple[float, float, str]]]) -> tuple[Operator, ...]:
    self_times: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for spans in threads:
        for name, spent in _self_times(spans).items():
            self_times[name] += spent
        calls.update(name for _, _, name in spans)

    total = sum(self_times.values()) or 1.0
    operators = [
        Operator(name, spent / 1e6, spent / total, calls[name])
        for name, spent in self_times.items()
    ]
    return tuple(sorted(operators, key=lambda operator: -operator.seconds))


def _self_times(spans: Sequence[tuple[float, float, str]]) -> dict[str, float]:
    """Maps a name to the time of its spans (begin, end, name), without that of the spans inside
    them. Two spans are nested or disjoint."""
    self_times: dict[str, float] = defaultdict(float)
    open_spans: list[tuple[float, str]] = []
    for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_spans and open_spans[-1][0] <= begin:
            open_spans.pop()
        if open_spans:
            self_times[open_spans[-1][1]] -= end - begin
        self_times[name] += end - begin
        open_spans.append((end, name))

    return dict(self_times)


def _peaks(
    spans: Sequence[tuple[float, float, str]], allocations: Sequence[tuple[float, int]], base: int
) -> dict[str, int]:
    """Maps a phase to the most bytes held while it was the innermost. allocations: (time, bytes
    held from then on), in order."""
    moments: list[tuple[float, int, float, str | int]] = []
    for begin, end, name in spans:
        moments += [
            (end, 0, -begin, ""),
            (begin, 1, -end, name),
        ]  # at the same time, inner spans end first, and outer spans begin first

    moments += [(time, 2, 0.0, num_bytes) for time, num_bytes in allocations]
    peaks: dict[str, int] = {}
    open_phases: list[str] = []
    held_bytes = 0
    for _, kind, _, what in sorted(moments, key=lambda moment: moment[:3]):
        if kind == 2:
            held_bytes = int(what)
        elif kind == 1:
            open_phases.append(str(what))
        else:
            open_phases.pop()

        if open_phases:
            peaks[open_phases[-1]] = max(peaks.get(open_phases[-1], 0), held_bytes + base)

    return peaks


def table_text(profile: Profile, heading: Sequence[str], *, num_operators: int = 25) -> str:
    """The table as text of fixed width, in ASCII."""
    lines = [
        *heading,
        "",
        f"{'phase':<14}{'seconds':>10}{'share':>8}{'times':>8}{'peak memory':>14}",
    ]
    for phase in profile.phases:
        peak = "" if phase.peak_bytes is None else format_bytes(phase.peak_bytes)
        lines.append(
            f"{phase.name:<14}{phase.seconds:>10.3f}{phase.share:>8.1%}{phase.times:>8}{peak:>14}"
        )

    lines += [
        f"{'total':<14}{profile.seconds:>10.3f}",
        "",
        f"{'operator':<58}{'self seconds':>14}{'share':>8}{'calls':>10}",
    ]
    for operator in profile.operators[:num_operators]:
        name = operator.name if len(operator.name) <= 56 else f"{operator.name[:53]}..."
        lines.append(
            f"{name:<58}{operator.seconds:>14.3f}{operator.share:>8.1%}{operator.calls:>10}"
        )

    return "\n".join(lines) + "\n"


def format_bytes(count: float) -> str:
    """`512 B`, `1.5 MiB`, `12.0 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
