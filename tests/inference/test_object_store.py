"""Weights through an object store: whole, or refused, whatever the store does."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from functools import partial

import pytest
import torch

from agentevo.config import build_config
from agentevo.errors import ConfigError, EngineError
from agentevo.inference.weights import objects
from agentevo.inference.weights.object_store import ObjectStoreWeights
from agentevo.inference.weights.publication import Publication
from agentevo.inference.weights.transports import check_transport, remote_source


def made(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(300, 70), torch.nn.Linear(70, 3)).bfloat16()


def step(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::97] += 1


def same(found, model):
    own = dict(model.named_parameters())
    return found.keys() == own.keys() and all(torch.equal(found[name], own[name]) for name in own)


class Rooms:
    """Writers and readers of one store at `url`."""

    def __init__(self, url, folder):
        self.url = url
        self.folder = folder

    def writer(self, run="run", **given):
        given = {"full_every": 8} | given
        return ObjectStoreWeights(self.url, id_file=self.folder / run / "writer", **given)

    def reader(self, **given):
        return ObjectStoreWeights(self.url, **{"full_every": 8} | given)


@pytest.fixture
def rooms(tmp_path):
    return Rooms(f"file://{tmp_path}/bucket", tmp_path)


class Flaky:
    """A file system of which every so-many-th call of one kind goes wrong."""

    def __init__(self, files, fault):
        self._files = files
        self._fault = fault
        self._kind, self._every = FAULTS[fault]
        self._count = 0
        self._lock = threading.Lock()
        self.protocol = files.protocol
        self.broken = 0

    def __getattr__(self, name):
        real = getattr(self._files, name)
        return (
            real
            if name != self._kind
            else lambda *args, **given: self._call(partial(real, **given), *args)
        )

    def _call(self, real, *args):
        with self._lock:
            self._count += 1
            goes_wrong = self._count % self._every == 0
            self.broken += goes_wrong

        if not goes_wrong:
            return real(*args)
        if self._fault == "torn upload":
            return real(args[0], args[1][: len(args[1]) // 2])
        if self._fault == "half a download":
            return real(*args)[:-9]
        if self._fault == "no answer":
            return time.sleep(1.5)
        if self._fault == "late list":
            return []

        raise {
            "lost upload": ConnectionResetError("gone"),
            "forbidden": PermissionError(13, "Forbidden"),
            "an error of its own": RuntimeError("a client's"),
        }[self._fault]


FAULTS = {
    "torn upload": ("pipe_file", 4),
    "lost upload": ("pipe_file", 5),
    "half a download": ("cat_file", 7),
    "no answer": ("info", 41),
    "late list": ("ls", 2),
    "forbidden": ("info", 31),
    "an error of its own": ("cat_file", 11),
}


@pytest.mark.slow
def test_versions_come_back_to_the_bit_and_old_ones_go(rooms, tmp_path):
    writer = rooms.writer()
    reader = rooms.reader()
    model = made()
    assert reader.latest_version() is None

    for version in range(1, 6):
        step(model)
        writer.write(version, model, keep=1)
        latest = reader.latest_version()
        assert same(reader.read(version, sha256=latest.sha256), model)

    assert same(rooms.reader(full_every=1).read(5), model), "one that is late"
    assert writer.versions() == [1, 2, 3, 4, 5], "version 5 builds on the others"

    writer.write(6, model, keep=1, in_full=True)
    assert writer.versions() == [6]

    names = {path.name for path in (tmp_path / "bucket").iterdir()}
    assert names == {"latest.json", "writer.json", "version-000006"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails_now_and_then_serves_the_bits_or_nothing(fault, rooms):
    notes = []
    model = made()
    call_s = 0.5 if fault == "no answer" else 300
    writer = rooms.writer(call_s=call_s)
    reader = rooms.reader(call_s=call_s)
    stores = [one.objects for one in (writer, reader)]
    broken = [Flaky(store.files, fault) for store in stores]
    for one, flaky in zip(stores, broken, strict=True):
        one.files = flaky

    trainer = Publication(writer, model, keep=2, note=notes.append)
    served = 0
    for version in range(1, 8):
        step(model)
        asyncio.run(trainer.publish(version))
        for _ in range(4):
            asyncio.run(trainer.look_after())
            try:
                latest = reader.latest_version()
                if latest is not None and latest.version == version:
                    assert same(reader.read(version, sha256=latest.sha256), model)
                    served += 1
            except EngineError:
                continue

    assert served, notes
    assert sum(one.broken for one in broken), "the fault was met"


def test_a_version_that_was_deleted_is_uploaded_again(rooms, tmp_path):
    notes = []
    model = made()
    trainer = Publication(rooms.writer(), model, keep=2, note=notes.append)
    asyncio.run(trainer.publish(1))
    step(model)
    asyncio.run(trainer.publish(2))
    asyncio.run(trainer.look_after())
    shutil.rmtree(tmp_path / "bucket" / "version-000001")

    with pytest.raises(EngineError, match="version-000001 is gone"):
        rooms.reader().read(2)

    trainer._verified_at = 0.0
    asyncio.run(trainer.look_after())
    assert len(notes) == 1 and "version 2 was damaged after it was published" in notes[0]
    assert same(rooms.reader().read(2), model)


def test_another_runs_place_is_refused(rooms, tmp_path):
    """Its engines would be given this one's weights."""
    first = rooms.writer()
    model = made()
    first.write(1, model, keep=2)

    with pytest.raises(EngineError, match="has the weights of another run: use another"):
        rooms.writer("other").write(1, made(3), keep=2)

    rooms.writer().write(2, model, keep=2)  # this run's trainer, restarted
    (tmp_path / "bucket" / "writer.json").write_text("somebody")
    with pytest.raises(EngineError, match="another run"):
        first.write(3, model, keep=2)

    assert rooms.reader().latest() == 2


