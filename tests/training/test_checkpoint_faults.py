"""Checkpoints that were damaged, or whose disk is full: every change shows, the newest whole one is
found, older ones are never harmed."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from agentevo.config import LoraSection, ModelSection
from agentevo.errors import CheckpointError
from agentevo.models import checkpoint_manifest as manifest
from agentevo.models.compute.adapters import add_adapter, load_adapter
from agentevo.models.files.load import load_model
from agentevo.training.checkpoint import Checkpoints

STATE = {"optimization": {"moments": torch.zeros(50)}}


@pytest.fixture
def loaded(tiny_policy):
    return tiny_policy(hidden_size=16, num_layers=1, num_heads=1)


@pytest.fixture
def saved(loaded, tmp_path):
    """Checkpoints of steps 1 and 2, the first the better one, and their checksums by step."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", 9)
    sums = {}
    for step, value in ((1, 0.9), (2, 0.1)):
        path, sums[step] = checkpoints.save(
            step, loaded.model, loaded.tokenizer, STATE, {"progress": {"step": step}}, value
        )
        assert path == checkpoints.path(step)

    return checkpoints, sums


def files_of(path: Path) -> list[str]:
    return sorted(
        found.relative_to(path).as_posix() for found in path.rglob("*") if found.is_file()
    )


def snapshot(folder: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files_of(folder)
    }


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_nobody_uses_a_model_that_is_not_as_it_was_saved(saved, file, tmp_path):
    checkpoints, _ = saved
    path = checkpoints.path(2)
    section = ModelSection(name=str(path), device="cpu")
    flip_a_bit(path / "trainer.pt")
    load_model(section)

    flip_a_bit(path / file)
    with pytest.raises(manifest.TornError, match=rf"{file} has the sha256 .* is torn, or was cha"):
        load_model(section)
    with pytest.raises(manifest.TornError, match=re.escape(file)):
        manifest.verify_model(path)


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "extra/a.jinja", "pytorch_model.bin", "link"]
)
def test_nobody_uses_a_file_that_was_put_beside_those_that_were_saved(name, saved, tmp_path):
    checkpoints, _ = saved
    path = checkpoints.path(2)
    (path / "README.md").write_text("A model.")
    (path / ".note").write_text("")
    section = ModelSection(name=str(path), device="cpu")
    load_model(section)
    checkpoints.verify(path)

    (path / name).parent.mkdir(exist_ok=True)
    if name == "link":
        (path / name).symlink_to(tmp_path)
    else:
        (path / name).write_text("{}")

    for use in (
        lambda: load_model(section),
        lambda: checkpoints.verify(path),
        lambda: checkpoints.newest_whole(),
        lambda: manifest.verify_model(path),
    ):
        with pytest.raises(CheckpointError, match=rf"{name} is not a file of the checkpoint"):
            use()


@pytest.mark.slow
def test_nor_an_adapter(tiny_policy, tmp_path):
    base = tiny_policy()
    policy = add_adapter(copy.deepcopy(base.model), LoraSection(rank=2), seed=0)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 9)
    path, _ = checkpoints.save(1, policy, base.tokenizer, STATE, {}, None)
    load_adapter(copy.deepcopy(base.model), path)
    flip_a_bit(path / "adapter_model.safetensors")
    with pytest.raises(manifest.TornError, match=r"adapter_model\.safetensors has the sha256"):
        load_adapter(copy.deepcopy(base.model), path)


def test_the_manifest_names_every_file_with_its_checksum(saved):
    checkpoints, sums = saved
    path = checkpoints.path(2)
    content = json.loads((path / "checkpoint.json").read_text())
    expected = snapshot(path)
    del expected["checkpoint.json"]

    assert {"model.safetensors", "config.json", "trainer.pt", "state.json"} <= expected.keys()
    assert (content["files"], content["step"], content["value"]) == (expected, 2, 0.1)

    del content["sha256"]
    whole = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    assert sums[2] == hashlib.sha256(whole).hexdigest() == checkpoints.verify(path).sha256
    assert sums[1] != sums[2]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(place: float):
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 0x01
        path.write_bytes(bytes(content))

    return damage


