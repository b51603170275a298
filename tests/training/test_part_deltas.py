"""Processes that have a part of the weights each publish what changed of them: the versions of one
process, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from several_processes import run_processes
from slow import soak

from agentevo.errors import EngineError
from agentevo.inference.weights.weights_folder import WeightsFolder

sys.path.insert(0, str(Path(__file__).parent))
import delta_runs as runs

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[*runs.CASES_OF_CI, *soak(*runs.CASES_OF_SOAK)],
)
def found(request, tmp_path_factory):
    """(folder, of each process (case -> what came of it, its memory))."""
    folder = tmp_path_factory.mktemp("deltas")
    name = request.param
    outs = [folder / f"{process}.pt" for process in range(runs.num_processes(name))]
    run_processes(
        runs.__file__,
        [(name, process, folder / "meeting", folder, out) for process, out in enumerate(outs)],
        within_s=900,
    )
    loaded = [torch.load(out, weights_only=False) for out in outs]
    return folder, [
        (list(zip(runs.CASES[name], cases, strict=True)), memory) for cases, memory in loaded
    ]


def test_every_version_is_what_one_process_publishes(found):
    """Whoever reads it: one that follows, and one that is new. A full disk in the middle of a delta
    leaves nothing, and the next one is right."""
    _, of_processes = found
    for case, one in of_processes[0][0]:
        assert one["wrong"] == [], case
        assert max(chain for chain, _ in one["kinds"]) > 2, case


def test_a_tensor_that_one_process_has_whole_has_the_same_checksum(found):
    _, of_processes = found
    for case, one in of_processes[0][0]:
        in_boxes = {same for _, lies_in_boxes, same in one["states"] if lies_in_boxes}
        others = {same for _, lies_in_boxes, same in one["states"] if not lies_in_boxes}
        assert in_boxes == (set() if "pipeline" in case[1] else {False}), case
        assert others <= {True}, case


def test_deltas_are_hardly_larger_than_one_processs(found):
    """What they have more are the entries of the boxes in the files' headers."""
    _, of_processes = found
    for case, one in of_processes[0][0]:
        pairs = [
            sizes
            for sizes, chains in zip(one["sizes"], one["kinds"], strict=True)
            if 0 not in chains
        ]
        boxes = len({name for name, _, _ in one["states"]}) * len(of_processes)
        assert max(of_parts - of_whole for of_parts, of_whole in pairs) < 250 * boxes, case


def test_all_copies_together_are_one_model(found):
    """Each process keeps what it gives, once, and never more than its part."""
    _, of_processes = found
    for number, (case, first) in enumerate(of_processes[0][0]):
        of_others = [cases[number][1] for cases, _ in of_processes[1:]]
        for one in of_others:
            assert one["kept"] <= one["own"], case
        together = sum(one["kept"] for one in of_others)
        assert first["whole"] - first["own"] <= together < first["whole"], case


def test_no_process_makes_a_copy_of_the_model(found):
    _, of_processes = found
    first = of_processes[0][1]
    assert first["chain"] == 1
    assert first["delta"] < first["whole"] / 10
    for _, memory in of_processes:
        assert memory["whole"] > 10 * memory["layer"]
        assert memory["peak"] < first["delta"] + memory["layer"]


def test_a_damaged_link_is_refused(found):
    """In its file, and in the memory of who follows, in a tensor that lies in boxes."""
    folder, of_processes = found
    latest = of_processes[0][0][0][1]["latest"]
    versions = WeightsFolder(folder / "0" / "in")
    link = runs.manifest(versions, latest.version).chain[-1].version
    (file,) = versions.path(link).glob("*.safetensors")
    content = file.read_bytes()
    try:
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(EngineError, match="is not what was written"):
            WeightsFolder(versions.folder).read(latest.version, sha256=latest.sha256)
    finally:
        file.write_bytes(content)

    follower = WeightsFolder(versions.folder, full_every=runs.FULL_EVERY)
    follower.read(link)
    name = next(iter(runs.manifest(versions, latest.version).grids))
    runs.bits(follower._held.tensors[name])[-1, -1] ^= 1
    with pytest.raises(EngineError, match=rf"does not give the weights .*\(1 tensors.*{name}"):
        follower.read(latest.version, sha256=latest.sha256)

    assert follower.read(latest.version, sha256=latest.sha256)


@pytest.mark.parametrize("found", ["2 processes"], indirect=True)
def test_a_process_that_dies_leaves_the_version_before(found):
    folder, _ = found
    assert torch.load(folder / "died.pt")["said"]
    versions = WeightsFolder(folder / "dies")
    assert versions.versions() == [1]
    assert versions.latest() == 1
    assert versions.read(1)
