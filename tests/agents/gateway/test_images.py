"""Images of clients: every API's form, through the SDKs, to a model that sees; and what is refused.
A remote model stands for the model that sees, since its server shows what it was sent."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import numpy as np
import openai
import pytest
from chat_templates import HERMES
from pictures import (
    SVG,
    animation,
    base64_of,
    data_url,
    file_of,
    huge_png,
    picture,
    rotated_jpeg,
)
from PIL import Image
from remote_server import RemoteServer, chat, gives
from seeing_chats import SeeingEngine, seeing_chat, seeing_conversation

from agentevo.agents.gateway import anthropic_messages, memory, responses, shared_session
from agentevo.agents.gateway import images as gateway_images
from agentevo.agents.gateway.images import DecodedImages, RequestImages
from agentevo.agents.gateway.request import Delivery
from agentevo.config.remote_models import RemoteModelSection
from agentevo.data import images as data_images
from agentevo.errors import ImageError
from agentevo.inference.remote_models import RemoteModels
from agentevo.types import ImagePart, Message, TextPart

TEMPLATE = HERMES
PNG = file_of(picture())
JPEG = file_of(picture(colour=(0, 0, 200)), "JPEG")
SMALL = file_of(picture(1, 1))
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


def part(data, media_type="image/png", **more):
    return {"type": "image_url", "image_url": {"url": data_url(data, media_type), **more}}


def block(data, media_type="image/png"):
    source = {"type": "base64", "media_type": media_type, "data": base64_of(data)}
    return {"type": "image", "source": source}


def models_of(server, **keys):
    section = {"base_url": server.base_url, "model": "m", "sees_images": True, **keys}
    return closing(RemoteModels({"teacher": RemoteModelSection(**section)}))


def talked(gateway_of, talk, *, sees=True, **section):
    """What a talk returns, the bodies that the model's server got, and the attempt's policy."""

    async def work(remote):
        async with gateway_of(["left"] * 9, remote, **section) as opened:
            policy = opened.policy(context_length=4000)
            return await talk(opened, policy), policy

    with RemoteServer(gives(chat("red"))) as server, models_of(server, sees_images=sees) as remote:
        told, policy = asyncio.run(work(remote))
    return told, server.received, policy


def shown(message):
    """The parts of a message that the server got: texts, and the bytes of images."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [part["text"] if part["type"] == "text" else part["image_url"]["url"] for part in parts]


@pytest.mark.slow
def test_openais_chat_client_sends_images(gateway_of):
    async def talk(opened, policy):
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            content = [
                {"type": "text", "text": "What"},
                {"type": "text", "text": " is this?"},
                part(PNG, detail="high"),
                part(JPEG, "image/png"),
                {"type": "text", "text": "And that?"},
            ]
            user = {"role": "user", "content": content}
            asked = [user, {"role": "assistant", "content": "red"}, {**user, "content": "Sure?"}]
            for messages in (asked[:1], asked):
                answer = await client.chat.completions.create(model="teacher", messages=messages)
            return answer.choices[0].message.content

    told, bodies, policy = talked(gateway_of, talk)
    assert told == "red"
    urls = [data_url(PNG), data_url(JPEG, "image/jpeg")]
    assert [shown(message) for message in bodies[1]["messages"]] == [
        ["What is this?", *urls, "And that?"],
        ["red"],
        ["Sure?"],
    ]

    images = policy.remote.images.files
    assert list(images) == [sha256(PNG).hexdigest(), sha256(JPEG).hexdigest()], "each once"
    first, second = policy.remote.turns
    assert first.messages[0].content[1] == ImagePart(sha256(PNG).hexdigest(), "image/png")
    assert second.parent == 0 and len(second.messages) == 2, "the history is the same by digests"


async def send_raw(opened, policy, body):
    answer = await opened.post(policy, body, "/messages")
    return answer.json()["content"][0]["text"]


async def send_by_sdk(opened, policy, body):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.AsyncAnthropic(
        base_url=policy.session.base, api_key=policy.api_key, max_retries=0
    )
    answer = await client.messages.create(**body)
    return answer.content[0].text