DAMAGES = {
    "truncated": truncate,
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
}
DAMAGES |= {f"byte flipped at {place}": flip(place) for place in (0.0, 0.37, 1.0)}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_shows_and_the_one_before_is_taken(damage, saved, tmp_path):
    checkpoints, _ = saved
    path = checkpoints.path(2)
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    for name in files_of(path):
        DAMAGES[damage](path / name)
        with pytest.raises(CheckpointError, match=f"step-000002/{name}.* resume from"):
            checkpoints.verify(path)

        told = {}
        assert Checkpoints(checkpoints.folder, 9).newest_whole(torn=told.__setitem__) == 1
        assert list(told) == [2]
        assert name in str(told[2])
        assert 1 in Checkpoints(checkpoints.folder, 9).steps()

        shutil.copyfile(copy / name, path / name)
        assert checkpoints.newest_whole() == 2, "mended, so nothing else had changed"


@pytest.mark.parametrize(
    "code", [errno.EACCES, errno.EMFILE, errno.ESTALE, errno.EIO], ids=errno.errorcode.get
)
@pytest.mark.parametrize("name", ["checkpoint.json", "model.safetensors"])
def test_what_cannot_be_read_now_may_be_whole(name, code, saved, monkeypatch):
    checkpoints, _ = saved
    victim = checkpoints.path(2) / name
    opened = Path.open

    def refused(path, *args, **kwargs):
        if path == victim:
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)
    reason = re.escape(f"step-000002/{name} can't be read now ({os.strerror(code)})")
    with pytest.raises(CheckpointError, match=f"{reason}.*fix that and try again"):
        Checkpoints(checkpoints.folder, 9).newest_whole(
            torn=lambda step, error: pytest.fail(f"{step}: {error}")
        )

    monkeypatch.undo()
    assert Checkpoints(checkpoints.folder, 9).newest_whole() == 2


@pytest.mark.slow
def test_any_flipped_bit_of_the_manifest_shows(saved):
    checkpoints, _ = saved
    file = checkpoints.path(2) / "checkpoint.json"
    content = file.read_bytes()
    for place in range(0, len(content), 7):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            file.write_bytes(bytes(changed))
            with pytest.raises(CheckpointError, match=r"checkpoint\.json is torn"):
                manifest.read(checkpoints.path(2))


def test_a_damaged_index_is_in_nobodys_way(saved):
    checkpoints, _ = saved
    for damage in DAMAGES.values():
        damage(checkpoints.folder / "index.json")
        again = Checkpoints(checkpoints.folder, 9)
        assert (again.best_step, again.best_value, again.steps()) == (1, 0.9, [1, 2])
        again.forget_after(2)
        assert json.loads((checkpoints.folder / "index.json").read_text()) == {
            "steps": [1, 2],
            "best": {"step": 1, "value": 0.9},
        }


def test_the_newest_up_to_a_limit_that_is_the_one_committed(saved, loaded):
    checkpoints, _ = saved
    checkpoints.save(5, loaded.model, loaded.tokenizer, STATE, {}, None)
    assert checkpoints.newest_whole() == 5
    assert checkpoints.newest_whole(4) == 2
    assert checkpoints.newest_whole(0) is None
    assert Checkpoints(checkpoints.folder / "none", 2).newest_whole() is None


def test_a_renamed_checkpoint_is_not_of_that_step(saved):
    checkpoints, sums = saved
    checkpoints.path(2).rename(checkpoints.path(7))
    told = {}
    assert checkpoints.newest_whole(torn=told.__setitem__) == 1
    assert "is of step 2" in str(told[7])

    elsewhere = checkpoints.folder.parent / "moved"
    checkpoints.path(7).rename(elsewhere)
    assert checkpoints.verify(elsewhere).sha256 == sums[2], (
        "a copy outside of a run may be called anything"
    )


def test_older_ones_stay_until_the_step_is_committed(saved, loaded):
    checkpoints, _ = saved
    one = Checkpoints(checkpoints.folder, 1)
    one.save(3, loaded.model, loaded.tokenizer, STATE, {}, 0.95, prune=False)

    assert one.steps() == [1, 2, 3]
    assert json.loads((one.folder / "index.json").read_text()) == {
        "steps": [1, 2, 3],
        "best": {"step": 3, "value": 0.95},
    }

    one.prune()
    assert one.steps() == [3]
    assert sorted(path.name for path in one.folder.iterdir()) == ["index.json", "step-000003"]


