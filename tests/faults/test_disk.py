"""A disk that is full, and checkpoints that are torn: nothing that was committed is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fault_attacks import finish
from fault_checks import Account, check, expected_ids, final_weights
from fault_processes import Component, PlannedKill

from agentevo.config import RunConfig
from agentevo.runs.folder.identity import ensure_run_folder
from agentevo.training.checkpoint import Checkpoints

pytestmark = pytest.mark.slow

Small = Callable[..., RunConfig]
Members = Callable[..., list[Component]]

STEPS = 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB: SQLite's log alone may take 16."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.strip()}")

    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes what is left."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue

    return filler


def until(condition: Callable[[], bool], what: str, within_s: float = 300.0) -> None:
    ends = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.005)


@pytest.fixture(scope="module")
def whole(
    fork_server: object,
    tmp_path_factory: pytest.TempPathFactory,
    whole_run: Callable[..., RunConfig],
) -> RunConfig:
    """A run in turn that nothing happened to."""
    return whole_run(tmp_path_factory.mktemp("whole"), *in_turn())


def in_turn() -> tuple[str, ...]:
    return (f"trainer.steps={STEPS}", "rollout.staleness=0", "checkpoint.every=2")


def assert_equal(found: Account, config: RunConfig, whole: RunConfig) -> None:
    unbroken = check(whole)
    assert [step.record["plan"]["digest"] for step in found.steps] == [
        step.record["plan"]["digest"] for step in unbroken.steps
    ]
    weights = final_weights(config)
    for name, tensor in final_weights(whole).items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-4, rtol=0.0)


def test_no_room_for_a_checkpoint(
    small: Small, members: Members, small_disk: Path, whole: RunConfig
) -> None:
    config = small(*in_turn())
    folder = config.run_dir / "checkpoints"
    (trainer,) = members(config, "train")
    trainer.start(PlannedKill("commit", 5, 0.0))
    assert trainer.reap() == -9, trainer.tail()

    shutil.copytree(folder, small_disk, dirs_exist_ok=True)
    shutil.rmtree(folder)
    folder.symlink_to(small_disk)
    filler = fill(small_disk)
    before = Checkpoints(folder, 2).steps()
    trainer.start()

    assert trainer.reap() == 1
    assert (
        "make room there and resume" in trainer.tail()
        and "No space left on device" in trainer.tail()
    )
    assert before
    assert [
        step
        for step in Checkpoints(folder, 2).steps()
        if Checkpoints.verify(folder / f"step-{step:06d}")
    ] == before

    filler.unlink()
    finish([trainer])
    assert_equal(check(config), config, whole)


def test_no_room_for_the_store(small: Small, members: Members, small_disk: Path) -> None:
    """It waits until there is room, and nobody fails."""
    config = small("trainer.steps=8", f"store.url=sqlite:///{small_disk}/store.sqlite")
    parts = members(config, "serve", "sample", "learn")

    def crowd() -> None:
        until(
            lambda: (
                parts[-1].marks.entered[0] > 0
                and (config.run_dir / "weights" / "version-000003").is_dir()
            ),
            "no step was made",
        )
        filler = fill(small_disk)
        time.sleep(2.0)
        full.append(filler.stat().st_size)
        filler.unlink()

    full: list[int] = []
    thread = threading.Thread(target=crowd)
    thread.start()
    finish(parts)
    thread.join()

    assert full and full[0] > 1 << 20
    assert check(config).trained == expected_ids(config)


@pytest.mark.soak
def test_no_room_for_weights(small: Small, members: Members, small_disk: Path) -> None:
    """Engines go on under the version before, and get the next one when there is room."""
    config = small("trainer.steps=8")
    ensure_run_folder(config)
    weights = config.run_dir / "weights"
    weights.symlink_to(small_disk)
    parts = members(config, "serve", "sample", "learn")

    def told() -> bool:
        fill(small_disk)  # again: a version that is deleted makes room for the next
        return "No space left on device" in parts[-1].log.read_text()

    def crowd() -> None:
        until(
            lambda: parts[-1].marks.entered[0] > 0 and (weights / "version-000003").is_dir(),
            "no step was made",
        )
        until(told, "nobody complains")
        (small_disk / "filler").unlink()
        freed.append(parts[-1].log.read_text())

    freed: list[str] = []
    thread = threading.Thread(target=crowd)
    thread.start()
    finish(parts)
    thread.join()

    assert freed and "could not be written, and is tried again" in freed[0]
    assert check(config).trained == expected_ids(config)
    assert json.loads((weights / "latest.json").read_text())["version"] == 8


def tear(path: Path, how: str) -> None:
    """One file of a checkpoint."""
    victim = (
        path
        / {
            "cut": "model.safetensors",
            "flipped": "trainer.pt",
            "gone": "state.json",
            "emptied": "checkpoint.json",
        }[how]
    )
    content = bytearray(victim.read_bytes())
    if how == "cut":
        os.truncate(victim, len(content) // 2)
    elif how == "flipped":
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif how == "gone":
        victim.unlink()
    else:
        victim.write_bytes(b"")


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(("cut",), marks=pytest.mark.soak, id="newest"),
        pytest.param(("flipped",), id="newest-bit"),
        pytest.param(("gone", "emptied", "cut"), id="all"),
    ],
)
def test_torn_checkpoints(
    how: tuple[str, ...], small: Small, members: Members, whole: RunConfig
) -> None:
    """The one before is taken; without any, all steps are done again from their plans."""
    config = small(*in_turn())
    (trainer,) = members(config, "train")
    trainer.start(PlannedKill("commit", 8, 1.0))
    assert trainer.reap() == -9, trainer.tail()

    folder = config.run_dir / "checkpoints"
    there = Checkpoints(folder, 2).steps()
    assert len(there) >= 2

    damaged = there[::-1][: len(how)] if len(how) == 1 else there
    for step, one in zip(damaged, how, strict=False):
        tear(folder / f"step-{step:06d}", one)

    trainer.start()
    assert trainer.reap() == 0, trainer.tail()

    text = trainer.log.read_text()
    for step in damaged:
        assert f"the checkpoint of step {step} is unusable and was deleted" in text

    assert_equal(check(config), config, whole)