@pytest.mark.parametrize("send", [send_raw, send_by_sdk])
def test_anthropics_messages_have_images_also_in_results(gateway_of, send):
    async def talk(opened, policy):
        use = {"type": "tool_use", "id": "x1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "x1", "is_error": True}
        messages = [
            {"role": "user", "content": [block(PNG), {"type": "text", "text": "What is it?"}]},
            {"role": "assistant", "content": [use]},
            {
                "role": "user",
                "content": [
                    {**result, "content": [{"type": "text", "text": "See:"}, block(JPEG)]},
                    {"type": "text", "text": "Well?"},
                    block(SMALL),
                ],
            },
        ]
        body = {"model": "teacher", "max_tokens": 9, "messages": messages, "tools": [TOOL]}
        return await send(opened, policy, body)

    told, (body,), policy = talked(gateway_of, talk)
    assert told == "red"
    asked, _, result, images, last = body["messages"]
    assert shown(asked) == [data_url(PNG), "What is it?"]
    assert (result["role"], result["content"]) == ("tool", "Error: See:")
    assert shown(images)[1:] == [data_url(JPEG, "image/jpeg")]
    assert shown(last) == ["Well?", data_url(SMALL)]

    _, _, recorded, *_ = policy.remote.turns[0].messages
    assert recorded.content[1].sha256 == sha256(JPEG).hexdigest()


@pytest.mark.slow
def test_openais_responses_client_sends_images_also_as_results(gateway_of):
    async def talk(opened, policy):
        image = {"type": "input_image", "image_url": data_url(PNG), "detail": "low"}
        call = {"type": "function_call", "call_id": "x1", "name": "look", "arguments": "{}"}
        output = [{"type": "input_text", "text": "See:"}, {**image, "image_url": data_url(SMALL)}]
        asked = [
            {"role": "user", "content": [{"type": "input_text", "text": "What?"}, image]},
            call,
            {"type": "function_call_output", "call_id": "x1", "output": output},
        ]
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            first = await client.responses.create(model="teacher", input=asked)
            second = await client.responses.create(
                model="teacher", input="Sure?", previous_response_id=first.id
            )
            kept = await client.responses.input_items.list(first.id)
        return second.output_text, kept.data

    (told, kept), bodies, _ = talked(gateway_of, talk)
    assert told == "red" and len(kept) == 3
    for body in bodies:
        asked, _, result, images = body["messages"][:4]
        assert shown(asked) == ["What?", data_url(PNG)]
        assert (result["content"], shown(images)[1:]) == ("See:", [data_url(SMALL)])


CHAT = "/chat/completions"
FORMS = {
    CHAT: lambda content: {"messages": [{"role": "user", "content": content}]},
    "/responses": lambda content: {"input": [{"role": "user", "content": content}]},
    "/messages": lambda content: {
        "max_tokens": 9,
        "messages": [{"role": "user", "content": content}],
    },
}


def in_form(path, source):
    """The body of a request with an image, which is bytes, a URL, or a part as it is."""
    if isinstance(source, bytes):
        url = data_url(source)
        image = {
            CHAT: {"type": "image_url", "image_url": {"url": url}},
            "/responses": {"type": "input_image", "image_url": url},
            "/messages": block(source),
        }[path]
    elif isinstance(source, str):
        image = {
            CHAT: {"type": "image_url", "image_url": {"url": source}},
            "/responses": {"type": "input_image", "image_url": source},
            "/messages": {"type": "image", "source": {"type": "url", "url": source}},
        }[path]
    else:
        image = source
    return {"model": "teacher", **FORMS[path]([image])}


HOSTILE = [
    ("https://example.org/a.png", "no image is fetched.*data URL"),
    ("http://127.0.0.1:1/a.png", "no image is fetched.*data URL"),
    ("file:///etc/passwd", "no image is fetched.*data URL"),
    ("/etc/passwd", "paths are not read here: give a data URL"),
    ("data:image/png,abc", "without base64"),
    ("data:image/png;base64,!!", "not base64"),
    ("data:image/png;base64,", "give a whole PNG"),
    ({"type": "image_url", "image_url": 3}, "not an image|none of them"),
    ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "file by its id.*data URL"),
    ({"type": "input_image", "file_id": "f"}, "file by its id.*data URL"),
    (huge_png(), "40,000 x 40,000 pixels"),
    (file_of(picture(64, 64), "JPEG")[:-300], "can't be decoded|whole"),
    (SVG, "PNG, JPEG, WebP"),
    (animation(), "animated"),
    (b"%PDF-1.7", "PNG, JPEG, WebP"),
]
RIGHT = [
    file_of(picture().convert("CMYK"), "JPEG"),
    rotated_jpeg(),
    SMALL,
    file_of(picture(), "BMP"),
    file_of(picture(), "GIF"),
    file_of(picture(), "WEBP"),
]


