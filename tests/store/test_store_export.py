"""Exports are whole, exact, and never half there."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from agentevo.errors import StoreError
from agentevo.store import StoredTrajectory, export_jsonl, open_store
from agentevo.store.streams import Streaming
from agentevo.types import Message, Trajectory

Make = Callable[..., Trajectory]


@pytest.fixture
def filled(url: str, make_trajectory: Make) -> list[Trajectory]:
    first = make_trajectory("a")
    said = msgspec.structs.replace(first.turns[1], messages=[Message("user", "línea\n\u2028 二")])
    written = [msgspec.structs.replace(first, turns=[first.turns[0], said]), make_trajectory("b"), make_trajectory("c", num_turns=0)]

    async def fill() -> None:
        async with await open_store(url) as store:
            await store.write_trajectories(written[:2], split="train", step=1)
            await store.write_trajectories(written[2:], split="eval", step=2)
            await store.drop(["b"], "stale")

    asyncio.run(fill())
    return written


async def export(url: str, path: Path, **filters: object) -> int:
    async with await open_store(url, create=False) as store:
        return await export_jsonl(store, path, **filters)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["out.jsonl", "deep/er/out.jsonl.gz"])
def test_every_line_is_a_whole_trajectory(url: str, filled: list[Trajectory], tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert asyncio.run(export(url, path)) == 3
    data = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    lines = data.splitlines()
    assert [msgspec.json.decode(line, type=Trajectory) for line in lines] == filled
    rows = [json.loads(line) for line in lines]
    assert [(r["split"], r["step"], r["state"], r["drop_reason"]) for r in rows] == [
        ("train", 1, "ready", None),
        ("train", 1, "dropped", "stale"),
        ("eval", 2, "ready", None),
    ]
    assert rows[0]["turns"][0]["logprobs"] == filled[0].turns[0].logprobs
    assert [p for p in path.parent.iterdir() if p.name.endswith(".part")] == []


def test_filters_apply_and_the_bytes_repeat(url: str, filled: list[Trajectory], tmp_path: Path) -> None:
    assert asyncio.run(export(url, tmp_path / "1.jsonl.gz", split="train", newest_first=True)) == 2
    assert asyncio.run(export(url, tmp_path / "2.jsonl.gz", split="train", newest_first=True)) == 2
    assert (tmp_path / "1.jsonl.gz").read_bytes() == (tmp_path / "2.jsonl.gz").read_bytes()
    lines = gzip.decompress((tmp_path / "1.jsonl.gz").read_bytes()).splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["b", "a"]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_an_export_that_breaks_leaves_the_old_file(
    url: str, filled: list[Trajectory], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "exports" / name
    asyncio.run(export(url, path))
    before = path.read_bytes()
    whole = Streaming.trajectories

    async def breaking(self: Streaming, **filters: object) -> AsyncIterator[StoredTrajectory]:
        async for stored in whole(self, **filters):  # type: ignore[arg-type]
            yield stored
            raise StoreError("the database went away")

    monkeypatch.setattr(Streaming, "trajectories", breaking)
    with pytest.raises(StoreError, match="went away"):
        asyncio.run(export(url, path))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_bad_targets_are_refused(url: str, filled: list[Trajectory], tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    for path, message in [
        (tmp_path / "out.csv", "must end in .jsonl"),
        (tmp_path / "a file" / "x.jsonl", "can't export to"),
    ]:
        with pytest.raises(StoreError, match=message):
            asyncio.run(export(url, path))
    (tmp_path / "taken.jsonl").mkdir()
    with pytest.raises(StoreError, match="can't export to"):
        asyncio.run(export(url, tmp_path / "taken.jsonl"))
    assert not list(tmp_path.glob(".*.part"))
