from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.errors import DiskError, StoreError, TrainingError
from agentevo.observability.metrics import MetricsLog, read_evaluations, read_metrics


def write_steps(path: Path, first: int, last: int) -> None:
    with MetricsLog(path) as log:
        for step in range(first, last + 1):
            log.log(step, {"actor/entropy": 1.0 / step, "critic/score/mean": step / 7})


def without_time(path: Path) -> list[dict[str, float | None]]:
    return [
        {key: value for key, value in row.items() if key != "time"} for row in read_metrics(path)
    ]


def test_a_row_is_on_disk_before_log_returns(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path)
    log.log(1, {"b": 2.5, "a": 3})
    row = read_metrics(path)[0]
    log.close()
    assert list(row) == ["step", "time", "a", "b"]
    assert (row["step"], row["a"], row["b"]) == (1, 3, 2.5)
    assert isinstance(row["time"], float)


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.log(
            1, {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "fine": 1e300, "flag": True}
        )

    text = path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text

    row = read_metrics(path)[0]
    assert (row["nan"], row["inf"], row["minus"], row["fine"], row["flag"]) == (
        None,
        None,
        None,
        1e300,
        1,
    )


def test_anything_that_float_takes_is_a_number(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.log(1, {"tensor": torch.tensor(0.5), "bad": torch.tensor(float("nan"))})
    assert without_time(path) == [{"step": 1, "tensor": 0.5, "bad": None}]


def test_floats_survive_exactly(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.log(1, {"x": 0.1 + 0.2})
    assert read_metrics(path)[0]["x"] == 0.1 + 0.2


@pytest.mark.parametrize("key", ["step", "time"])
def test_a_metric_may_not_take_the_rows_own_names(tmp_path: Path, key: str) -> None:
    with (
        MetricsLog(tmp_path / "m.jsonl") as log,
        pytest.raises(TrainingError, match=f"{key!r} belongs to the row"),
    ):
        log.log(1, {key: 1.0})
    assert read_metrics(tmp_path / "m.jsonl") == []


def test_steps_never_go_back(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.log(3, {})
        log.log(3, {"val-core/coins/random": 0.25})
        with pytest.raises(TrainingError, match=r"step 2 come after step 3.*resume\(1\)"):
            log.log(2, {})


def test_steps_never_go_back_in_a_continued_file_either(tmp_path: Path) -> None:
    write_steps(tmp_path / "m.jsonl", 1, 5)
    with (
        MetricsLog(tmp_path / "m.jsonl") as log,
        pytest.raises(TrainingError, match="after step 5"),
    ):
        log.log(4, {})


def test_a_resumed_run_has_each_row_once(tmp_path: Path) -> None:
    straight = tmp_path / "a.jsonl"
    resumed = tmp_path / "b.jsonl"
    write_steps(straight, 1, 9)
    write_steps(resumed, 1, 6)

    with MetricsLog(resumed) as log:
        log.resume(4)
        for step in range(5, 10):
            log.log(step, {"actor/entropy": 1.0 / step, "critic/score/mean": step / 7})

    assert without_time(resumed) == without_time(straight)


def test_resume_keeps_the_kept_rows_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, 1, 6)
    before = path.read_bytes().splitlines()
    with MetricsLog(path) as log:
        log.resume(4)
    assert path.read_bytes().splitlines() == before[:4]
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]


def test_resume_of_a_new_run_is_harmless(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.resume(0)
        log.log(1, {"a": 1.0})
    assert without_time(tmp_path / "m.jsonl") == [{"step": 1, "a": 1.0}]


def test_a_crash_while_truncating_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, 1, 6)
    before = path.read_bytes()

    def power_cut(*_: object) -> None:
        raise OSError("power cut")

    log = MetricsLog(path)
    monkeypatch.setattr(os, "replace", power_cut)
    with pytest.raises(DiskError, match="power cut"):
        log.resume(2)

    assert path.read_bytes() == before


@given(cut=st.integers(min_value=0))
def test_a_file_torn_at_any_byte_reads_as_its_whole_rows_and_can_be_continued(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "m.jsonl"
    write_steps(path, 1, 4)
    whole = without_time(path)
    data = path.read_bytes()
    cut %= len(data) + 1
    path.write_bytes(data[:cut])
    survived = without_time(path)
    assert survived == whole[: len(survived)]
    assert len(survived) >= data[:cut].count(b"\n")

    with MetricsLog(path) as log:
        log.log(9, {"a": 1.0})

    assert without_time(path) == [*survived, {"step": 9, "a": 1.0}]


def test_a_broken_line_in_the_middle_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": oops\n{"step": 3}\n')
    with pytest.raises(StoreError, match="line 2 is not a metrics row"):
        read_metrics(path)
    path.write_text('{"step": 1}\n[1, 2]\n{"step": 3}\n')
    with pytest.raises(StoreError, match="line 2"):
        read_metrics(path)


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_evaluations_are_read_by_environment() -> None:
    found = read_evaluations(
        {
            "val-core/frozen_lake/success/greedy": 0.5,
            "val-core/frozen_lake/reward/sampled": None,
            "val-core/frozen_lake/random": 0.06,
            "val-core/frozen_lake/optimal": 0.78,
            "val-core/coins/success/sampled": 0.4,
            "val-core/coins/something/else": 1.0,
            "actor/entropy": 1.0,
        }
    )
    coins, lake = found
    assert (coins.environment, coins.success, coins.random) == ("coins", 0.4, None)
    assert (lake.environment, lake.success, lake.random, lake.optimal, lake.reward_sampled) == (
        "frozen_lake",
        0.5,
        0.06,
        0.78,
        None,
    )


@pytest.mark.slow
def test_importing_the_room_loads_nothing_heavy() -> None:
    heavy = ("torch", "matplotlib", "rich", "tensorboard", "sqlalchemy", "transformers")
    code = (
        "import sys, json, agentevo.observability; print(json.dumps([name for name in "
        f"{heavy!r} if name in sys.modules]))"
    )
    assert (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", code], check=True, capture_output=True, timeout=300
            ).stdout
        )
        == []
    )
