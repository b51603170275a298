"""Runs under torchrun: what several processes train, and that a failure ends all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentevo.config import load_config
from agentevo.errors import ConfigError
from agentevo.orchestration.checks import check_processes

SMALL = [
    "model.name=tiny",
    "model.tiny.hidden_size=48",
    "cold_start.episodes=0",
    "evaluation.tasks=4",
    "evaluation.samples=0",
    "trainer.groups_per_step=2",
    "trainer.group_size=4",
    "trainer.steps=2",
]


def launched(folder: Path, processes: int, *words: str) -> tuple[int, str]:
    """Exit code and output of `agentevo train` in that many processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else ()), "-m", "agentevo", "train"]
    ended = subprocess.run(
        [*command, "coins", f"run.dir={folder}", *SMALL, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    return ended.returncode, ended.stdout


def norms(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: r["actor/grad_norm"] for r in rows if "actor/grad_norm" in r}


@pytest.mark.slow
def test_a_sharded_run_is_one_processs_and_goes_on_in_one(tmp_path):
    """Two processes train two steps, one process a third."""
    assert launched(tmp_path / "one", 1, "trainer.steps=3")[0] == 0
    code, said = launched(tmp_path / "two", 2, "trainer.parallel.shard=2")
    assert code == 0, said
    code, said = launched(tmp_path / "two", 1, "trainer.steps=3", "--resume")
    assert code == 0, said
    expected, found = norms(tmp_path / "one"), norms(tmp_path / "two")
    assert len(expected) > 1
    assert found == pytest.approx(expected, rel=1e-2)  # oneDNN's layers round differently


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_processes_with_fewer_passes_keep_pace(tmp_path, dtype):
    """Three attempts on two processes, each a pass of its own; the tables of values, too."""
    code, said = launched(
        tmp_path / "run", 2, "trainer.parallel.shard=2", "trainer.micro_batch_tokens=64",
        "trainer.groups_per_step=1", "trainer.group_size=3", "algorithm.name=ppo",
        "critic.trunk=shared", f"model.dtype={dtype}",
    )  # fmt: skip
    assert code == 0, said


@pytest.mark.slow
def test_what_fails_on_the_first_process_ends_all(tmp_path):
    """A gradient that is not finite ends the run with the trainer's own words."""
    code, said = launched(
        tmp_path / "run", 2, "trainer.parallel.shard=2", "trainer.learning_rate=1e9"
    )
    assert code == 1
    assert "lower trainer.learning_rate" in said


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (["trainer.parallel.shard=2"], "1", "does not divide the 1 processes"),
        (["trainer.parallel.tensor=2"], "2", "trainer.parallel.tensor: agentevo train"),
        (["cold_start.episodes=4"], "2", "a cold start .* 2 processes can't train on that"),
        (["trainer.parallel.shard=2", "memory.optimizer=adamw_8bit"], "2", "8-bit moments"),
        (["trainer.parallel.shard=2", "algorithm.name=ppo"], "2", "a critic of its own"),
    ],
)
def test_what_several_processes_can_not_do_is_refused(words, world, message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ConfigError, match=message):
        check_processes(load_config("coins", [*SMALL, *words]))