def test_an_engine_asks_at_most_every_second(rooms, monkeypatch):
    writer = rooms.writer()
    reader = rooms.reader(poll_interval_s=60)
    writer.write(1, made(), keep=2)
    assert reader.latest_version().version == 1

    writer.write(2, made(), keep=2)
    assert reader.latest_version().version == 1
    monkeypatch.setattr(reader, "_poll_interval_s", 0)
    assert reader.latest_version().version == 2


def test_calls_that_hang_are_left_alone_and_counted(rooms, monkeypatch):
    reader = rooms.reader(call_s=0.05)
    release = threading.Event()
    monkeypatch.setattr(objects, "MAX_HANGING_CALLS", 2)
    monkeypatch.setattr(reader.objects.files, "info", lambda path: release.wait(300))

    try:
        for problem in ("no answer within 0 s", "no answer within 0 s", "2 calls hang"):
            with pytest.raises(EngineError, match=problem):
                reader.latest_version()
    finally:
        release.set()


def test_a_file_name_that_leads_elsewhere_is_refused(rooms, tmp_path):
    rooms.writer().write(1, made(), keep=1)
    file = tmp_path / "bucket" / "version-000001" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["parts"][0]["file"] = "../../secret"
    file.write_text(json.dumps(manifest))
    with pytest.raises(EngineError, match=r"a file '\.\./\.\./secret'"):
        rooms.reader().read(1)


BAD = {
    "bucket": "is not a URL",
    "s3://key:secret@bucket/x": "password",
    "s3://bucket/x?key=1": "password",
    "s3://bucket/x?part=1": "has a password or options",
}


@pytest.mark.parametrize("url", BAD)
def test_an_address_with_a_password_is_refused_before_anything_is_made(url):
    with pytest.raises(ConfigError, match=BAD[url]):
        build_config({"environment": {"type": "coins"}, "rollout": {"weights": {"url": url}}})


def config(**rollout):
    return build_config({"environment": {"type": "coins"}, "rollout": {"samplers": 1} | rollout})


def test_the_recipe_chooses_the_store(tmp_path):
    url = f"file://{tmp_path}/bucket"
    assert isinstance(remote_source(config(weights={"url": url})), ObjectStoreWeights)
    with pytest.raises(ConfigError, match="fsspec knows no 'nowhere'"):
        check_transport(config(weights={"url": "nowhere://x"}), is_separate=True)
    with pytest.raises(ConfigError, match=r"needs an address: set rollout.weights.url"):
        check_transport(config(transport="object_store"), is_separate=True)
    with pytest.raises(ConfigError, match=r"only with rollout.transport=object_store, not folder"):
        config(transport="folder", weights={"url": url})
    with pytest.raises(ConfigError, match="in float32 every weight changes"):
        config(weights={"delta": True})


@pytest.mark.slow
def test_a_real_s3_server(tmp_path, monkeypatch):
    """Over HTTP, with keys from the environment that are in nothing that is written."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")

        rooms = Rooms("s3://weights/run", tmp_path)
        notes = []
        model = made()
        writer = rooms.writer()
        reader = rooms.reader()
        trainer = Publication(writer, model, keep=2, note=notes.append)
        asyncio.run(trainer.publish(0))
        assert len(notes) == 1 and "version 0 could not be written" in notes[0], "no bucket yet"

        writer.objects.files.mkdir("weights")
        for version in range(4):
            step(model)
            asyncio.run(trainer.publish(version))
            asyncio.run(trainer.look_after())
            latest = reader.latest_version()
            assert same(reader.read(version, sha256=latest.sha256), model)

        assert same(rooms.reader().read(3), model)
        for path in writer.objects.files.find("weights"):
            content = writer.objects.files.cat_file(path)
            assert b"the-key" not in content and b"the-secret" not in content

        writer.objects.files.rm("weights/run/version-000000", recursive=True)
        trainer._verified_at = 0.0
        asyncio.run(trainer.look_after())
        assert same(rooms.reader().read(3), model) and len(notes) == 2
    finally:
        server.stop()
