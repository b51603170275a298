"""Reads image files that come from outside: tasks, environments, tools, clients.

The content decides the format, never a name. An image is refused before its pixels are decoded if
its file or its size is over a limit, so a small file can't fill the memory.
"""

from __future__ import annotations

import hashlib
from io import BytesIO
from typing import TYPE_CHECKING

from agentevo.errors import BadRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES = 20 << 20
MAX_PIXELS = 50_000_000
"""A screenshot of an 8K display has 33 million pixels."""


def digest_of(data: bytes) -> str:
    """The SHA-256 of an image file, by which messages and turns name it (ImagePart)."""
    return hashlib.sha256(data).hexdigest()


def read_image(data: bytes, *, max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS) -> Image:
    """Decodes an image file to RGB, turned as its EXIF orientation says. An alpha channel is
    dropped, as in transformers' image processors. Raises BadRequestError for a file that is too
    large, animated, damaged, or of another format than FORMATS."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(data) > max_bytes:
        raise BadRequestError(
            f"an image file has {len(data):,} bytes, and at most {max_bytes:,} are allowed: "
            "compress it or make it smaller"
        )

    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > max_pixels:
            raise BadRequestError(
                f"an image has {width} x {height} pixels, and at most {max_pixels:,} are allowed: "
                "make it smaller"
            )

        frames = getattr(image, "n_frames", 1)
        if frames > 1:
            raise BadRequestError(
                f"an image is animated ({frames} frames of {image.format}): send each frame that "
                "matters as an image"
            )

        return ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError as error:
        raise BadRequestError(f"an image has too many pixels ({error}): make it smaller") from error
    except UnidentifiedImageError as error:
        raise BadRequestError(
            f"a file of {len(data):,} bytes is no image of the formats {', '.join(FORMATS)}: "
            "convert it to PNG"
        ) from error
    except BadRequestError:
        raise
    except Exception as error:  # Pillow's decoders raise many kinds for damaged files
        raise BadRequestError(
            f"an image file is damaged ({type(error).__name__}: {error}): save it again"
        ) from error