def test_a_deletion_that_is_cut_short_leaves_no_half_checkpoint(saved, monkeypatch):
    checkpoints, _ = saved

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.forget_after(1)

    monkeypatch.undo()
    again = Checkpoints(checkpoints.folder, 9)
    assert again.newest_whole(torn=lambda step, error: pytest.fail(f"{step}: {error}")) == 1

    again.forget_after(1)
    assert sorted(path.name for path in again.folder.iterdir()) == ["index.json", "step-000001"]


def test_a_value_that_is_no_number_rates_nothing(saved, loaded):
    checkpoints, _ = saved
    checkpoints.save(3, loaded.model, loaded.tokenizer, STATE, {}, float("nan"))
    assert checkpoints.best_step == 1
    assert checkpoints.verify(checkpoints.path(3)).value is None


def test_all_is_on_the_disk_before_it_gets_its_name(saved, loaded, monkeypatch):
    checkpoints, _ = saved
    events = []
    fsync = os.fsync
    rename = Path.rename

    def spy_fsync(handle):
        events.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def spy_rename(path, target):
        events.append(f"rename to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(Path, "rename", spy_rename)
    checkpoints.save(3, loaded.model, loaded.tokenizer, STATE, {}, None)

    named = events.index("rename to step-000003")
    before = [Path(event) for event in events[:named]]
    assert {path.name for path in before if path.suffix != ".partial"} == set(
        files_of(checkpoints.path(3))
    )
    assert before[-1].suffix == ".partial", "the folder's own names come last"
    assert before[-2].name == "checkpoint.json"
    assert events[named + 1] == str(checkpoints.folder)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_disk_that_fills_up_while_files_are_synced(after, saved, loaded, monkeypatch):
    checkpoints, sums = saved
    before = snapshot(checkpoints.folder)
    fsync = os.fsync
    count = iter(range(1000))

    def full(handle):
        if next(count) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError,
        match=r"step-000003 could not be written.*No space left.*make room.*\(steps: 1, 2",
    ):
        checkpoints.save(3, loaded.model, loaded.tokenizer, STATE, {}, 1.0)

    monkeypatch.undo()
    assert snapshot(checkpoints.folder) == before
    assert (checkpoints.newest_whole(), checkpoints.verify(checkpoints.path(2)).sha256) == (
        2,
        sums[2],
    )
    assert (checkpoints.best_step, Checkpoints(checkpoints.folder, 9).best_step) == (1, 1)


def test_a_disk_that_is_full_for_the_index_alone(saved, loaded, monkeypatch):
    checkpoints, _ = saved

    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match=r"index\.json could not be written.*No space left"):
        checkpoints.save(3, loaded.model, loaded.tokenizer, STATE, {}, None)

    monkeypatch.undo()
    assert checkpoints.newest_whole() == 3
    assert ".index.json.tmp" not in files_of(checkpoints.folder)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()

    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")

    if subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    ).returncode:
        pytest.skip("this machine does not allow mounting a tmpfs")

    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["weights", "optimizer"])
def test_a_disk_that_is_really_full(what, loaded, small_disk, tiny_policy):
    checkpoints = Checkpoints(small_disk / "checkpoints", 9)
    _, digest = checkpoints.save(1, loaded.model, loaded.tokenizer, STATE, {}, None)
    before = snapshot(checkpoints.folder)

    model = (
        loaded.model
        if what == "optimizer"
        else tiny_policy(hidden_size=256, num_layers=2, num_heads=1).model
    )
    state = {"moments": torch.zeros(300_000)} if what == "optimizer" else STATE
    with pytest.raises(
        CheckpointError, match=r"step-000002 could not be written.*No space left.*\(steps: 1\)"
    ):
        checkpoints.save(2, model, loaded.tokenizer, state, {}, None)

    assert snapshot(checkpoints.folder) == before
    assert (checkpoints.newest_whole(), checkpoints.verify(checkpoints.path(1)).sha256) == (
        1,
        digest,
    )
    assert [path.name for path in checkpoints.folder.iterdir() if path.name.startswith(".")] == []

    checkpoints.save(2, loaded.model, loaded.tokenizer, STATE, {}, None)
    assert checkpoints.newest_whole() == 2, "there is room again"


def test_a_file_in_the_place_of_the_folder_is_said(loaded, tmp_path):
    (tmp_path / "checkpoints").write_text("no folder")
    with pytest.raises(CheckpointError, match=r"step-000001 could not be written.*File exists"):
        Checkpoints(tmp_path / "checkpoints", 1).save(
            1, loaded.model, loaded.tokenizer, STATE, {}, None
        )
