"""A profile of some steps of a run: what is written, what is told, and that a profiler that fails
costs the run nothing."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_policy import byte_policy
from slow import soak

from agentevo.api.run import sft, train
from agentevo.config import ProfileSection, RunConfig, build_config
from agentevo.errors import ConfigError
from agentevo.observability import LiveView, read_metrics
from agentevo.runs.orchestration.profiling import Profiling
from agentevo.runtime import devices

SmallConfig = Callable[..., RunConfig]
SHORT = ("trainer.steps=2", "cold_start.episodes=8", "algorithm.drop_zero_variance=false")
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"{n} + 1?"},
            {"role": "assistant", "content": str(n + 1)},
        ]
    }
    for n in range(24)
]


def _view() -> tuple[LiveView, io.StringIO]:
    stream = io.StringIO()
    return LiveView("test", stream=stream, plain=True), stream


def _table(folder: Path) -> dict[str, list[str]]:
    """First word of each line -> the others."""
    lines = [
        line.split()
        for line in (folder / "profile" / "table.txt").read_text(encoding="utf-8").splitlines()
    ]
    return {line[0]: line[1:] for line in lines if line}


@pytest.mark.slow
def test_a_run_is_profiled(small_config: SmallConfig, tmp_path: Path):
    view, stream = _view()
    short = (*SHORT, "trainer.steps=4")
    plain = train(small_config(tmp_path / "plain", *short), view=_view()[0])
    run = train(
        small_config(
            tmp_path / "run",
            *short,
            "profile=true",
            "profile.after=1",
            "profile.steps=2",
            "tracking.report=true",
        ),
        view=view,
    )
    table = _table(run.dir)
    for name in (
        "sampling",
        "prepare",
        "plan",
        "forward",
        "backward",
        "optimizer",
        "publish",
        "evaluation",
        "checkpoint",
        "store",
    ):
        assert float(table[name][0]) >= 0, name

    assert table["profile"] == ["of", "steps", "2", "to", "3"]
    assert int(table["sampling"][2]) == 2
    assert int(table["backward"][2]) >= 4, "two steps of two minibatches"
    assert int(table["evaluation"][2]) == 1, "after step 2"

    profile = run.summary["profile"]
    assert profile["steps"] == [2, 3]
    assert sum(phase["share"] for phase in profile["phases"]) == pytest.approx(1)

    rows = [
        row
        for row in read_metrics(run.dir / "metrics.jsonl")
        if row["step"] in (2, 3) and "timing_s/step" in row
    ]
    assert profile["seconds"] >= 0.9 * sum(row["timing_s/step"] or 0 for row in rows)
    assert all(phase["peak_bytes"] > 0 for phase in profile["phases"])

    with gzip.open(run.dir / "profile" / "trace.json.gz", "rt") as file:
        assert any(
            event.get("name") == "agentevo::sampling" for event in json.load(file)["traceEvents"]
        )

    assert "table.txt" in stream.getvalue()
    assert "<h2>Profile</h2>" in (run.dir / "report.html").read_text(encoding="utf-8")
    assert run.summary["eval"] == plain.summary["eval"], "a profile changes no result"
    assert plain.summary["profile"] == {}
    assert not (plain.dir / "profile").exists()


@pytest.mark.slow
def test_every_step_says_how_much_of_the_device_it_used(small_config: SmallConfig, tmp_path: Path):
    run = train(small_config(tmp_path / "run", *SHORT), view=_view()[0])
    rows = [
        row for row in read_metrics(run.dir / "metrics.jsonl") if row.get("trainer/distinct_tokens")
    ]
    assert rows

    for row in rows:
        assert 0 < row["perf/mfu"] < row["perf/mfu_logical"]
        assert row["perf/tokens_per_s_distinct"] == pytest.approx(
            row["trainer/distinct_tokens"] / row["timing_s/update_actor"]
        )
        assert row["perf/tokens_per_s_logical"] > row["perf/tokens_per_s_distinct"]


@pytest.mark.slow
def test_supervised_training_is_profiled(tmp_path: Path):
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in CHATS), encoding="utf-8")
    tree: dict[str, Any] = {
        "model": byte_policy(hidden_size=32, num_heads=2),
        "data": {"train": str(data)},
        "sft": {"batch_conversations": 4},
        "tracking": {"tensorboard": False, "report": False},
        "run": {"dir": str(tmp_path / "run")},
        "profile": True,
    }
    run = sft(build_config(tree, needs_environment=False), view=_view()[0])
    table = _table(run.dir)
    assert {"data", "plan", "forward", "backward", "optimizer"} <= set(table)
    assert run.summary["profile"]["steps"] == [3]

    row = read_metrics(run.dir / "metrics.jsonl")[3]
    assert row["perf/mfu"] and row["perf/tokens_per_s_distinct"]


@pytest.mark.slow
def test_a_run_that_is_too_short_says_so(small_config: SmallConfig, tmp_path: Path):
    view, stream = _view()
    run = train(
        small_config(tmp_path / "run", *SHORT, "profile=true", "profile.after=9"), view=view
    )
    assert "no step was profiled" in stream.getvalue()
    assert any("profile.after=9" in text for text in run.summary["warnings"])


@pytest.mark.slow
def test_a_run_that_ends_within_the_profile_writes_what_there_is(
    small_config: SmallConfig, tmp_path: Path
):
    run = train(
        small_config(
            tmp_path / "run", *SHORT, "profile=true", "profile.after=1", "profile.steps=5"
        ),
        view=_view()[0],
    )
    assert run.summary["profile"]["steps"] == [2]


@pytest.mark.parametrize("method", ["stop", *soak("start", "export_chrome_trace")])
@pytest.mark.slow
def test_a_profiler_that_fails_is_told_and_the_run_goes_on(
    small_config: SmallConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
):
    real = getattr(torch.profiler.profile, method)

    def fail(self: Any, *args: Any) -> None:
        if method == "stop":
            real(self)
        raise RuntimeError("no room for the trace")

    monkeypatch.setattr(torch.profiler.profile, method, fail)
    view, stream = _view()
    run = train(
        small_config(tmp_path / "run", *SHORT, "profile=true", "profile.after=0"), view=view
    )
    assert run.summary["steps"] == 2
    assert run.summary["profile"] == {}
    assert any("no room for the trace" in text for text in run.summary["warnings"])
    assert stream.getvalue().count("no room for the trace") == 1


@pytest.mark.slow
def test_a_step_that_fails_ends_the_profile(tmp_path: Path):
    config = build_config({"profile": {"enabled": True, "after": 0}}, needs_environment=False)
    notes: list[str] = []
    with (
        pytest.raises(ZeroDivisionError),
        Profiling(
            config.profile, tmp_path, torch.nn.Linear(2, 2), warn=notes.append, note=notes.append
        ) as profiling,
        profiling.step(1),
    ):
        raise ZeroDivisionError

    assert not torch.autograd._profiler_enabled()
    assert "profile of step 1" in notes[0]


class Cuda:
    """NVTX and CUDA's profiler API as a machine with a GPU has them: what was called, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(devices.cuda_profiler, "start", lambda: self.calls.append("start"))
        monkeypatch.setattr(devices.cuda_profiler, "stop", lambda: self.calls.append("stop"))
        monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", self.emit)

    @contextmanager
    def emit(self) -> Iterator[None]:
        self.calls.append("ranges")
        yield
        self.calls.append("no ranges")


