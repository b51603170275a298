"""Images in results of tools: functions, verl's tools, MCP servers and AgentRL's nodes."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from called_tools import called
from pictures import base64_of, data_url, file_of, huge_png, picture

from agentevo.agents.tools import result_parts
from agentevo.agents.tools.functions import result_of
from agentevo.agents.tools.mcp_manager import _result
from agentevo.agents.tools.mcp_offers import read_parts, read_resources
from agentevo.agents.tools.result_parts import result_of_parts
from agentevo.agents.tools.tool import ToolResult
from agentevo.agents.tools.toolbox import ResultCache
from agentevo.config.tools import tool
from agentevo.data.images import read_image
from agentevo.errors import ImageError

PNG = file_of(picture())
NOTE = "[image, image/png, 8 x 6 pixels]"
IMAGE = read_image(PNG, "x")


@pytest.mark.parametrize(
    ("returned", "text", "parts"),
    [
        (picture(), NOTE, [IMAGE]),
        ({"type": "image", "image": picture()}, NOTE, [IMAGE]),
        ({"type": "image_url", "image_url": {"url": data_url(PNG)}}, NOTE, [IMAGE]),
        (["See:", picture(), "end"], f"See:\n{NOTE}\nend", ["See:", IMAGE, "end"]),
        (
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, picture()],
            f"a\nb\n{NOTE}",
            ["a\nb", IMAGE],
        ),
        (ToolResult(text="See:", parts=(picture(),)), f"See:\n{NOTE}", ["See:", IMAGE]),
        (ToolResult(parts=(picture(), "end")), f"{NOTE}\nend", [IMAGE, "end"]),
    ],
)
def test_what_a_function_returns(returned, text, parts):
    result = result_of(returned)
    assert (result.text, list(result.parts)) == (text, parts)
    assert result_of(result) == result, "a result is read once"


@pytest.mark.parametrize(
    "returned",
    [
        [{"type": "text", "text": "a"}],
        {"type": "image", "url": "https://example.org/a.png"},
        [{"type": "image", "path": "a.png"}, {"type": "image"}],
        ["a", "b"],
    ],
)
def test_what_only_names_an_image_is_data(returned):
    result = result_of(returned)
    assert json.loads(result.text) == returned and not result.parts


def test_what_can_not_be_a_result():
    with pytest.raises(TypeError, match="a list of an image and a int"):
        result_of([picture(), 3])
    with pytest.raises(ImageError, match="40,000 x 40,000"):
        result_of([{"type": "image", "data": base64_of(huge_png())}])
    with pytest.raises(TypeError, match="have no image"):
        result_of(ToolResult(parts=("a",)))


def test_tools_of_every_kind_give_images_and_long_texts_are_cut():
    @tool("draw")
    def draw(words: str):
        """Draws."""
        return [words, picture()]

    @tool("paint")
    async def paint():
        """Paints."""
        return ToolResult(text="Painted:", parts=[picture()], reward=0.5)

    (drawn, painted, long), *_ = called(
        ("draw", {"words": "w"}),
        ("paint", {}),
        ("draw", {"words": "w" * 20_000}),
    )
    assert list(drawn.parts) == ["w", IMAGE] and drawn.text == f"w\n{NOTE}"
    assert list(painted.parts) == ["Painted:", IMAGE] and painted.reward == 0.5
    assert "characters are left out" in long.text
    assert list(long.parts) == [long.text, IMAGE], "the image stays"


def test_another_text_keeps_the_images():
    result = result_of_parts(["a", IMAGE, "b"])
    assert list(result.with_text(f"Error: {result.text}").parts) == ["Error: ", "a", IMAGE, "b"]
    assert list(result.with_text("short").parts) == ["short", IMAGE]
    assert result.with_text(result.text) is result
    assert result_of_parts(["a"]).with_text("b") == ToolResult(text="b")
    assert result.size == len(result.text) + len(PNG)


def test_cached_images_count():
    cache = ResultCache(max_chars=2 * len(PNG))

    async def work():
        for key in "ababc":
            await cache.get(key, lambda: _made())

    async def _made():
        return result_of_parts([IMAGE])

    asyncio.run(work())
    assert cache.hits == 0, "one image and its note fill it"


def mcp(kind, **values):
    return SimpleNamespace(type=kind, **values)


def test_what_an_mcp_server_gives():
    blob = SimpleNamespace(uri="a://b", mime_type="image/png", blob=base64_of(PNG))
    zipped = SimpleNamespace(uri="a://z", mime_type="application/zip", blob=base64_of(b"abc"))
    read = asyncio.run(
        read_parts(
            [
                mcp("text", text="See:"),
                mcp("image", data=base64_of(PNG), mime_type="image/jpeg"),
                mcp("resource", resource=blob),
                mcp("resource", resource=SimpleNamespace(uri="a://t", text="told", mime_type=None)),
                mcp("resource", resource=zipped),
                mcp("audio", data="AAAA", mime_type="audio/wav"),
                mcp("resource_link", uri="a://c"),
                mcp("image", data=base64_of(huge_png()), mime_type="image/png"),
            ]
        )
    )
    assert read[:4] == ["See:", IMAGE, IMAGE, "told"]
    assert read[4:7] == [
        "[resource a://z, 3 bytes]",
        "[audio, audio/wav, 3 bytes]",
        "[resource_link a://c]",
    ]
    assert "left out: " in read[7] and "40,000 x 40,000 pixels" in read[7]
    assert asyncio.run(read_resources([blob, zipped])) == [IMAGE, "[resource a://z, 3 bytes]"]


def test_a_server_decides_not_how_long_images_are_decoded(monkeypatch):
    monkeypatch.setattr(result_parts, "MAX_PIXELS", 2 * 8 * 6)
    block = {"type": "image_url", "image_url": {"url": data_url(PNG)}}
    told = "[the rest is left out: the images have more than 96 pixels]"
    images = [mcp("image", data=base64_of(PNG), mime_type="image/png")] * 5
    blobs = [SimpleNamespace(uri="a://b", mime_type="image/png", blob=base64_of(PNG))] * 5
    assert asyncio.run(read_parts(images)) == [IMAGE, IMAGE, IMAGE, told]
    assert asyncio.run(read_resources(blobs)) == [IMAGE, IMAGE, IMAGE, told]
    assert list(_result([block] * 5).parts) == [IMAGE, IMAGE, IMAGE, told]


def test_what_an_agentrl_node_gives():
    result = _result(
        [
            {"type": "text", "text": "See:"},
            {"type": "image_url", "image_url": {"url": data_url(PNG)}},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        ]
    )
    assert list(result.parts) == ["See:", IMAGE, "[image https://example.org/a.png]"]
