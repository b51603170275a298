"""Images in requests to remote models: both APIs' forms, the budget, the cache, and refusals."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest
from pictures import base64_of, data_url, file_of, picture
from pydantic import ValidationError
from remote_server import RemoteServer, chat, gives

from agentevo.agents.remote_policy import RemoteModelPolicy, RemotePolicyConversation
from agentevo.config.remote_models import RemoteModelSection
from agentevo.data.images import read_image
from agentevo.errors import BadRequestError
from agentevo.inference.remote_models import RemoteConversations, RemoteModel, RemoteModels
from agentevo.inference.remote_models.images import MOST_TOKENS_OF_IMAGE
from agentevo.inference.remote_models.ledger import BudgetExceededError
from agentevo.store.call_log import AttemptCalls
from agentevo.types import Message, SamplingOverrides, TextPart, ToolCall

PNG, JPEG, BMP = (
    read_image(data, "x")
    for data in (
        file_of(picture()),
        file_of(picture(colour=(0, 0, 200)), "JPEG"),
        file_of(picture(colour=(0, 9, 0)), "BMP"),
    )
)
FILES = {image.part.sha256: image for image in (PNG, JPEG, BMP)}
HISTORY = [
    Message("system", "Be brief."),
    Message("user", (TextPart("What is this?"), PNG.part, TextPart("And this?"), BMP.part)),
    Message("assistant", "", (ToolCall("look", "{}", "c1"), ToolCall("look", "{}", "c2"))),
    Message("tool", (TextPart("See:"), JPEG.part), tool_call_id="c1"),
    Message("tool", (PNG.part,), tool_call_id="c2"),
    Message("user", "Well?"),
]
BMP_AS_PNG = data_url(file_of(picture(colour=(0, 9, 0))))
MESSAGE = {
    "content": [{"type": "text", "text": "red"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 10, "output_tokens": 2},
}


def section(server: RemoteServer, **keys: Any) -> RemoteModelSection:
    values = {"model": "m", "base_url": server.base_url, "sees_images": True, "max_tries": 1}
    return RemoteModelSection(**values | keys)


def asked(server, messages, folder=None, *, images=FILES, **keys):
    with closing(RemoteModel("judge", section(server, **keys), folder)) as remote:
        return asyncio.run(remote.generate(messages, images=images))


def test_openais_form():
    """Results of tools have texts alone in this API: their images follow them."""
    with RemoteServer() as server:
        asked(server, HISTORY)

    _, user, _, first, second, images, last = server.received[0]["messages"]
    kinds = [next(iter(part.keys() - {"type"})) for part in user["content"]]
    assert kinds == ["text", "image_url", "text", "image_url"]
    assert user["content"][1] == {"type": "image_url", "image_url": {"url": data_url(PNG.data)}}
    assert user["content"][3]["image_url"]["url"] == BMP_AS_PNG, "no API takes a BMP"
    assert (first["role"], first["content"]) == ("tool", "See:")
    assert (second["role"], second["content"]) == ("tool", "(an image, which follows)")
    assert images["role"] == "user" and [part["type"] for part in images["content"]] == [
        "text", "image_url", "image_url"
    ]  # fmt: skip
    urls = [part["image_url"]["url"] for part in images["content"][1:]]
    assert urls == [data_url(JPEG.data, "image/jpeg"), data_url(PNG.data)]
    assert last["content"] == "Well?"


def test_anthropics_form():
    with RemoteServer(gives(MESSAGE)) as server:
        asked(server, HISTORY, api="anthropic", base_url=server.url)

    user, _, results = server.received[0]["messages"]
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(PNG.data)}
    assert user["content"][1] == {"type": "image", "source": source}
    first, second, well = results["content"]
    assert [block["type"] for block in first["content"]] == ["text", "image"]
    assert second["content"] == [{"type": "image", "source": source}]
    assert well == {"type": "text", "text": "Well?"}


@pytest.mark.parametrize(
    ("message", "images", "keys", "says"),
    [
        (HISTORY[1], {}, {}, "message 1: the file of the image .* is missing"),
        (Message("system", (PNG.part,)), FILES, {}, "message 1, of role system"),
        (Message("assistant", (PNG.part,)), FILES, {}, "message 1, of role assistant"),
        (HISTORY[1], FILES, {"sees_images": False}, "set remote_models.judge.sees_images=true"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///a"}}]},
            {},
            {},
            "no image is fetched",
        ),
    ],
)
def test_what_is_refused(message, images, keys, says):
    with RemoteServer() as server:
        with pytest.raises(BadRequestError, match=says):
            asked(server, [message], images=images, **keys)
        assert not server.received

        with pytest.raises(ValidationError, match="reads text alone"):
            RemoteModelSection(model="tiny_model", api="engine", sees_images=True)


def test_messages_may_have_the_images_themselves():
    part = {"type": "image_url", "image_url": {"url": data_url(PNG.data)}}
    with RemoteServer() as server:
        asked(server, [{"role": "user", "content": [part]}], images={})
    assert server.received[0]["messages"][0]["content"] == [part]


@pytest.mark.slow
def test_the_cache_and_the_budget_count_images(tmp_path):
    """An image counts with the most tokens that a server may count, not by its bytes."""
    large = read_image(file_of(picture(900, 900), "BMP"), "x")
    small = read_image(file_of(picture(9, 9)), "x")
    images = {image.part.sha256: image for image in (large, small)}
    bound = 2 * MOST_TOKENS_OF_IMAGE
    with RemoteServer(gives(chat("red", usage=None))) as server:
        options = {"cache": True, "images": images, "max_new_tokens": 1}
        for image in (large, large, small):
            reply = asked(server, [Message("user", (image.part,))], tmp_path, **options)
            assert reply.text == "red"
        assert len(server.received) == 2, "the same image is the same request"

        budget = {"tokens": bound}
        with pytest.raises(BudgetExceededError):
            asked(server, [HISTORY[1]], tmp_path / "b", budget=budget)
        asked(server, [Message("user", (PNG.part,))], tmp_path / "b", budget=budget)


def test_a_remote_policy_sees_by_the_recipe():
    with RemoteServer() as server:
        for sees in (True, False):
            models = RemoteModels({"m": section(server, sees_images=sees)})
            with closing(models):
                remote = RemoteConversations(models, name="a", seed=1)
                conversation = RemotePolicyConversation(
                    remote, "m", SamplingOverrides(), name="a", calls=AttemptCalls(None, "a")
                )
                policy = RemoteModelPolicy(conversation, None, remote, "m")
                assert policy.sees_images is sees
                part = policy.add_image(PNG.data)
                if sees:
                    asyncio.run(policy.generate([Message("user", (part,))]))

    (body,) = server.received
    assert body["messages"][0]["content"][0]["image_url"]["url"] == data_url(PNG.data)
