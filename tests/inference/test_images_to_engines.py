"""Images travel to engines in other processes with their bytes, and are checked there."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
from fake_engines import FakeEngine, some
from seeing_policies import picture, seeing_policy

from agentevo.config import EngineSection
from agentevo.errors import EngineError, RequestTooLongError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.inference.serving import messages
from agentevo.inference.serving.http_server import open_socket, url_of
from agentevo.inference.serving.remote import RemoteEngine
from agentevo.inference.serving.secret import RunSecret
from agentevo.inference.serving.server import EngineApp, listening
from agentevo.types import SamplingParams
from agentevo.types.images import PromptImage

PARAMS = SamplingParams(max_new_tokens=6, seed=4)


@asynccontextmanager
async def reached(engine, folder):
    """A client of the engine, behind a real socket."""
    async with AsyncExitStack() as stack:
        secret = RunSecret(folder)
        secret.value()
        listener = open_socket("127.0.0.1", 0)
        app = EngineApp(engine, name="seeing", secret=secret)
        await stack.enter_async_context(listening(app, listener))
        client = RemoteEngine([url_of(listener)], secret=secret, poll_s=0.02)
        stack.push_async_callback(client.close)
        await client.refresh()
        yield client


@pytest.mark.slow
def test_images_reach_an_engine_and_hostile_ones_are_refused(tmp_path, monkeypatch):
    policy = seeing_policy("qwen2_vl")
    engine = TorchEngine(policy.model, policy.processor.tokenizer, EngineSection())
    prompt = policy.prompt("look: ", picture(1), " and ", picture(2, 24, 48))
    first, second = prompt.images

    def ask(client, images):
        return client.generate(prompt.ids, PARAMS, deadline_s=300.0, images=images)

    async def play() -> None:
        async with reached(engine, tmp_path) as client:
            answer = await ask(client, prompt.images)
            assert policy.difference(prompt, answer) < 1e-4
            here = await engine.generate(prompt.ids, PARAMS, deadline_s=300.0, images=prompt.images)
            assert (answer.ids, answer.logprobs) == (here.ids, here.logprobs)
            scores = await client.score(
                prompt.ids, answer.ids, deadline_s=300.0, images=prompt.images
            )
            assert scores.logprobs == pytest.approx(answer.logprobs, abs=1e-5)

            forged = msgspec.structs.replace(second.file, data=first.file.data)
            with pytest.raises(EngineError, match="another SHA-256"):
                await ask(client, [first, PromptImage(second.span, forged)])
            with pytest.raises(EngineError, match="in the order"):
                await ask(client, [second, first])
            with pytest.raises(EngineError, match="outside of its images"):
                await ask(client, [first])

            monkeypatch.setattr(messages, "MAX_BYTES", 1000)
            with pytest.raises(RequestTooLongError, match="fewer or smaller images"):
                await ask(client, prompt.images)

    asyncio.run(play())


@pytest.mark.slow
def test_the_server_compares_spans_and_files_itself():
    policy = seeing_policy("qwen2_vl")
    first = policy.prompt(picture(1)).images[0]
    message = messages.Generate(
        id=1, prompt_ids=[1], sampling=PARAMS, deadline_s=1.0, images=[first]
    )
    (read,) = messages.read_requests(msgspec.msgpack.encode([message]))
    assert read == message
    without = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    del without["images"]
    (old,) = messages.read_requests(msgspec.msgpack.encode([without]))
    assert old.images == []


def test_an_engine_that_takes_no_images_is_not_given_any(tmp_path):
    policy = seeing_policy("qwen2_vl")
    prompt = policy.prompt(picture(1))

    async def play() -> None:
        async with some(tmp_path, 1, kind=FakeEngine) as (engines, client):
            with pytest.raises(EngineError, match="can't be shown images"):
                await client.generate(prompt.ids, PARAMS, deadline_s=300.0, images=prompt.images)
            assert not engines.by_name["e1"].asked

    asyncio.run(play())
