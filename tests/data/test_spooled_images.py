"""Images in a temporary file: a mapping like any other, without their bytes in memory."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pictures import file_of, picture

from agentevo.data.message_images import ImageCollector
from agentevo.data.spooled_images import SpooledImages
from agentevo.errors import ConfigError, ImageError
from agentevo.types.images import image_file

IMAGES = [image_file(file_of(picture(colour=(n, 0, 0))), "image/png") for n in range(20)]


def test_images_are_read_back_by_any_thread() -> None:
    spooled = SpooledImages()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda image: spooled.__setitem__(image.part.sha256, image), IMAGES))
        assert list(pool.map(lambda image: spooled[image.part.sha256], IMAGES)) == IMAGES

    assert set(spooled) == {image.part.sha256 for image in IMAGES} and len(spooled) == 20
    del spooled[IMAGES[0].part.sha256]
    assert IMAGES[0].part.sha256 not in spooled and spooled.get("none") is None


def test_a_collector_keeps_each_image_once() -> None:
    images = ImageCollector(files=SpooledImages())
    for image in [*IMAGES, *IMAGES]:
        images.read(image.data, "x")

    total = sum(len(image.data) for image in IMAGES)
    assert repr(images.files) == f"<SpooledImages, 20 images, {total:,} bytes>"


def test_a_disk_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spooled = SpooledImages()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"No such file or directory.*set TMPDIR"):
        spooled["a"] = IMAGES[0]
    assert not spooled

    monkeypatch.undo()
    spooled["a"] = IMAGES[0]
    assert spooled._file is not None
    spooled._file.truncate(1)
    with pytest.raises(ImageError, match="can't be read from its temporary file"):
        spooled["a"]