@pytest.mark.slow
@pytest.mark.parametrize("path", FORMS)
def test_a_hostile_image_is_a_400_and_a_whole_one_is_shown(gateway_of, path):
    async def talk(opened, policy):
        refused = [
            (says, await opened.post(policy, in_form(path, source), path))
            for source, says in HOSTILE
            if not (isinstance(source, dict) and not _is_of(path, source))
        ]
        right = [await opened.post(policy, in_form(path, source), path) for source in RIGHT]
        return refused, right

    (refused, right), bodies, _ = talked(gateway_of, talk)
    for says, answer in refused:
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert re.search(says, error["message"]), error["message"]

    assert [answer.status_code for answer in right] == [200] * len(RIGHT), right
    assert len(bodies) == len(RIGHT)
    sent = [shown(body["messages"][0])[0] for body in bodies]
    assert sent[1] == data_url(RIGHT[1], "image/jpeg"), "EXIF belongs to the file"
    assert sent[3].startswith("data:image/png"), "no API takes a BMP"


def _is_of(path, source):
    kinds = {CHAT: "image_url", "/responses": "input_image", "/messages": "image"}
    return source["type"] == kinds[path]


@pytest.mark.parametrize("path", FORMS)
def test_a_model_that_reads_text_alone_refuses_an_image(gateway_of, path):
    async def talk(opened, policy):
        body = in_form(path, PNG)
        return [
            await opened.post(policy, {**body, "model": name}, path) for name in ("tiny", "teacher")
        ]

    (policy_answer, remote_answer), bodies, policy = talked(gateway_of, talk, sees=False)
    assert policy_answer.status_code == remote_answer.status_code == 400
    assert "leave images out" in policy_answer.json()["error"]["message"]
    assert "teacher.sees_images=true" in remote_answer.json()["error"]["message"]
    assert not bodies and not policy.turns


@pytest.mark.slow
def test_images_are_decoded_once_and_not_on_the_gateways_loop(gateway_of, monkeypatch):
    threads = []
    decode = data_images._decode
    monkeypatch.setattr(
        data_images,
        "_decode",
        lambda *args: threads.append(threading.current_thread().name) or decode(*args),
    )

    async def talk(opened, policy):
        many = [part(file_of(picture(colour=(n, 0, 0)))) for n in range(200)]
        messages = [{"role": "user", "content": many}]
        return [
            await opened.post(policy, {"model": "teacher", "messages": messages}) for _ in range(2)
        ]

    answers, bodies, _ = talked(gateway_of, talk)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [len(body["messages"][0]["content"]) for body in bodies] == [200, 200]
    assert len(threads) == 200
    assert not any(name.startswith(("agentevo-gateway", "MainThread")) for name in threads)


