"""What engines serve is what the trainer has, to the last bit, through any history of versions."""

from __future__ import annotations

import asyncio
import shutil

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.errors import EngineError
from agentevo.inference.weights import weight_versions
from agentevo.inference.weights import weights_folder as weights
from agentevo.inference.weights.publication import Publication
from agentevo.inference.weights.weight_delta import apply_change, checksum, find_change, pack_change
from agentevo.inference.weights.weight_versions import VersionManifest
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.runtime import files
from examples import examples


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same(found, model):
    own = dict(model.named_parameters())
    assert found.keys() == own.keys()
    return all(torch.equal(bits(found[name]), bits(own[name].data)) for name in own)


def nudge(model, generator, share):
    """Flips a bit of about `share` of all elements, NaN and infinity among what may come of it."""
    for parameter in model.parameters():
        hit = torch.rand(parameter.shape, generator=generator) < share
        bit = 1 << int(torch.randint(0, 15, (), generator=generator))
        flat = bits(parameter.data)
        flat[hit] ^= bit


def made(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(300, 70), torch.nn.Linear(70, 3)).bfloat16()


def manifest(folder, version):
    return msgspec.json.decode(
        (folder.path(version) / "manifest.json").read_bytes(), type=VersionManifest
    )


@settings(max_examples=examples(30), deadline=None)
@given(
    num=st.integers(1, 300_000),
    places=st.lists(st.floats(0, 1, exclude_max=True), max_size=20),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_a_packed_change_gives_the_new_bits(num, places, dtype):
    """However far apart the elements are."""
    old = torch.zeros(num, dtype=dtype)
    new = old.clone()
    for place in places:
        new[int(place * num)] = -0.0 if place < 0.5 else float("nan")

    gaps, values = pack_change(find_change(old, new), new)
    found = apply_change(old, gaps, values)
    assert torch.equal(bits(found), bits(new)) and checksum(found) == checksum(new)
    assert torch.equal(bits(apply_change(found, gaps, values)), bits(new)), "twice is as once"
    assert not bits(old).any(), "the base stays"


KINDS = (
    "step",
    "step",
    "step",
    "jump",
    "read",
    "read-late",
    "restart",
    "back",
    "tear",
    "lose",
    "swap",
)
ACTIONS = st.lists(
    st.sampled_from(KINDS),
    min_size=5,
    max_size=40,
)


@pytest.fixture(scope="module")
def no_sync():
    """The disk's own pace is not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (files, weights):
            patch.setattr(module, "sync_to_disk", lambda path: None)
        yield


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(actions=ACTIONS, seed=st.integers(0, 2**31))
def test_any_history_serves_the_trainers_bits_or_nothing(actions, seed, tmp_path_factory, no_sync):
    """Readers that follow, that are late or new; a trainer that comes back, also at a checkpoint;
    files that are torn, lost, exchanged. After the trainer has looked once more, everybody can read
    the newest version."""
    root = tmp_path_factory.mktemp("history")
    generator = torch.Generator().manual_seed(seed)
    model = made()
    version = 0
    saved = (0, {})
    written = {}
    notes = []

    def writer():
        return Publication(WeightsFolder(root, full_every=5), model, keep=2, note=notes.append)

    def remember():
        latest = WeightsFolder(root).latest_version()
        if latest is not None and latest not in written:
            written[latest] = {n: p.detach().clone() for n, p in model.named_parameters()}

    def read(source):
        try:
            latest = source.latest_version()
            found = None if latest is None else source.read(latest.version, sha256=latest.sha256)
        except EngineError:
            return
        if found is not None:
            assert all(torch.equal(bits(found[n]), bits(t)) for n, t in written[latest].items())

    trainer = writer()
    follower = WeightsFolder(root, full_every=5)
    late = WeightsFolder(root)
    asyncio.run(trainer.begin(0))
    remember()

    for action in actions:
        if action in ("step", "jump"):
            nudge(model, generator, 0.002 if action == "step" else 0.9)
            version += 1
            asyncio.run(trainer.publish(version))
            remember()
            saved = (version, model.state_dict()) if version % 3 == 0 else saved
        elif action == "read":
            read(follower)
        elif action == "read-late":
            read(late)
        elif action == "restart":
            trainer = writer()
            asyncio.run(trainer.begin(version))
            remember()
        elif action == "back":
            version = saved[0]
            trainer = writer()
            asyncio.run(trainer.begin(version))
            remember()
        else:
            spoil(root, action, generator)

    asyncio.run(trainer.look_after())
    remember()

    trainer_saw = WeightsFolder(root).latest_version()
    for source in (follower, late, WeightsFolder(root, full_every=5)):
        found = source.read(trainer_saw.version, sha256=trainer_saw.sha256)
        assert all(torch.equal(bits(found[n]), bits(t)) for n, t in written[trainer_saw].items())

    shutil.rmtree(root)


def spoil(root, action, generator):
    found = sorted(root.glob("version-*/*"))
    if not found:
        return

    one = found[int(torch.randint(0, len(found), (), generator=generator))]
    if action == "tear":
        one.write_bytes(one.read_bytes()[:-7])
    elif action == "lose":
        shutil.rmtree(found[0].parent)
    elif action == "swap":
        one.write_bytes(found[-1].read_bytes())


@pytest.fixture
def published(tmp_path):
    """(folder, model) after a full version 1 and deltas 2 to 4."""
    folder = WeightsFolder(tmp_path / "weights", full_every=8)
    model = made()
    generator = torch.Generator().manual_seed(1)
    for version in (1, 2, 3, 4):
        nudge(model, generator, 0.002)
        folder.write(version, model, keep=2)
    return folder, model


def test_a_delta_is_small_and_keeps_what_it_builds_on(published):
    folder, model = published
    assert folder.versions() == [1, 2, 3, 4], "keep=2, and versions 3 and 4 build on 1 and 2"
    full = manifest(folder, 1)
    last = manifest(folder, 4)
    assert [link.version for link in last.chain] == [1, 2, 3] and not full.chain
    assert last.bytes < full.bytes / 10
    assert same(WeightsFolder(folder.folder).read(4), model)


def test_who_follows_reads_only_what_changed(published, monkeypatch):
    folder, model = published
    reader = WeightsFolder(folder.folder, full_every=8)
    reader.read(3)
    asked = []
    real = WeightsFolder._get
    monkeypatch.setattr(
        WeightsFolder, "_get", lambda self, v, f: asked.append((v, f)) or real(self, v, f)
    )

    assert same(reader.read(4), model)
    assert sorted(asked) == [(4, "delta.safetensors"), (4, "manifest.json")]


def test_full_versions_come_in_between(tmp_path):
    folder = WeightsFolder(tmp_path, full_every=3)
    model = made()
    generator = torch.Generator().manual_seed(1)
    kinds = []
    for version in range(7):
        nudge(model, generator, 0.002)
        folder.write(version, model, keep=1)
        kinds.append(len(manifest(folder, version).chain))

    assert kinds == [0, 1, 2, 0, 1, 2, 0]
    assert folder.versions() == [6]


def test_where_a_delta_does_not_pay_the_full_version_says_so(tmp_path):
    notes = []
    model = made()
    folder = WeightsFolder(tmp_path, full_every=8)
    made_by = Publication(folder, model, keep=2, note=notes.append)
    for version in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.neg_()
        asyncio.run(made_by.publish(version))

    assert not manifest(folder, 2).chain and same(folder.read(2), model)
    assert len(notes) == 1 and "(bfloat16) is no smaller than all of them" in notes[0]


def test_many_small_deltas_are_together_smaller_than_the_full_version(tmp_path):
    folder = WeightsFolder(tmp_path, full_every=1000)
    model = made()
    generator = torch.Generator().manual_seed(1)
    chains = []
    for version in range(12):
        nudge(model, generator, 0.2)
        folder.write(version, model, keep=1)
        chains.append(len(manifest(folder, version).chain))

    assert 0 < max(chains) <= 3 and chains.count(0) >= 3
    assert not folder.advice


@pytest.mark.parametrize("part", ["delta.safetensors", "manifest.json"])
def test_a_delta_between_that_is_torn_is_refused_and_mended(part, published):
    folder, model = published
    notes = []
    writer = Publication(folder, model, keep=2, note=notes.append)
    asyncio.run(writer.publish(4))
    file = folder.path(2) / part
    file.write_bytes(file.read_bytes()[:-1] + b"?")

    with pytest.raises(EngineError, match="is not what was written"):
        WeightsFolder(folder.folder).read(4)

    asyncio.run(writer.look_after())
    assert len(notes) == 1 and "version 4 was damaged" in notes[0]
    assert not manifest(folder, 4).chain and same(WeightsFolder(folder.folder).read(4), model)


def test_a_wrong_base_is_refused_whoever_holds_it(published):
    """A reader whose copy isn't what it should be finds out, and reads everything again then."""
    folder, model = published
    reader = WeightsFolder(folder.folder, full_every=8)
    reader.read(3)
    bits(reader._held.tensors["1.weight"])[0, 0] ^= 1
    with pytest.raises(
        EngineError, match=r"does not give the weights .*1 tensors differ, 1\.weight"
    ):
        reader.read(4)

    assert same(reader.read(4), model)


def test_two_writers_never_give_a_mixture(published, tmp_path):
    """The second one overwrites versions that the first one's deltas build on."""
    folder, _ = published
    wanted = folder.latest_version()

    other = made(5)
    second = WeightsFolder(folder.folder, full_every=8)
    for version in (2, 3):
        nudge(other, torch.Generator().manual_seed(9), 0.002)
        second.write(version, other, keep=9)

    with pytest.raises(EngineError, match="not what was written"):
        WeightsFolder(folder.folder).read(wanted.version, sha256=wanted.sha256)

    latest = folder.latest_version()
    assert same(WeightsFolder(folder.folder).read(latest.version, sha256=latest.sha256), other)


@pytest.mark.parametrize(
    ("gaps", "values", "problem"),
    [
        (torch.tensor([9], dtype=torch.uint8), torch.zeros(1, dtype=torch.bfloat16), "element 9"),
        (torch.tensor([1], dtype=torch.int64), torch.zeros(1, dtype=torch.bfloat16), "int64"),
        (torch.tensor([1], dtype=torch.uint8), torch.zeros(1), "float32"),
        (torch.tensor([1], dtype=torch.uint8), torch.zeros(2, dtype=torch.bfloat16), "shape"),
    ],
)
def test_what_can_not_be_of_a_tensor_is_refused(gaps, values, problem):
    with pytest.raises(EngineError, match=problem):
        apply_change(torch.zeros(3, 3, dtype=torch.bfloat16), gaps, values)


def test_large_versions_lie_in_several_files(published, tmp_path, monkeypatch):
    _, model = published
    monkeypatch.setattr(weight_versions, "PART_BYTES", 500)
    folder = WeightsFolder(tmp_path / "parts")
    folder.write(7, model, keep=1)
    files = sorted(path.name for path in folder.path(7).glob("*.safetensors"))
    assert files == [f"weights-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert same(folder.read(7), model)

    (folder.path(7) / files[1]).unlink()
    with pytest.raises(EngineError, match="is gone"):
        folder.read(7)
