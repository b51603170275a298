"""Image files that come from outside."""

from __future__ import annotations

import struct
import zlib

import pytest
from PIL import Image
from tiny_vision import image_file, png

from agentevo.errors import BadRequestError
from agentevo.models.vision.image_files import read_image


def huge_png(width: int, height: int) -> bytes:
    """A PNG that names a size and has no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def test_files_become_rgb() -> None:
    grey = Image.new("L", (3, 2), 9)

    assert read_image(image_file(grey)).getpixel((0, 0)) == (9, 9, 9)
    assert read_image(image_file(Image.new("CMYK", (3, 2)), "JPEG")).mode == "RGB"
    assert read_image(image_file(Image.new("RGBA", (3, 2), (1, 2, 3, 0)))).getpixel((0, 0)) == (
        1,
        2,
        3,
    )


def test_exif_turns_an_image() -> None:
    image = Image.new("RGB", (4, 2))
    exif = image.getexif()
    exif[0x0112] = 6

    assert read_image(image_file(image, "JPEG", exif=exif)).size == (2, 4)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "no image of the formats"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image of the formats"),
        (png(40, 40)[:200], "damaged"),
        (huge_png(8_000, 8_000), "8000 x 8000 pixels"),
        (huge_png(40_000, 40_000), "too many pixels"),
        (bytes(30 << 20), "31,457,280 bytes"),
    ],
)
def test_a_bad_file_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(BadRequestError, match=problem):
        read_image(data)


def test_an_animated_image_is_refused() -> None:
    frames = [Image.new("RGB", (2, 2), color) for color in ("red", "blue")]
    data = image_file(frames[0], "GIF", save_all=True, append_images=frames[1:])

    with pytest.raises(BadRequestError, match="2 frames of GIF"):
        read_image(data)