@pytest.mark.slow
def test_a_body_with_images_may_be_longer_than_one_of_text(gateway_of, monkeypatch):
    noise = np.random.default_rng(1).integers(0, 255, (300, 300, 3), np.uint8)
    large = file_of(Image.fromarray(noise))
    assert len(large) > 250_000
    long_text = {"type": "text", "text": "x" * 300_000}

    async def talk(opened, policy):
        bodies = (
            in_form(CHAT, large),
            {"model": "teacher", "messages": [{"role": "user", "content": "x" * 300_000}]},
            {"model": "teacher", "messages": [{"role": "user", "content": "image" * 60_000}]},
            {"messages": [{"role": "user", "content": [part(SMALL), long_text]}]},
            {"model": "teacher", "messages": [{"role": "user", "content": [part(large)] * 3}]},
        )
        return [await opened.post(policy, body) for body in bodies]

    answers, *_ = talked(gateway_of, talk, max_body_mb=0.25, max_image_body_mb=1)
    assert [answer.status_code for answer in answers] == [200, 413, 413, 413, 413]
    limits = [answer.json()["error"]["message"] for answer in answers[1:]]
    assert ["max_body_mb" in limit for limit in limits] == [True, True, True, False]
    assert "max_image_body_mb" in limits[3]

    monkeypatch.setattr(gateway_images, "MAX_PIXELS", 300 * 300)
    two = [part(large), part(file_of(picture()))]

    async def many(opened, policy):
        return await opened.post(policy, {"messages": [{"role": "user", "content": two}]})

    answer, *_ = talked(gateway_of, many)
    assert answer.status_code == 400 and "send fewer" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_the_images_of_an_attempt_have_a_bounded_number_of_bytes(gateway_of):
    noise = np.random.default_rng(1).integers(0, 255, (3, 64, 64, 3), np.uint8)
    files = [file_of(Image.fromarray(pixels)) for pixels in noise]
    limit = len(files[0]) + len(files[1])

    async def talk(opened, policy):
        shown_so_far = [[part(file) for file in files[:count]] for count in (1, 2, 2, 3, 2)]
        bodies = [
            {"model": "teacher", "messages": [{"role": "user", "content": [*parts, *parts]}]}
            for parts in shown_so_far
        ]
        return [
            *[await opened.post(policy, body) for body in bodies],
            await opened.post(policy, in_form("/messages", files[2]), "/messages"),
        ]

    answers, _, policy = talked(gateway_of, talk, max_attempt_images_mb=limit / 2**20)
    assert [answer.status_code for answer in answers] == [200, 200, 200, 413, 200, 413]
    assert "max_attempt_images_mb" in answers[3].json()["error"]["message"]
    assert answers[5].json()["type"] == "error"
    assert [image.data for image in policy.remote.images.files.values()] == files[:2]


def test_a_request_has_a_bounded_number_of_images_and_few_are_decoded_at_once(monkeypatch):
    monkeypatch.setattr(gateway_images, "MAX_IMAGES", 3)
    request = RequestImages(DecodedImages())
    parts = [part(file_of(picture(colour=(n, 0, 0)))) for n in range(4)]
    for shown_part in [*parts[:3], *parts[:3]]:
        request.read(shown_part, "x")
    with pytest.raises(ImageError, match="x: the request has more than 3 images: send fewer"):
        request.read(parts[3], "x")

    decoding, most = [], []

    def read(source, where, known):
        decoding.append(where)
        most.append(len(decoding))
        time.sleep(0.01)
        decoding.pop()
        return data_images.read_image(source, where)

    monkeypatch.setattr(gateway_images, "read_image", read)
    decoded = DecodedImages()
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda n: RequestImages(decoded).read(parts[n % 4], "x"), range(24)))
    assert max(most) <= gateway_images.MAX_AT_ONCE


def test_images_count_against_the_memory_of_responses(gateway_of, monkeypatch):
    monkeypatch.setattr(memory, "MAX_CHARACTERS", 4000)
    large = file_of(picture(300, 300), "BMP")

    async def talk(opened, policy):
        answer = await opened.post(policy, in_form("/responses", large), "/responses")
        key = {"Authorization": f"Bearer {policy.api_key}"}
        name = answer.json()["id"]
        return await opened.http.get(f"{policy.base_url}/responses/{name}", headers=key)

    answer, *_ = talked(gateway_of, talk)
    assert answer.status_code == 404, "it was larger than all that is kept"


