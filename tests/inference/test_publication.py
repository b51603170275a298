"""What is damaged after it was published is mended while the trainer waits, and engines take it."""

from __future__ import annotations

import asyncio
import copy
import errno
import os
from types import SimpleNamespace

import pytest
import torch

from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.inference.engine import NO_VERSION
from agentevo.inference.weights import publication
from agentevo.inference.weights import weights_folder as weights_module
from agentevo.inference.weights.publication import Publication
from agentevo.inference.weights.transports import transports
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.orchestration import rollout_sources as attempts
from agentevo.runs.orchestration.components import load_policy
from agentevo.runs.orchestration.rollout_sources import DisaggregatedRollouts, StopAskedError
from agentevo.runs.processes.serve import VersionFollower
from agentevo.store import open_store


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 4)


@pytest.fixture
def notes():
    return []


@pytest.fixture
def published(model, notes, tmp_path):
    """(folder, its writer) at version 2."""
    folder = WeightsFolder(tmp_path / "weights")
    made = Publication(folder, model, keep=2, note=notes.append)
    asyncio.run(made.publish(1))
    asyncio.run(made.publish(2))
    return folder, made


def whole(folder, model, version=2):
    assert folder.latest() == version
    assert torch.equal(
        folder.read(version, sha256=folder.latest_version().sha256)["weight"], model.weight
    )
    return True


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit": ("version-000002/weights.safetensors", flip),
    "half of it": (
        "version-000002/weights.safetensors",
        lambda path: path.write_bytes(path.read_bytes()[:50]),
    ),
    "no weights": ("version-000002/weights.safetensors", os.unlink),
    "a torn manifest": ("version-000002/manifest.json", lambda path: path.write_text("{")),
    "a torn latest": ("latest.json", lambda path: path.write_text("{")),
    "no latest": ("latest.json", os.unlink),
    "another latest": (
        "latest.json",
        lambda path: path.write_text('{"version": 1, "sha256": "00"}'),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_mended_and_told_once(damage, published, model, notes):
    folder, made = published
    asyncio.run(made.look_after())
    assert notes == []

    file, spoil = DAMAGE[damage]
    spoil(folder.folder / file)
    asyncio.run(made.look_after())

    assert whole(folder, model)
    assert (
        len(notes) == 1
        and "version 2 was damaged after it was published, and is written again" in notes[0]
    )

    before = folder.state(2)
    asyncio.run(made.look_after())
    assert folder.state(2) == before and len(notes) == 1


def test_damage_that_leaves_the_files_times_is_found_a_little_later(
    published, model, notes, monkeypatch
):
    folder, made = published
    asyncio.run(made.look_after())
    path = folder.path(2) / "weights.safetensors"
    info = path.stat()
    flip(path)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    asyncio.run(made.look_after())
    assert notes == []

    monkeypatch.setattr(publication, "VERIFY_S", 0.0)
    asyncio.run(made.look_after())
    assert len(notes) == 1 and whole(folder, model)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_trainer_that_comes_back_finds_it_damaged(damage, published, model, notes):
    """Among them a latest.json that can't be read, which must not end the trainer."""
    folder, _ = published
    file, spoil = DAMAGE[damage]
    spoil(folder.folder / file)
    asyncio.run(Publication(folder, model, keep=2, note=notes.append).publish(2))
    assert whole(folder, model)
    assert len(notes) == (damage not in ("no latest", "another latest")), (
        "those look like a trainer that was killed before it wrote"
    )


def test_what_an_earlier_trainer_has_published_stays(published, model, notes):
    folder, _ = published
    before = folder.state(2)
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.weight)

    again = Publication(folder, other, keep=2, note=notes.append)
    for version in (1, 2):
        asyncio.run(again.publish(version))
        assert folder.state(2) == before and whole(folder, model)

    asyncio.run(again.publish(3))
    assert whole(folder, other, 3) and notes == []


def test_a_folder_that_is_away_is_waited_for(published, model, notes):
    folder, made = published
    away = folder.folder.with_name("away")
    folder.folder.rename(away)
    folder.folder.write_text("no folder")

    for _ in range(3):
        asyncio.run(made.look_after())
    assert (
        len(notes) == 2
        and "can't be read" in notes[0]
        and "version 2 could not be written" in notes[1]
    )

    folder.folder.unlink()
    away.rename(folder.folder)
    asyncio.run(made.look_after())
    assert whole(folder, model)


def test_a_version_for_which_there_is_no_room_comes_when_there_is(
    published, model, notes, monkeypatch
):
    """A trainer that does not wait, after its last step for example, is not ended by it."""
    folder, made = published

    def full(folder, files, tensors):
        (folder / next(iter(files))).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(weights_module, "write_files", full)
        asyncio.run(made.publish(3))
        for _ in range(3):
            asyncio.run(made.look_after())

    assert whole(folder, model)
    assert (
        len(notes) == 1
        and "version 3 could not be written" in notes[0]
        and "No space left on device" in notes[0]
    )

    asyncio.run(made.look_after())
    assert whole(folder, model, 3) and len(notes) == 1


@pytest.mark.slow
def test_while_a_trainer_waits_engines_get_what_was_damaged(small_config, tmp_path, monkeypatch):
    """Under `wait` at staleness 0 no further version would ever come. It tells that it waits."""
    monkeypatch.setattr(attempts, "POLL_INTERVAL_S", 0.1)
    monkeypatch.setattr(attempts, "ALONE_S", 0.0)

    config = small_config(tmp_path / "run", "rollout.poll_s=0.02", "rollout.policy=wait")
    model = load_policy(config).model
    notes = []
    log = []
    stopped = []
    weights = WeightsFolder(config.run_dir / "weights")

    async def follower():
        engine = TorchEngine(copy.deepcopy(model), config=config.engine)
        await engine.begin(NO_VERSION)
        return VersionFollower(weights, engine, "continue", deadline_s=300, note=log.append)

    def damaged(said):
        return [note for note in said if "was damaged after it was published" in note]

    async def taken(following):
        async with asyncio.timeout(300):
            while not await following.look():
                await asyncio.sleep(0.02)

    async def work():
        async with await open_store(f"sqlite:///{tmp_path / 'store.sqlite'}") as store:
            own = TorchEngine(model, config=config.engine)
            parts = SimpleNamespace(
                config=config,
                model=model,
                engine=own,
                weights=transports.get("shared").sender(model, own, config, notes.append),
                store=store,
                tasks=TaskSource(config, None),
                run_engines=None,
            )
            apart = DisaggregatedRollouts(parts, lambda: bool(stopped), lambda: None, notes.append)
            await apart.begin(0)
            flip(weights.path(0) / "weights.safetensors")
            first = await follower()
            assert not await first.look(), "refused"

            waiting = asyncio.create_task(apart.round(1, []))
            await taken(first)
            async with asyncio.timeout(300):
                while len(damaged(notes)) < 2:  # the first mending may still be about to write it
                    (weights.folder / "latest.json").unlink(missing_ok=True)
                    await asyncio.sleep(0.2)

            await taken(await follower())
            stopped.append(True)
            with pytest.raises(StopAskedError):
                await waiting

    asyncio.run(work())
    (alone,) = set(notes) - set(damaged(notes))
    assert alone.startswith("no attempts after 0 s: start `agentevo sample`")
    assert notes.count(alone) == 1
    assert "is not what was written" in log[0] and log[1:] == ["serving version 0"] * 2