def marked(section: ProfileSection, folder: Path) -> tuple[Profiling, list[str]]:
    lines: list[str] = []
    model = torch.nn.Linear(2, 2)
    return Profiling(section, folder, model, warn=lines.append, note=lines.append), lines


def test_steps_are_marked_for_nsight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    section = ProfileSection(enabled=True, nsight=True, after=1, steps=2)
    profiler, lines = marked(section, tmp_path)
    with profiler:
        for number in range(1, 5):
            with profiler.step(number):
                cuda.calls.append(f"step {number}")

    assert cuda.calls == [
        "step 1",
        "start",
        "ranges",
        "step 2",
        "step 3",
        "no ranges",
        "stop",
        "step 4",
    ]
    assert lines == ["steps 2 to 3 are marked for Nsight Systems"]
    assert list(tmp_path.iterdir()) == [] and profiler.summary == {}


def test_a_mark_that_fails_or_a_run_that_does_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = ProfileSection(enabled=True, nsight=True, after=0, steps=3)
    cuda = Cuda(monkeypatch)

    profiler, _ = marked(section, tmp_path)
    with pytest.raises(ValueError, match="broken"), profiler, profiler.step(1):
        raise ValueError("broken")
    assert cuda.calls == ["start", "ranges", "no ranges", "stop"]

    def fail() -> None:
        raise RuntimeError("no NVTX")

    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", fail)
    profiler, lines = marked(section, tmp_path)
    with profiler, profiler.step(1):
        pass

    assert cuda.calls[-2:] == ["start", "stop"]
    assert "the run continues: RuntimeError: no NVTX" in lines[0]


def test_marks_without_a_gpu_are_refused(small_config: SmallConfig, tmp_path: Path) -> None:
    words = ["profile=true", "profile.nsight=true", "model.device=cpu"]
    with pytest.raises(ConfigError, match=r"profile\.nsight marks what a CUDA GPU does"):
        train(small_config(tmp_path / "run", *words))
    assert not (tmp_path / "run").exists()