class TestTheSameTokens:
    """A client's turns have the tokens and images of the native run, by every API."""

    TEXT = "What is this?"

    @pytest.fixture
    def loaded(self):
        return SimpleNamespace(tokenizer=seeing_chat().tokenizer)

    @pytest.fixture
    def chat(self):
        return seeing_chat()

    def _turns(self, gateway_of, chat, ask):
        async def work():
            async with gateway_of(SeeingEngine(chat)) as opened:
                policy = opened.policy(context_length=4000)
                await ask(opened, policy)
                return policy.turns, list(policy.images)

        return asyncio.run(work())

    @pytest.mark.parametrize("path", FORMS)
    def test_of_a_conversation(self, gateway_of, chat, path):
        kind = "input_text" if path == "/responses" else "text"
        first, second = (in_form(path, data) for data in (PNG, SMALL))
        key = "input" if path == "/responses" else "messages"
        for body in (first, second):
            (user,) = body[key]
            user["content"] = [{"type": kind, "text": self.TEXT}, *user["content"]]

        async def by_client(opened, policy):
            history = list(first[key])
            answer = await opened.post(policy, {**first, "model": "tiny"}, path)
            assert answer.status_code == 200, answer.text
            told = answer.json()
            if path == CHAT:
                history.append(told["choices"][0]["message"])
            elif path == "/messages":
                history.append({"role": "assistant", "content": told["content"]})
            else:
                history += told["output"]

            body = {**second, "model": "tiny", key: [*history, *second[key]]}
            answer = await opened.post(policy, body, path)
            assert answer.status_code == 200, answer.text

        async def natively(opened, policy):
            messages = []
            for data in (PNG, SMALL):
                content = (TextPart(self.TEXT), policy.add_image(data))
                messages.append(Message("user", content))
                messages.append((await policy.generate(messages)).message)

        turns, images = self._turns(gateway_of, chat, by_client)
        own, own_images = self._turns(gateway_of, chat, natively)
        assert [turn.parent for turn in turns] == [None, 0] and images == own_images
        for turn, other in zip(turns, own, strict=True):
            assert turn.prompt_ids == other.prompt_ids
            assert turn.images == other.images and len(turn.images) == 1
            assert (turn.processor, turn.messages) == (other.processor, other.messages)

    def test_counted_before_they_are_asked(self, gateway_of, chat):
        async def ask(opened, policy):
            body = {**in_form("/messages", PNG), "model": "tiny"}
            counted = await opened.post(policy, body, "/messages/count_tokens")
            await opened.post(policy, body, "/messages")
            assert counted.json()["input_tokens"] == len(policy.turns[0].prompt_ids)

        self._turns(gateway_of, chat, ask)


def test_a_served_model_keeps_no_more_images_than_it_may(monkeypatch):
    """The oldest conversations go first, and an answer that is named has its images with it."""
    chat = seeing_chat()
    most = 2 * (len(PNG) + shared_session.IMAGE_OVERHEAD)
    monkeypatch.setattr(shared_session, "MAX_IMAGE_BYTES", most)
    session = shared_session.SharedSession(
        lambda: seeing_conversation(chat=chat)[0], "http://x", "key"
    )
    session.bridge = SimpleNamespace(tell=lambda *_: None)
    memory_of = session.memory

    async def ask(body):
        images = RequestImages(DecodedImages())
        request = responses.request_of(body, memory_of, images)
        request = replace(request, images=tuple(images.files.values()))
        replies = await session.complete(request, Delivery())
        return responses.answer(request, replies)["id"]

    async def work():
        images = RequestImages(DecodedImages())
        counted = anthropic_messages.counted_of(in_form("/messages", PNG), images)
        counted = replace(counted, images=tuple(images.files.values()))
        assert await session.count_tokens(counted) > 0
        assert not session.conversations[""].images.files

        bodies = [
            in_form("/responses", file_of(picture(colour=(n, 0, 0)))) for n in (250, 10, 20, 30)
        ]
        names = [await ask(body) for body in bodies]
        assert len(session._sessions) == 2
        await ask({"input": "Sure?", "previous_response_id": names[0]})

    asyncio.run(work())
