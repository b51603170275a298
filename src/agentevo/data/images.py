"""Reads images from whatever has them, and decodes them.

    bytes                                                 a file's content
    "data:image/png;base64,..."                           a data URL
    Path, or a text where paths are allowed               a file
    {"bytes": ..., "path": ...}                           a column of Hugging Face datasets
    {"type": "image_url", "image_url": {"url": ...}}      OpenAI's chat
    {"type": "input_image", "image_url": ...}             OpenAI's Responses
    {"type": "image", "source": {"type": "base64", ...}}  Anthropic
    {"type": "image", "data": ..., "mimeType": ...}       MCP
    {"type": "image", "image" | "url" | "path" | "base64": ...}   transformers' chat templates
    PIL.Image.Image, numpy array [H, W, 3] of uint8       pixels, which become a PNG
    ImageFile                                             an image that was read before

Invariants. The format is that of the content, whatever a name or a media type says. Bytes and
pixels are limited before anything is decoded. An image that is read has been decoded once, so
whoever needs its pixels later gets them. Nothing is ever fetched from the network, and a text is a
path only for a caller that gives a folder: a client can't read the files of a server.

What is not promised: bytes that were overwritten within a JPEG's compressed data often decode to
other pixels, and libjpeg does not say so. Nor does Pillow report a PNG that was made with a valid
stream of too few rows, whose other rows are black.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Container, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from agentevo.data.image_headers import ImageHeader, ImageHeaderError, read_header
from agentevo.errors import ConfigError, ImageError, shown
from agentevo.runtime.parsing import check_file
from agentevo.types.images import ImageFile, image_file

if TYPE_CHECKING:
    from PIL.Image import Image

PART_TYPES = ("image", "image_url", "input_image")
"""The types of a message's parts that are images."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_FORMATS_TEXT = "PNG, JPEG, WebP, GIF of one frame or BMP"
_DATA_URL = re.compile(r"data:(?P<type>[^,;]*)(?P<options>(;[^,;]*)*),", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_BLANK = re.compile(r"\s+")
_LONGEST_PATH = 1024
"""In characters. A longer text is base64 that lost its beginning."""


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest image that is accepted."""

    max_bytes: int = 15 * 2**20
    """Of its file. A document of MongoDB, which has at most 16 MB, holds it."""
    max_pixels: int = 2**25
    """Of its width times its height: a screen of 7,680 x 4,320 has fewer."""


LIMITS = ImageLimits()


def is_image_part(part: Any) -> bool:
    """Whether a part of a message is an image in one of the forms above."""
    return isinstance(part, Mapping) and part.get("type") in PART_TYPES


def read_image(
    source: Any,
    where: str,
    *,
    folder: Path | None = None,
    limits: ImageLimits = LIMITS,
    known: Container[str] = (),
) -> ImageFile:
    """The image in any form of the module's list. `where` names its place in messages. `folder`:
    allows texts that are paths, relative to it. `known`: digests of images that were read before,
    which are not decoded again. Raises ImageError."""
    while isinstance(source, Mapping):
        source = image_source(source, where)

    if isinstance(source, ImageFile):
        return source
    if isinstance(source, np.ndarray) or is_pillow(source):
        return _of_pixels(source, where, limits)

    data = _bytes_of(source, where, folder, limits)
    if known and sha256(data).hexdigest() in known:
        return image_file(data, _header(data, where).media_type)
    return _checked(data, where, limits)


def _bytes_of(source: Any, where: str, folder: Path | None, limits: ImageLimits) -> bytes:
    """The content of the image's file."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Path):
        return _read_file(source, where, limits)
    if isinstance(source, str):
        return _of_text(source, where, folder, limits)

    raise ImageError(
        f"{where} is a {type(source).__name__}, not an image: give bytes, a data URL or a path"
    )


def decode_image(image: ImageFile | bytes, where: str) -> np.ndarray:
    """The pixels as RGB [H, W, 3] of uint8, in the orientation that EXIF gives.

    Transparency is over white. 16 bits a channel become 8, also in the colour that a PNG calls
    transparent. Colour profiles are ignored, as in the image processors of transformers. Raises
    ImageError for bytes that differ from the image's digest, for those that no longer decode, and
    for more pixels than LIMITS allow: an image of a store may come from elsewhere.
    """
    if isinstance(image, ImageFile) and not image.is_intact:
        raise ImageError(
            f"{where}: the bytes are not those of the image {image.part.sha256}: restore them from "
            "a copy"
        )

    data = image.data if isinstance(image, ImageFile) else image
    checked_header(data, where)
    return _decode(data, where, LIMITS)


def image_size(image: ImageFile, where: str) -> tuple[int, int]:
    """The (width, height) that the file declares, before EXIF's rotation, without decoding it."""
    header = _header(image.data, where)
    return header.width, header.height


def checked_header(data: bytes, where: str, limits: ImageLimits = LIMITS) -> ImageHeader:
    """What an image's file says of itself, for a file within the limits. Nothing is decoded. Raises
    ImageError."""
    if len(data) > limits.max_bytes:
        raise _too_many_bytes(where, len(data), limits)

    header = _header(data, where)
    _check_pixels(header.width, header.height, where, limits)
    return header


def data_url(image: ImageFile, where: str) -> str:
    """The image as a data URL. Its type is that of its content, because an image of a store may
    name any other one. Raises ImageError for content that is no image."""
    content = base64.b64encode(image.data).decode()
    return f"data:{_header(image.data, where).media_type};base64,{content}"


def image_source(part: Mapping[Any, Any], where: str) -> Any:
    """What a mapping holds as its image: bytes, a text, pixels, or another mapping. Raises
    ImageError."""
    url = part.get("image_url")
    source = part.get("source")
    if isinstance(source, Mapping):
        if source.get("type") == "base64":
            return _of_base64(source.get("data"), where)
        if source.get("type") == "url":
            return source.get("url")
    elif url is not None:
        return url.get("url") if isinstance(url, Mapping) else url
    elif part.get("bytes") is not None:
        return part["bytes"]
    elif isinstance(part.get("data"), str):
        return _of_base64(part["data"], where)
    elif part.get("base64") is not None:
        return _of_base64(part["base64"], where)
    else:
        for key in ("image", "path", "url"):
            if part.get(key) is not None and not isinstance(part[key], Mapping):
                return part[key]
        if isinstance(part.get("image"), Mapping) and "type" in part:
            return {k: v for k, v in part["image"].items() if k not in ("type", "image")}

    keys = ", ".join(map(str, part))[:200] or "no key"
    raise ImageError(
        f"{where} has {keys}, and none of them is an image: give a data URL as image_url, or bytes"
    )


def _of_text(text: str, where: str, folder: Path | None, limits: ImageLimits) -> bytes:
    if text[:5].lower() == "data:":
        return _of_data_url(text, where, limits)

    if _SCHEME.match(text):
        raise ImageError(
            f"{where} is the URL {shown(text)}, and no image is fetched: give its bytes as a data "
            "URL (data:image/png;base64,...)"
        )

    if len(text) > _LONGEST_PATH:
        raise ImageError(
            f"{where} is the text {shown(text)}, which is too long for a path: give base64 as a "
            "data URL (data:image/png;base64,...)"
        )

    if folder is None:
        raise ImageError(
            f"{where} is the text {shown(text)}, and paths are not read here: give a data URL "
            "(data:image/png;base64,...)"
        )

    return _read_file(folder / text, where, limits)


def _of_data_url(url: str, where: str, limits: ImageLimits) -> bytes:
    head = _DATA_URL.match(url[:1000])
    if head is None or ";base64" not in head["options"].lower():
        raise ImageError(f"{where} is a data URL without base64: write data:image/png;base64,...")

    if (len(url) - head.end()) * 3 // 4 > limits.max_bytes + 2:
        raise _too_many_bytes(where, (len(url) - head.end()) * 3 // 4, limits)

    return _of_base64(url[head.end() :], where)


def _of_base64(text: Any, where: str) -> bytes:
    if not isinstance(text, str):
        raise ImageError(f"{where}: its data is a {type(text).__name__}: give a text in base64")

    try:
        return base64.b64decode(_BLANK.sub("", text), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{where} is not base64 ({error}): encode the file again") from error


def _read_file(path: Path, where: str, limits: ImageLimits) -> bytes:
    try:
        size = check_file(path)
        if size > limits.max_bytes:
            raise _too_many_bytes(f"{where}: {path}", size, limits)
        with path.open("rb") as file:
            return file.read(limits.max_bytes + 1)
    except ConfigError as error:
        raise ImageError(f"{where}: {error}") from error
    except OSError as error:
        raise ImageError(f"{where}: {path}: can't be read: {error.strerror or error}") from error


def _checked(data: bytes, where: str, limits: ImageLimits) -> ImageFile:
    """The image, after it was decoded once."""
    header = checked_header(data, where, limits)
    _decode(data, where, limits)
    return image_file(data, header.media_type)


def _header(data: bytes, where: str) -> ImageHeader:
    try:
        return read_header(data)
    except ImageHeaderError as error:
        raise ImageError(f"{where}: {error}: give a whole {_FORMATS_TEXT}") from error


def _check_pixels(width: int, height: int, where: str, limits: ImageLimits) -> None:
    if width < 1 or height < 1:
        raise ImageError(f"{where} has {width} x {height} pixels: give an image with pixels")
    if width * height > limits.max_pixels:
        raise ImageError(
            f"{where} has {width:,} x {height:,} pixels, and {limits.max_pixels:,} are the most: "
            "make it smaller"
        )


def _too_many_bytes(where: str, size: int, limits: ImageLimits) -> ImageError:
    return ImageError(
        f"{where} has {size:,} bytes, and {limits.max_bytes:,} are the most: make the image "
        "smaller, or save it as JPEG or WebP"
    )


def _decode(data: bytes, where: str, limits: ImageLimits) -> np.ndarray:
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_pixels(*image.size, where, limits)
            image.verify()  # the checksums of a PNG

        with PIL.Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_still(image, where)
            if image.format == "PNG":
                _scale_transparency(image, bits=data[24])
            return _rgb(image)
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # whatever a decoder raises at hostile bytes
        why = str(error) or type(error).__name__
        raise ImageError(
            f"{where} can't be decoded ({shown(why)}): save the image again"
        ) from error


def _scale_transparency(image: Image, bits: int) -> None:
    """Pillow scales the values of a PNG to 8 bits, and leaves its transparent colour as it is in
    the file, of so many bits a channel. Call it before the pixels are loaded."""
    colour = image.info.get("transparency")
    if image.mode in ("1", "L") and isinstance(colour, int):
        image.info["transparency"] = colour * 255 // (2**bits - 1)
    elif image.mode == "RGB" and bits == 16 and colour is not None:
        image.info["transparency"] = tuple(channel >> 8 for channel in colour)


def _check_still(image: Image, where: str) -> None:
    """A JPEG may have other pictures behind the first one, such as a map of depths."""
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise ImageError(f"{where} is animated: give one frame as a PNG")


def is_pillow(source: Any) -> bool:
    """Whether it is an image of Pillow, which need not be installed here."""
    return any(
        kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(source).__mro__
    )


def _of_pixels(source: Any, where: str, limits: ImageLimits) -> ImageFile:
    import PIL.Image

    if isinstance(source, np.ndarray):
        if source.ndim != 3 or source.shape[2] != 3 or source.dtype != np.uint8:
            raise ImageError(
                f"{where} is an array {list(source.shape)} of {source.dtype}: give [H, W, 3] of "
                "uint8"
            )
        height, width, _ = source.shape
        _check_pixels(width, height, where, limits)
        pixels = source
    else:
        width, height = source.size
        _check_pixels(width, height, where, limits)
        _check_still(source, where)
        if source.mode == "F":
            raise ImageError(f"{where} has pixels of floating point: give an image of mode RGB")
        try:
            pixels = _rgb(source)
        except (OSError, SyntaxError, ValueError) as error:
            raise ImageError(f"{where} can't be decoded ({error}): save it again") from error

    file = io.BytesIO()
    PIL.Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG")
    data = file.getvalue()
    if len(data) > limits.max_bytes:
        raise _too_many_bytes(where, len(data), limits)

    return image_file(data, "image/png")


def _rgb(image: Image) -> np.ndarray:
    """RGB [H, W, 3] of uint8."""
    import PIL.Image
    import PIL.ImageOps

    image = PIL.ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = _from_16_bits(image)

    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = PIL.Image.alpha_composite(white, image)

    return np.array(image.convert("RGB"))


def _from_16_bits(image: Image) -> Image:
    """A grey image of 16 bits as one of 8. Pillow itself would cut values off at 255."""
    import PIL.Image

    values = np.asarray(image).astype(np.uint32)
    grey = ((values * 255 + 32767) // 65535).astype(np.uint8)
    transparent = image.info.get("transparency")
    if transparent is None:
        return PIL.Image.fromarray(grey)

    alpha = np.where(values == transparent, 0, 255).astype(np.uint8)
    return PIL.Image.fromarray(np.stack([grey, alpha], axis=-1))  # grey and alpha
