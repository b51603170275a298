"""Entropies and moved log-probs of trained tokens: kept by the run, found again by the pages."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentevo.store import open_store
from agentevo.training.token_numbers import (
    Numbers,
    SampleNumbers,
    largest_moves,
    name_of,
    read_numbers,
)
from agentevo.types import Trajectory
from agentevo_ui.attempt_training import token_measures

STEP = 2


@pytest.fixture(scope="module")
def run_folder(
    tmp_path_factory: pytest.TempPathFactory,
    small_config: Callable[..., Any],
    quiet_view: Callable[..., Any],
) -> Path:
    """A run of two steps that trains on all of its groups."""
    from agentevo.runs.orchestration.run import train

    folder = tmp_path_factory.mktemp("moved") / "lake"
    words = ["run.name=lake", "trainer.steps=2", "trainer.schedule=constant"]
    words += ["cold_start.episodes=0", "algorithm.drop_zero_variance=false"]
    words += ["trainer.minibatches=1", "trainer.epochs=1"]  # so that the first pass is the last one
    train(small_config(folder, *words), view=quiet_view())
    return folder


@pytest.fixture(scope="module")
def trained(run_folder: Path) -> list[Trajectory]:
    """What its second step was trained on."""

    async def read() -> list[Trajectory]:
        async with await open_store(
            f"sqlite:///{run_folder / 'store.sqlite'}", create=False
        ) as store:
            return [
                trajectory.trajectory async for trajectory in store.trajectories(trained_step=STEP)
            ]

    return asyncio.run(read())


def view_of(folder: Path) -> Any:
    return SimpleNamespace(source=SimpleNamespace(file=lambda name: folder / name))


@pytest.mark.slow
def test_every_trained_token_has_its_entropy_and_how_far_it_moved(
    run_folder: Path, trained: list[Trajectory]
) -> None:
    rows = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    step = next(row for row in rows if row["step"] == STEP and "actor/entropy" in row)

    entropies = []
    moves = []
    for one in trained:
        moved, entropy = token_measures(view_of(run_folder), one, STEP)
        for turn in one.turns:
            assert len(moved[turn.index]) == len(turn.completion_ids) == len(entropy[turn.index])
        entropies += [*entropy.values()]
        moves += [*moved.values()]

    all_entropies = np.concatenate(entropies)
    all_moves = np.concatenate(moves)
    assert len(all_entropies) == step["trainer/trained_tokens"]
    assert all_entropies.mean() == pytest.approx(step["actor/entropy"], rel=0.01)
    assert abs(all_moves).max() == pytest.approx(step["actor/logprob_diff_max"], abs=0.002)


def test_a_file_that_is_damaged_or_of_other_tokens_costs_its_numbers_alone(
    tmp_path: Path, trained: list[Trajectory]
) -> None:
    import msgspec

    path = tmp_path / name_of(STEP)
    path.parent.mkdir()
    one = trained[0]
    assert token_measures(view_of(tmp_path), one, STEP) == ({}, {})  # no file

    for data in (b"", b"no file of ours", b"x\x9c" + bytes(90)):
        path.write_bytes(data)
        assert read_numbers(path) == {}

    import zlib

    other: Numbers = {one.id: [SampleNumbers(bytes(8), bytes(4), bytes(2), bytes(2))]}
    path.write_bytes(zlib.compress(msgspec.msgpack.encode(other)))
    assert token_measures(view_of(tmp_path), one, STEP) == ({}, {})  # a path that it never took

    torn: Numbers = {one.id: [SampleNumbers(bytes(8), bytes(4), bytes(3), bytes(2))]}
    path.write_bytes(zlib.compress(msgspec.msgpack.encode(torn)))
    assert largest_moves(path) == {}


@pytest.mark.slow
def test_attempts_are_sorted_by_how_far_they_moved(
    run_folder: Path, browse: Callable[..., Any]
) -> None:
    async def read() -> str:
        async with asyncio.timeout(300), browse(run_folder.parent) as client:
            while True:
                text = (await client.get("/runs/lake/attempts?order=moved")).text
                if "data-row" in text:
                    return text
                await asyncio.sleep(0.1)

    ids = re.findall(r'data-row>\s*<td class="name"><a [^>]*>([^<]*)<', asyncio.run(read()))
    found = read_numbers(run_folder / name_of(1)) | read_numbers(run_folder / name_of(STEP))
    largest = {
        name: max(float(abs(sample.arrays()[1]).max()) for sample in samples)
        for name, samples in found.items()
    }
    values = [largest[name] for name in ids]
    assert values == sorted(values, reverse=True)
    assert len(values) > 1
