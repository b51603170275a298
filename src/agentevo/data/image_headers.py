"""The format and the size of an image, from the first bytes of its file. Nothing is decoded, so a
file that would unpack to gigabytes is refused for the price of its header.

Sources: the specifications of PNG (11.2.2), JPEG (ITU T.81, B.1), GIF89a (18), WebP (RFC 9649) and
BMP (BITMAPFILEHEADER).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from struct import error as StructError
from struct import unpack_from
from typing import NamedTuple

_OTHERS: tuple[tuple[bytes, str], ...] = (
    (rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*(<!DOCTYPE svg|<svg)", "SVG"),
    (rb"II\*\0|MM\0\*", "TIFF"),
    (rb"....ftyp(avif|avis)", "AVIF"),
    (rb"....ftyp(heic|heix|mif1|msf1)", "HEIC"),
    (rb"%PDF", "PDF"),
    (rb"\0\0\x01\0", "ICO"),
    (rb"\x1f\x8b", "gzip"),
    (rb"PK\x03\x04", "ZIP"),
    (rb"....ftyp|\x1aE\xdf\xa3", "a film"),
    (rb"(?i:\s*(<!doctype html|<html))", "HTML"),
    (rb"version https://git-lfs", "a pointer of Git LFS"),
)
"""The beginnings of files that are often given in place of an image, and their names."""
_NOT_STUFFED = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""A marker within the data of a JPEG's scan."""
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""The markers of a JPEG's frame, which has its size."""
_MISPLACED = frozenset({0x00, 0xD8, *range(0x02, 0xC0)})
"""Markers that no segment of a JPEG has."""
MAX_PARTS = 65_536
"""The most segments of a JPEG and chunks of a PNG. The decoder takes microseconds for each, also
for an empty one, and a file of 15 MiB can have millions."""
MAX_SCANS = 256
"""The most scans of a JPEG, which usually has one, or ten if it is progressive. A scan of a few
bytes can go over all of the pixels."""


class ImageHeader(NamedTuple):
    """What an image's file says of itself. The decoder may find something else."""

    media_type: str
    width: int
    height: int


class ImageHeaderError(Exception):
    """The bytes are no image of a known format. The message says what they are."""


def read_header(data: bytes) -> ImageHeader:
    """Raises ImageHeaderError for other content, and for a header that is cut off."""
    for magic, media_type, read_size in _FORMATS:
        if re.match(magic, data, re.DOTALL):
            try:
                width, height = read_size(data)
            except (StructError, IndexError) as error:
                raise ImageHeaderError(f"it is a {media_type} whose header is cut off") from error
            return ImageHeader(media_type, width, height)

    name = next((n for magic, n in _OTHERS if re.match(magic, data[:4096], re.DOTALL)), None)
    if not data:
        raise ImageHeaderError("it is empty")
    raise ImageHeaderError(
        f"it begins with {data[:8]!r}, which no image has" if name is None else f"it is {name}"
    )


def _png(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise ImageHeaderError("it is a PNG without a header")

    place = 8
    for _ in range(MAX_PARTS):
        if place + 8 > len(data) or data[place + 4 : place + 8] == b"IEND":
            break
        place += 12 + unpack_from(">I", data, place)[0]
    else:
        raise ImageHeaderError(f"it is a PNG of more than {MAX_PARTS:,} chunks")
    return unpack_from(">II", data, 16)


def _gif(data: bytes) -> tuple[int, int]:
    return unpack_from("<HH", data, 6)


def _bmp(data: bytes) -> tuple[int, int]:
    if unpack_from("<I", data, 14)[0] == 12:
        return unpack_from("<HH", data, 18)
    width, height = unpack_from("<ii", data, 18)
    return width, abs(height)  # a negative height: the rows are from the top down


def _webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        unpack_from("30x", data)
    elif kind == b"VP8L":
        (bits,) = unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in unpack_from("<HH", data, 26))
    else:
        raise ImageHeaderError(f"it is a WebP that begins with a chunk {kind!r}")
    return width, height


def _jpeg(data: bytes) -> tuple[int, int]:
    """Walks over all segments, so that a file that is cut off, or whose data is overwritten by
    something with markers, is refused. libjpeg itself fills what is missing with grey."""
    size: tuple[int, int] | None = None
    place = 2
    num_parts = num_scans = 0
    while True:
        num_parts += 1
        if num_parts > MAX_PARTS or num_scans > MAX_SCANS:
            raise ImageHeaderError(
                f"it is a JPEG of more than {MAX_PARTS:,} segments or {MAX_SCANS} scans"
            )
        if place >= len(data):
            raise ImageHeaderError("it is a JPEG that is cut off: it has no end marker")
        if data[place] != 0xFF:
            raise ImageHeaderError(f"it is a JPEG whose segments break off at byte {place}")

        marker = data[place + 1] if place + 1 < len(data) else 0xD8
        if marker == 0xFF:  # a fill byte
            place += 1
            continue

        if marker == 0xD9:
            break
        if marker in _MISPLACED:
            raise ImageHeaderError(f"it is a JPEG with a broken marker at byte {place}")
        if marker in _FRAMES and size is None:
            height, width = unpack_from(">HH", data, place + 5)
            size = width, height

        place += 2
        if not (marker == 0x01 or 0xD0 <= marker <= 0xD7):
            place += unpack_from(">H", data, place)[0]
        if marker == 0xDA:
            num_scans += 1
            next_marker = _NOT_STUFFED.search(data, place)
            place = len(data) if next_marker is None else next_marker.start()

    if size is None:
        raise ImageHeaderError("it is a JPEG without a frame")
    return size


_FORMATS: tuple[tuple[bytes, str, Callable[[bytes], tuple[int, int]]], ...] = (
    (rb"\x89PNG\r\n\x1a\n", "image/png", _png),
    (rb"\xff\xd8\xff", "image/jpeg", _jpeg),
    (rb"RIFF....WEBP", "image/webp", _webp),
    (rb"GIF8[79]a", "image/gif", _gif),
    (rb"BM", "image/bmp", _bmp),
)
