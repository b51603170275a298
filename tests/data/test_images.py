"""Images from every form, and hostile ones: a clear error or the right pixels, never anything
else."""

import base64
import io
import os
import struct
import threading
import zlib
from hashlib import sha256

import msgspec
import numpy as np
import pytest
from pictures import huge_png
from PIL import Image, ImageCms

from agentevo.data.image_headers import read_header
from agentevo.data.images import (
    LIMITS,
    ImageLimits,
    data_url,
    decode_image,
    image_size,
    is_image_part,
    read_image,
)
from agentevo.errors import ImageError
from agentevo.types import ImagePart
from agentevo.types.images import image_file

RED = (250, 10, 20)
GREEN = (10, 200, 30)
BLUE = (20, 30, 240)


def quarters(width=8, height=6):
    """Four colours: red, green / blue, white, so that a rotation shows."""
    pixels = np.full((height, width, 3), 255, np.uint8)
    pixels[: height // 2, : width // 2] = RED
    pixels[: height // 2, width // 2 :] = GREEN
    pixels[height // 2 :, : width // 2] = BLUE
    return pixels


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, kind, **options)
    return file.getvalue()


def chunk(name, data):
    body = name + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def png(width, height, *chunks, depth=8, color=2):
    """A PNG of these chunks, whatever its header says."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *chunks, chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


PNG = encoded(quarters())
JPEG = encoded(quarters(64, 48), "JPEG", quality=95)
BASE64 = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{BASE64}"
FRAMES = [Image.new("RGB", (4, 4), color) for color in (RED, GREEN)]


def test_every_form_gives_the_same_image(tmp_path):
    path = tmp_path / "a.txt"  # the name does not matter
    path.write_bytes(PNG)
    forms = [
        PNG,
        bytearray(PNG),
        memoryview(PNG),
        path,
        "a.txt",
        str(path),
        URL,
        f"data:text/plain;charset=x;base64,{BASE64[:20]}\n {BASE64[20:]}",
        {"bytes": PNG, "path": None},
        {"bytes": None, "path": "a.txt"},
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": BASE64}},
        {"type": "image", "source": {"type": "url", "url": URL}},
        {"type": "image", "data": BASE64, "mimeType": "image/jpeg"},
        {"type": "image", "image": "a.txt"},
        {"type": "image", "image": {"bytes": PNG}},
        {"type": "image", "path": "a.txt"},
        {"type": "image", "url": URL},
        {"type": "image", "base64": BASE64},
    ]
    part = ImagePart(sha256(PNG).hexdigest(), "image/png")
    for form in forms:
        image = read_image(form, "x", folder=tmp_path)
        assert image.part == part and image.data == PNG, form
    assert image_size(image, "x") == (8, 6)
    assert is_image_part(forms[10]) and not is_image_part({"type": "text"})


def test_pixels_become_a_png():
    for source in (quarters(), Image.fromarray(quarters()), Image.open(io.BytesIO(PNG))):
        image = read_image(source, "x")
        assert image.part.media_type == "image/png" and image.is_intact
        assert (decode_image(image, "x") == quarters()).all()

    rotated = Image.open(io.BytesIO(_rotated(6)))
    assert decode_image(read_image(rotated, "x"), "x").shape == (64, 48, 3)

    floats = Image.fromarray(np.full((2, 2), 0.5, np.float32))
    with pytest.raises(ImageError, match="floating point: give an image of mode RGB"):
        read_image(floats, "x")  # a conversion would cut the values off: black


@pytest.mark.parametrize(
    ("kind", "media_type"),
    [
        ("PNG", "image/png"),
        ("WEBP", "image/webp"),
        ("GIF", "image/gif"),
        ("BMP", "image/bmp"),
        ("JPEG", "image/jpeg"),
    ],
)
@pytest.mark.parametrize("size", [(8, 6), (1, 1), (300, 2)])
def test_formats_by_content(kind, media_type, size):
    pixels = quarters(*size)
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}
    image = read_image(encoded(pixels, kind, **options.get(kind, {})), "x")
    assert image.part.media_type == media_type and image_size(image, "x") == size
    assert np.abs(decode_image(image, "x").astype(int) - pixels).max() <= 40 * (kind == "JPEG")


def test_webp_has_three_kinds_of_headers():
    alpha = Image.new("RGBA", (30, 20), (*RED, 128))
    for data in (encoded(quarters(30, 20), "WEBP"), encoded(alpha, "WEBP")):
        assert read_header(data)[1:] == (30, 20)


def _rotated(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(quarters(64, 48), "JPEG", quality=95, exif=exif)


def _near(pixels, place, color):
    assert np.abs(pixels[place].astype(int) - color).max() < 12, (pixels[place], color)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation(orientation):
    """EXIF says how the camera was held: all eight ways show the same picture again."""
    turn = {1: 0, 2: 0, 3: 2, 4: 2, 5: 1, 6: 1, 7: 3, 8: 3}[orientation]
    pixels = decode_image(_rotated(orientation), "x")
    expected = quarters(64, 48)
    if orientation in (2, 5, 7):
        expected = expected[:, ::-1] if orientation == 2 else expected.transpose(1, 0, 2)
        expected = expected[::-1, ::-1] if orientation == 7 else expected
    elif orientation == 4:
        expected = expected[::-1]
    else:
        expected = np.rot90(expected, -turn)
    assert pixels.shape == expected.shape
    for place in ((5, 5), (5, -5), (-5, 5), (-5, -5)):
        _near(pixels, place, expected[place])


def test_colours_of_every_mode():
    gray = np.arange(0, 65536, 64, np.uint16).reshape(32, 32)
    sixteen = decode_image(encoded(Image.fromarray(gray)), "x")
    assert (sixteen[..., 0] == np.round(gray / 257.0)).all() and sixteen.max() == 255

    alpha = Image.new("RGBA", (2, 1), (*RED, 255))
    alpha.putpixel((1, 0), (0, 0, 0, 0))
    assert decode_image(encoded(alpha), "x").tolist() == [[list(RED), [255, 255, 255]]]

    palette = Image.fromarray(quarters()).quantize(4)
    assert (decode_image(encoded(palette), "x") == np.array(palette.convert("RGB"))).all()
    clear = Image.new("P", (2, 1))
    clear.putpalette([*BLUE, *RED])
    clear.putpixel((1, 0), 1)
    shown = decode_image(encoded(clear, transparency=0), "x")
    assert shown.tolist() == [[[255, 255, 255], list(RED)]]

    for mode in ("1", "L", "LA"):
        image = Image.new(mode, (2, 2), {"1": 1, "L": 77, "LA": (77, 255)}[mode])
        assert decode_image(encoded(image), "x")[0, 0].tolist() == [255 if mode == "1" else 77] * 3

    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    _near(decode_image(encoded(cmyk, "JPEG", quality=95), "x"), (8, 8), (255, 0, 0))

    see_through = png(
        2,
        1,
        chunk(b"tRNS", struct.pack(">H", 65535)),
        chunk(b"IDAT", zlib.compress(b"\0" + struct.pack(">HH", 0, 65535))),
        depth=16,
        color=0,
    )
    assert decode_image(see_through, "x")[0].tolist() == [[0, 0, 0], [255, 255, 255]]


@pytest.mark.parametrize(
    ("depth", "color", "row", "transparent", "shown"),
    [
        (1, 0, b"\x40", ">H 0", [255, 255]),
        (2, 0, b"\x10", ">H 1", [0, 255]),
        (4, 0, b"\x03", ">H 3", [0, 255]),
        (16, 2, struct.pack(">6H", 0, 0, 0, 9000, 9000, 9000), ">3H 9000 9000 9000", [0, 255]),
    ],
)
def test_a_png_of_any_depth_has_a_transparent_colour(depth, color, row, transparent, shown):
    form, *values = transparent.split()
    file = png(
        2,
        1,
        chunk(b"tRNS", struct.pack(form, *map(int, values))),
        chunk(b"IDAT", zlib.compress(b"\0" + row)),
        depth=depth,
        color=color,
    )
    assert decode_image(file, "x")[0].tolist() == [[value] * 3 for value in shown]


BIG = 40_000
BOMB = zlib.compress(bytes(20_000_000), 1)
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
WEBP_BIG = (
    b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0"
    + (16382).to_bytes(3, "little") * 2
    + b"VP8 \0\0\0\0"
)
HOSTILE = {
    "a PNG of 40,000 x 40,000": (png(BIG, BIG), "40,000 x 40,000 pixels"),
    "a PNG of 2**31 x 2**31": (png(2**31, 2**31), "make it smaller"),
    "a GIF of 65,535 x 65,535": (b"GIF89a\xff\xff\xff\xff\0\0\0", "65,535 x 65,535"),
    "a WebP of 16,383 x 16,383": (WEBP_BIG, "16,383 x 16,383"),
    "a JPEG of 65,535 x 65,535": (
        JPEG.replace(struct.pack(">HH", 48, 64), b"\xff\xff\xff\xff", 1),
        "65,535 x 65,535",
    ),
    "a BMP of 100,000 x 100,000": (
        b"BM" + bytes(12) + struct.pack("<Iii", 40, 100_000, -100_000) + bytes(40),
        "100,000 x 100,000",
    ),
    "a PNG of 0 x 5": (png(0, 5), "0 x 5 pixels: give an image with pixels"),
    "a bomb in a text": (
        png(1, 1, chunk(b"zTXt", b"a\0\0" + BOMB), chunk(b"IDAT", zlib.compress(bytes(4)))),
        "can't be decoded",
    ),
    "a bomb in a colour profile": (
        png(1, 1, chunk(b"iCCP", b"a\0\0" + BOMB), chunk(b"IDAT", zlib.compress(bytes(4)))),
        "can't be decoded",
    ),
    "a bomb behind the pixels": (
        png(1, 1, chunk(b"IDAT", zlib.compress(bytes(4))), chunk(b"zTXt", b"a\0\0" + BOMB)),
        "can't be decoded",
    ),
    "a truncated PNG": (encoded(quarters(99, 99))[:-60], "can't be decoded"),
    "a PNG with a wrong checksum": (PNG[:-20] + b"\x00" + PNG[-19:], "can't be decoded"),
    "a PNG without pixels": (png(4, 4), "can't be decoded"),
    "a truncated JPEG": (JPEG[: len(JPEG) // 2], "is cut off"),
    "a JPEG without its last two bytes": (JPEG[:-2], "is cut off"),
    "a JPEG overwritten with text": (
        JPEG[:300] + b"\xff\x01\xff\x02 hello" + JPEG[311:],
        "JPEG",
    ),
    "a JPEG of many segments": (JPEG[:2] + b"\xff\xfe\0\x02" * 70_000 + JPEG[2:], "65,536 segm"),
    "a JPEG of fill bytes": (JPEG[:2] + b"\xff" * 70_000 + JPEG[3:], "65,536 segments"),
    "a JPEG of many scans": (JPEG[:-2] + b"\xff\xda\0\x02" * 300 + JPEG[-2:], "256 scans"),
    "a PNG of many chunks": (png(1, 1, chunk(b"tEXt", b"") * 70_000), "65,536 chunks"),
    "base64 without its beginning": (URL.partition(",")[2] * 99, "too long for a path"),
    "a JPEG that is a header": (b"\xff\xd8\xff\xe0\0", "cut off"),
    "a JPEG without a frame": (b"\xff\xd8\xff\xd9", "without a frame"),
    "a truncated GIF": (encoded(quarters(99, 99), "GIF")[:60], "can't be decoded"),
    "a truncated WebP": (encoded(quarters(99, 99), "WEBP")[:70], "can't be decoded"),
    "a truncated BMP": (encoded(quarters(9, 9), "BMP")[:99], "can't be decoded"),
    "an SVG": (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "it is SVG"),
    "an SVG with a comment": (b"<!-- a --><svg/>", "it is SVG"),
    "HTML in place of an image": (b"<!DOCTYPE html><title>404</title>", "it is HTML"),
    "a pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    "an animated GIF": (encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "anim"),
    "an animated PNG": (encoded(FRAMES[0], save_all=True, append_images=FRAMES[1:]), "is animated"),
    "an animated WebP": (
        encoded(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]),
        "is animated",
    ),
    "TIFF": (encoded(quarters(), "TIFF"), "it is TIFF: give a whole PNG"),
    "nothing": (b"", "is empty"),
    "noise": (bytes(range(200)), "which no image has"),
    "too many bytes": (PNG + bytes(LIMITS.max_bytes), "are the most"),
    "too many bytes in base64": (URL + "A" * (LIMITS.max_bytes * 2), "are the most"),
    "a data URL without base64": ("data:image/png,abc", "without base64"),
    "no base64": ("data:image/png;base64,a$b", "is not base64"),
    "a URL on the network": ("https://example.org/a.png", "no image is fetched"),
    "a metadata address": ({"image_url": {"url": "http://169.254.169.254/a"}}, "no image is fet"),
    "a file URL": ("file:///etc/passwd", "no image is fetched"),
    "a client's path": ({"type": "image", "path": "/etc/passwd"}, "paths are not read here"),
    "a file id": ({"type": "input_image", "file_id": "file-1"}, "none of them is an image"),
    "a placeholder alone": ({"type": "image"}, "none of them is an image"),
    "data that is no text": ({"source": {"type": "base64", "data": 3}}, "data is a int"),
    "a number": (3, "is a int, not an image"),
    "a grey array": (np.zeros((4, 4), np.uint8), r"array \[4, 4\] of uint8: give \[H, W, 3\]"),
    "an array of floats": (np.zeros((4, 4, 3), np.float32), "of float32"),
    "a huge array": (np.broadcast_to(np.uint8(0), (9000, 9000, 3)), "9,000 x 9,000"),
    "an animated Image": (
        Image.open(io.BytesIO(encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]))),
        "is animated",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("error")
def test_a_hostile_image_is_a_clear_error(name):
    source, why = HOSTILE[name]
    with pytest.raises(ImageError, match=why) as error:
        read_image(source, "task 3, image 2")
    assert str(error.value).startswith("task 3, image 2") and len(str(error.value)) < 600


def test_paths(tmp_path):
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big").write_bytes(bytes(99))
    for name, why in [
        ("none.png", "No such file"),
        ("in", "is a folder"),
        ("pipe", "pipe"),
        ("a\0b", "null"),
        ("x" * 5000, "too long"),
    ]:
        with pytest.raises(ImageError, match=why):
            read_image(name, "row 1", folder=tmp_path)
    with pytest.raises(ImageError, match="has 99 bytes, and 9 are"):
        read_image("big", "x", folder=tmp_path, limits=ImageLimits(max_bytes=9))


def test_limits_are_exact():
    wide = encoded(quarters(10, 10))
    read_image(wide, "x", limits=ImageLimits(max_pixels=100, max_bytes=len(wide)))
    for limits in (ImageLimits(max_pixels=99), ImageLimits(max_bytes=len(wide) - 1)):
        with pytest.raises(ImageError, match="are the most"):
            read_image(wide, "x", limits=limits)


def test_an_image_of_a_store_is_not_believed():
    """Its bytes may be a bomb, and its type any other one."""
    bomb = image_file(huge_png(), "image/png")
    with pytest.raises(ImageError, match="the screen has 40,000 x 40,000 pixels"):
        decode_image(bomb, "the screen")

    url = data_url(image_file(JPEG, "text/html"), "x")
    assert url.startswith("data:image/jpeg;base64,") and read_image(url, "x").data == JPEG
    with pytest.raises(ImageError, match="which no image has"):
        data_url(image_file(b"<script>", "image/png"), "the screen")


def test_other_bytes_under_a_digest_are_refused():
    image = image_file(PNG, "image/png")
    damaged = msgspec.structs.replace(image, data=JPEG)
    assert decode_image(image, "x").shape == (6, 8, 3) and not damaged.is_intact
    with pytest.raises(ImageError, match=f"turn 2: the bytes are not those .* {image.part.sha256}"):
        decode_image(damaged, "turn 2")


def test_profile_text_and_bytes_behind_the_end_are_harmless():
    """A profile of usual size, and a phone's second picture behind the first."""
    for data in (encoded(quarters(), icc_profile=PROFILE), JPEG + JPEG, PNG + b"tail"):
        read_image(data, "x")


def test_random_damage_never_raises_anything_else():
    rng = np.random.default_rng(3)
    files = [PNG, JPEG, *(encoded(quarters(40, 30), k) for k in ("WEBP", "GIF", "BMP"))]
    for number in range(120):
        data = bytearray(files[number % len(files)])
        for place in rng.integers(0, len(data), size=rng.integers(1, 6)):
            data[place] = rng.integers(0, 256)
        if rng.random() < 0.3:
            del data[rng.integers(1, len(data)) :]
        try:
            image = read_image(bytes(data), "x")
        except ImageError:
            continue
        assert decode_image(image, "x").dtype == np.uint8


def test_many_threads_read_the_same_images():
    results = []

    def read():
        results.extend(read_image(data, "x").part.sha256 for data in (PNG, JPEG) * 20)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 160 and len(set(results)) == 2
