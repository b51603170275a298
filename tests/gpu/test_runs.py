"""Whole runs on a GPU by the command line: trained, killed and resumed, profiled."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

SMALL = {
    "model.name": "tiny",
    "model.device": "cuda",
    "trainer.steps": "5",
    "trainer.group_size": "4",
    "trainer.groups_per_step": "4",
    "trainer.learning_rate": "0.001",
    "checkpoint.every": "1",
    "evaluation.every": "0",
    "evaluation.tasks": "4",
}
WITHIN_S = 240


def command(folder, *options, **keys):
    overrides = {**SMALL, "run.dir": str(folder), **keys}
    pairs = [f"{key}={value}" for key, value in overrides.items()]
    return [sys.executable, "-m", "agentevo", "train", "coins", *pairs, *options]


def finished(*arguments, **keys):
    done = subprocess.run(
        command(*arguments, **keys), capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def steps_of(folder):
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {line["step"]: line for line in map(json.loads, lines) if "actor/grad_norm" in line}


def test_a_killed_run_goes_on_as_one_that_was_not(tmp_path):
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    finished(whole)

    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command(parts), stdout=log, stderr=log)
        deadline = time.monotonic() + WITHIN_S
        while len(steps_of(parts)) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
        process.wait(30)

    finished(parts, "--resume")
    one = steps_of(whole)
    other = steps_of(parts)
    assert sorted(one) == sorted(other) == [1, 2, 3, 4, 5]

    for step, numbers in one.items():
        for key in ("actor/grad_norm", "actor/entropy"):
            assert other[step][key] == pytest.approx(numbers[key], rel=1e-3), (step, key)


def test_a_profiled_run_says_what_kernels_took(tmp_path):
    said = finished(tmp_path / "run", **{"profile": "true", "model.dtype": "bfloat16"})
    assert "report:" in said
    tables = list((tmp_path / "run" / "profile").glob("*.txt"))
    assert tables
    assert any("gemm" in t.read_text() or "cutlass" in t.read_text() for t in tables)


def test_nsight_ranges_need_no_nsight(tmp_path):
    finished(tmp_path / "run", **{"profile": "true", "profile.nsight": "true"})


def test_the_doctor_names_the_gpu():
    done = subprocess.run(
        [sys.executable, "-m", "agentevo", "doctor"],
        capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    assert "NVIDIA" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
