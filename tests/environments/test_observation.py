"""The forms of observations: texts, Observation, content blocks and VAGEN's mapping."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from agentevo import Observation
from agentevo.data.message_images import ImageCollector
from agentevo.environments.observation import (
    Picture,
    has_form,
    read_observation,
    read_pictures,
    text_of,
)
from agentevo.errors import EnvironmentFailure
from agentevo.types import ImagePart, TextPart

RED = np.zeros((6, 8, 3), np.uint8)
RED[..., 0] = 200
FILE = io.BytesIO()
PIL.Image.fromarray(RED).save(FILE, "PNG")
PNG = FILE.getvalue()


def block(image):
    return {"type": "image", "image": image}


def said(text):
    return {"type": "text", "text": text}


def vagen(text, *images, key="multi_modal_data"):
    return {"obs_str": text, key: {"<image>": list(images)}}


@pytest.mark.parametrize(
    ("observation", "seen"),
    [
        ("at 3", "at 3"),
        ("a <image>", "a <image>"),
        ("", ""),
        (Observation("at 3"), "at 3"),
        (Observation("a <image>", [PNG]), (Picture(PNG), "a <image>")),
        (Observation(images=[PNG, b"b"]), (Picture(PNG), Picture(b"b"))),
        ([said("a"), block(PNG), said("b"), said("c")], ("a", Picture(block(PNG)), "bc")),
        ((block(PNG),), (Picture(block(PNG)),)),
        ([said("a"), said("b")], "ab"),
        ({"obs_str": "at <image>"}, "at <image>"),
        (vagen("at 3"), "at 3"),
        (vagen("a <image>\nb", PNG), ("a ", Picture(PNG), "\nb")),
        (vagen("<image><image>", PNG, b"b"), (Picture(PNG), Picture(b"b"))),
        (vagen("no mark", PNG), (Picture(PNG), "no mark")),
        (vagen("<image>", PNG, key="multi_modal_input"), (Picture(PNG),)),
        (Observation("half \ud800", [PNG]), (Picture(PNG), "half ?")),
    ],
)
def test_each_form_is_a_text_or_parts_in_order(observation, seen):
    assert read_observation(observation, "step") == seen
    assert text_of(seen) == (
        seen if isinstance(seen, str) else "".join(part for part in seen if isinstance(part, str))
    )


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        (3, r"step\(\) is a int: return a text, agentevo.Observation"),
        (None, "is a NoneType"),
        (RED, "is a ndarray: return"),
        ([], "is an empty list"),
        ({"screen": RED}, "is a dict with the keys screen: return"),
        ([{"type": "video"}], "'video' in the place of a content block"),
        (["a text"], "'str' in the place of a content block"),
        ([said(3)], "the text in .* is a int"),
        (Observation(3), "the text in .* is a int"),
        (Observation("", RED), "are a ndarray: give a list, also for one image"),
        (Observation("", [Path("a.png")]), r"is the path a.png, .*read_bytes\(\)"),
        ([{"type": "image", "path": Path("a.png")}], "is the path a.png"),
        (vagen("<image> <image>", PNG), "2 of the mark <image>, and the list has 1 of"),
        ({"obs_str": "a", "multi_modal_data": [PNG]}, "multi_modal_data is a list"),
        ({"obs_str": "a", "multi_modal_data": {"<video>": [PNG]}}, "has <video>, and only images"),
        ({"obs_str": None}, "the text in .* is a NoneType"),
    ],
)
def test_other_forms_are_refused_with_the_right_ones(observation, words):
    with pytest.raises(EnvironmentFailure, match=words):
        read_observation(observation, "step")


def test_a_message_has_the_images_by_digest():
    images = ImageCollector()
    for image in (PNG, RED, PIL.Image.fromarray(RED), block(PNG)):
        content = read_pictures(("see ", Picture(image), "!"), images.read, "reset")
        (digest,) = images.files  # the same pixels, by the same encoder: the same image
        assert content == (TextPart("see "), ImagePart(digest), TextPart("!"))
    assert images.files[digest].data == PNG


def test_a_text_needs_no_policy_that_sees():
    assert read_pictures("at 3", None, "reset") == "at 3"


def animated() -> bytes:
    file = io.BytesIO()
    frames = [PIL.Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (animated(), "is animated"),
        (PIL.Image.open(io.BytesIO(animated())), "is animated"),
        (np.broadcast_to(np.uint8(0), (40_000, 40_000, 3)), "40,000 x 40,000 pixels"),
        (RED.astype(float), "float64: give .H, W, 3. of uint8"),
        (RED[..., 0], r"is an array \[6, 8\]"),
        (np.dstack([RED, RED[..., :1]]), r"is an array \[6, 8, 4\]"),
        (PNG[:-20], "image 2 of the environment's step"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "give a whole PNG"),
        ("screen.png", "paths are not read here"),
        ("http://example.com/a.png", "no image is fetched"),
        (None, "is a NoneType, not an image"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_image_that_cannot_be_used_fails_the_attempt_with_its_place(image, words):
    with pytest.raises(EnvironmentFailure, match=words) as failure:
        read_pictures((Picture(PNG), "a", Picture(image)), ImageCollector().read, "step")
    assert "image 2 of the environment's step()" in str(failure.value)


def test_values_of_gymnasiums_spaces_are_no_forms():
    assert not any(map(has_form, ["a", 3, RED, {"screen": RED}, (1, 2), [], ({"a": 1},), None]))
    assert all(map(has_form, [Observation("a"), [said("a")], vagen("<image>", PNG)]))
