"""The table of a profile, from traces whose numbers are known."""

from __future__ import annotations

from typing import Any

import pytest

from agentevo.observability.profile_table import (
    PREFIX,
    Operator,
    format_bytes,
    read_profile,
    table_text,
)


def _phase(name: str, begin: float, end: float) -> dict[str, Any]:
    return {
        "cat": "user_annotation",
        "name": PREFIX + name,
        "ts": begin,
        "dur": end - begin,
        "pid": 1,
        "tid": 1,
    }


def _held(time: float, count: int, device: int = 0) -> dict[str, Any]:
    return {
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "ts": time,
        "args": {"Device Type": device, "Total Allocated": count},
    }


def _operator(
    name: str, begin: float, end: float, *, thread: int = 1, category: str = "cpu_op"
) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": begin, "dur": end - begin, "pid": 1, "tid": thread}


SECOND = 1e6
TRACE = [
    _phase("other", 0, 10 * SECOND),
    _phase("prepare", 1 * SECOND, 5 * SECOND),
    _phase("plan", 2 * SECOND, 3 * SECOND),
    _phase("plan", 5 * SECOND, 6 * SECOND),
    {"cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0, "dur": 1, "pid": 1, "tid": 1},
]


def test_phases_add_up_to_the_whole():
    profile = read_profile(TRACE)
    assert profile.seconds == 10
    assert {phase.name: (phase.seconds, phase.share, phase.times) for phase in profile.phases} == {
        "other": (5.0, 0.5, 1),
        "prepare": (3.0, 0.3, 1),
        "plan": (2.0, 0.2, 2),
    }


def test_the_order_of_events_does_not_matter():
    assert read_profile(TRACE[::-1]) == read_profile(TRACE)


def test_peaks_are_of_the_innermost_phase():
    held = [
        _held(1.5e6, 100),
        _held(1.6e6, 60),
        _held(2.5e6, 500),
        _held(2.6e6, 40),
        _held(5.5e6, 70),
        _held(2.5e6, 9999, device=1),
    ]
    peaks = {
        phase.name: phase.peak_bytes
        for phase in read_profile([*TRACE, *held], base_bytes=1000).phases
    }
    assert peaks == {"prepare": 1100, "plan": 1500, "other": 1070}, (
        "what is held on entering a phase and on leaving it counts, too"
    )

    on_gpu = {
        phase.name: phase.peak_bytes for phase in read_profile([*TRACE, *held], gpu=True).phases
    }
    assert on_gpu == {"prepare": 9999, "plan": 9999, "other": 9999}


def test_without_allocations_there_are_no_peaks():
    assert all(phase.peak_bytes is None for phase in read_profile(TRACE).phases)


def test_operators_by_self_time():
    calls = [
        _operator("linear", 0, 4e6),
        _operator("addmm", 1e6, 3e6),
        _operator("addmm", 0, 3e6, thread=2),
        _operator("gemm", 0, 9e6, category="kernel"),
    ]
    assert read_profile([*TRACE, *calls]).operators == (
        Operator("addmm", 5.0, pytest.approx(5 / 7), 2),
        Operator("linear", 2.0, pytest.approx(2 / 7), 1),
    )
    assert read_profile([*TRACE, *calls], gpu=True).operators == (Operator("gemm", 9.0, 1.0, 1),)


def test_the_table_has_a_line_for_each_and_ends_where_told():
    calls = [_operator("x" * 80, 0, 2e6), _operator("small", 2e6, 3e6)]
    text = table_text(
        read_profile([*TRACE, *calls, _held(0, 3 * 2**20)]), ["profile of step 3"], num_operators=1
    )
    assert text.startswith("profile of step 3\n")
    assert "prepare            3.000   30.0%       1       3.0 MiB\n" in text
    assert "total             10.000" in text
    assert "x" * 53 + "..." in text
    assert "small" not in text
    assert text.isascii()


def test_an_empty_trace_is_an_empty_table():
    profile = read_profile([])
    assert (profile.seconds, profile.phases, profile.operators) == (0, (), ())


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 << 30, "3.0 GiB"),
        (5000 << 30, "5000.0 GiB"),
    ],
)
def test_bytes_for_people(count: int, text: str):
    assert format_bytes(count) == text
