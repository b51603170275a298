"""Image files that tests send, and hostile ones."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int = 8, height: int = 6, colour: tuple[int, int, int] = (250, 10, 20)) -> Any:
    """A Pillow image in one colour."""
    return Image.fromarray(np.full((height, width, 3), colour, np.uint8))


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    """The image's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64_of(data)}"


def huge_png() -> bytes:
    """A PNG of 40,000 x 40,000 pixels by its header."""

    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"")), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def rotated_jpeg() -> bytes:
    """A JPEG that EXIF turns by a quarter."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return file_of(picture(), "JPEG", exif=exif)


def animation() -> bytes:
    frames = [picture(colour=(shade, 0, 0)) for shade in (0, 100, 200)]
    return file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
