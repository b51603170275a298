"""Weights between processes: whole and as written, or refused."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import subprocess
import sys

import pytest
import torch
import weights_writer
from safetensors.torch import load_file

from agentevo.errors import EngineError
from agentevo.inference.weights import weights_folder as weights_module
from agentevo.inference.weights.weights_folder import WeightsFolder


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, bias=False))
    made[0].bias.requires_grad_(False)
    return made


def test_what_is_trained_comes_back_to_the_bit(model, tmp_path):
    folder = WeightsFolder(tmp_path / "weights")
    assert folder.latest() is None and folder.versions() == []

    sha256 = folder.write(12, model, keep=4)
    assert (folder.latest(), folder.versions()) == (12, [12])

    found = folder.read(12)
    assert found.keys() == {"0.weight", "1.weight"}, "what needs no gradient is not sent"
    assert all(torch.equal(found[name], dict(model.named_parameters())[name]) for name in found)

    file = tmp_path / "weights" / "version-000012" / "weights.safetensors"
    assert load_file(file).keys() == found.keys()
    assert json.loads((tmp_path / "weights" / "latest.json").read_text()) == {
        "version": 12,
        "sha256": sha256,
    }

    raw = (file.parent / "manifest.json").read_bytes()
    size = file.stat().st_size
    assert sha256 == hashlib.sha256(raw).hexdigest(), "it stands for every file"

    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    part = {"file": file.name, "sha256": digest, "bytes": size}
    assert json.loads(raw) == {"version": 12, "bytes": size, "tensors": 2, "parts": [part]}


def test_old_versions_go_and_never_a_newer_one(model, tmp_path):
    folder = WeightsFolder(tmp_path)
    for version in range(6):
        folder.write(version, model, keep=3)
    assert folder.versions() == [3, 4, 5]
    folder.write(4, model, keep=1)  # a trainer that went back
    assert (folder.versions(), folder.latest()) == ([4, 5], 4)

    with pytest.raises(EngineError, match=r"version-000003 is gone \(versions at hand: 4, 5\)"):
        folder.read(3)


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("file", "spoil", "problem"),
    [
        ("weights.safetensors", flip, "not what was written"),
        (
            "weights.safetensors",
            lambda content: content[: len(content) // 2],
            "not what was written",
        ),
        ("weights.safetensors", lambda content: b"", "not what was written"),
        ("weights.safetensors", None, "is gone"),
        ("manifest.json", lambda content: content[:-3], "version-000001 can't be read"),
        (
            "manifest.json",
            lambda content: content.replace(b'"version":1', b'"version":2'),
            "not what was written",
        ),
        ("manifest.json", None, "is gone"),
    ],
)
def test_torn_or_changed_versions_are_refused(file, spoil, problem, model, tmp_path):
    folder = WeightsFolder(tmp_path)
    folder.write(1, model, keep=2)
    path = folder.path(1) / file
    state = folder.state(1)
    assert state == folder.state(1)

    if spoil is None:
        path.unlink()
    else:
        path.write_bytes(spoil(path.read_bytes()))

    assert folder.state(1) != state
    with pytest.raises(EngineError, match=problem):
        folder.read(1)


def test_a_forged_version_with_a_manifest_of_its_own_is_not_the_one_that_latest_names(
    model, tmp_path
):
    folder = WeightsFolder(tmp_path / "weights")
    wanted = folder.write(1, model, keep=2)
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other[0].weight)
    WeightsFolder(tmp_path / "forged").write(1, other, keep=2)

    for name in ("weights.safetensors", "manifest.json"):
        (folder.path(1) / name).write_bytes(
            (tmp_path / "forged" / "version-000001" / name).read_bytes()
        )

    assert folder.read(1)["0.weight"].abs().sum() == 0
    with pytest.raises(EngineError, match="not what was written"):
        folder.read(1, sha256=wanted)


def test_a_torn_latest_is_said_and_the_next_version_mends_it(model, tmp_path):
    folder = WeightsFolder(tmp_path)
    folder.write(1, model, keep=2)
    (tmp_path / "latest.json").write_text('{"version": 1')
    with pytest.raises(EngineError, match=r"latest\.json can't be read"):
        folder.latest()
    folder.write(2, model, keep=2)
    assert folder.latest() == 2


def test_a_full_disk_leaves_what_was_there(model, tmp_path, monkeypatch):
    folder = WeightsFolder(tmp_path)
    folder.write(1, model, keep=2)

    def full(folder, files, tensors):
        (folder / next(iter(files))).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights_module, "write_files", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write(2, model, keep=2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "version-000001"]
    assert folder.latest() == 1 and folder.read(1)


@pytest.mark.slow
def test_killed_at_any_moment_of_writing(model, tmp_path):
    """After each of the places where something reached the disk: weights, manifest, folder, its
    name, latest's new file, its name."""
    folder = WeightsFolder(tmp_path)
    folder.write(1, model, keep=2)
    rows = []
    for version in range(2, 9):
        words = [str(tmp_path), str(version), str(version - 1)]
        writer = subprocess.run([sys.executable, weights_writer.__file__, *words], timeout=300)
        rows.append((writer.returncode, folder.latest(), len(folder.read(folder.latest()))))

    assert rows == [(-9, 1, 2)] * 5 + [(-9, 7, 2), (0, 8, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest.json",
        "version-000007",
        "version-000008",
    ], "leftovers are gone"
