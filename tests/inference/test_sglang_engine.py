"""An SGLang server by its URL: what goes wrong on its way, and what is refused before."""

from __future__ import annotations

import asyncio
import copy
import socket
from contextlib import asynccontextmanager

import pytest
import sglang_server
from engine_case import Case, sampled, told

from agentevo.config import EngineSection
from agentevo.errors import ConfigError, EngineError
from agentevo.inference.engines import engines
from agentevo.inference.sglang.options import read_options
from agentevo.models.token_rows import ban_tokens


@asynccontextmanager
async def by_url(tmp_path, monkeypatch, *, admin: str | None = "control"):
    """(case, server): an engine at the URL of a server in this event loop, begun at version 1."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    monkeypatch.setenv("ENGINE_KEY", "plain")
    monkeypatch.setenv("ENGINE_ADMIN", "control")
    options = {"url": f"http://127.0.0.1:{port}", "api_key": "${env:ENGINE_KEY}"}
    options |= {"admin_api_key": "${env:ENGINE_ADMIN}"}
    case = Case.of(engines.get("sglang"), EngineSection(type="sglang", options=options))
    case.alone.save_pretrained(tmp_path / "base")
    case.tokenizer.save_pretrained(tmp_path / "base")

    server = sglang_server.Sglang(tmp_path / "base", api_key="plain", admin=admin)
    serving = asyncio.ensure_future(sglang_server.serve(server, port))
    try:
        await case.begin()
        yield case, server
    finally:
        await case.engine.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.slow
def test_a_load_that_fails_halfway_is_undone_and_one_that_can_not_be_serves_nothing(
    tmp_path, monkeypatch
):
    async def play():
        async with by_url(tmp_path, monkeypatch) as (case, server):
            running = await told(case, 2, sampled(max_new_tokens=60))
            server.fail_loads = 1
            with pytest.raises(EngineError, match="on purpose"):
                await case.engine.publish(2, case.new, in_flight="continue")

            for found in (await running, await case.draw()):
                assert set(found.versions) == {1}
                assert case.difference(case.old, found).max() < 1e-4

            running = await told(case, 2, sampled(max_new_tokens=900))
            server.fail_loads = 2
            with pytest.raises(EngineError, match="on purpose"):
                await case.engine.publish(2, case.new, in_flight="continue")

            for asked in (running, case.draw()):
                with pytest.raises(EngineError, match="incomplete weights"):
                    await asked

            with pytest.raises(EngineError, match="incomplete weights"):
                case.engine.check()

            await case.engine.publish(2, case.new)
            case.engine.check()
            found = await case.draw()
            assert found.versions == [2] * 24
            assert case.difference(case.new, found).max() < 1e-4

    asyncio.run(play())


@pytest.mark.slow
def test_nothing_is_served_over_keys_and_values_of_other_weights(tmp_path, monkeypatch):
    """The server's flush is what keeps them out: with one that does nothing the same test sees
    them."""

    async def play():
        async with by_url(tmp_path, monkeypatch) as (case, server):
            for version, flushes in ((2, True), (3, False)):
                server.flushes = True
                await case.engine.begin(version - 1, case.old)

                running = await told(case, 5, sampled(max_new_tokens=60))
                await case.draw(sampled(seed=1))

                server.flushes = flushes
                await case.engine.publish(version, case.new, in_flight="continue")

                fresh = await case.draw(sampled(seed=9))
                found = await running
                before = found.versions.count(version - 1)
                rest = case.difference(case.new, found)[before:].max()
                other = case.difference(case.new, fresh).max()
                assert (max(rest, other) < 1e-4) == flushes

    asyncio.run(play())


@pytest.mark.slow
def test_weights_of_somebody_else_are_never_a_version(tmp_path, monkeypatch):
    async def play():
        async with by_url(tmp_path, monkeypatch) as (case, server):
            server.label = "default"  # as of a server that was started anew
            with pytest.raises(EngineError, match="has not loaded"):
                await case.draw()

    asyncio.run(play())


@pytest.mark.slow
def test_a_wrong_key_is_said(tmp_path, monkeypatch):
    async def play():
        with pytest.raises(EngineError, match="admin_api_key"):
            async with by_url(tmp_path, monkeypatch, admin="another"):
                pass

    asyncio.run(play())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "http://gpu-1:30000"}, "unencrypted"),
        ({"url": "https://gpu-1:30000"}, "api_key"),
        ({"url": "https://gpu-1:30000", "api_key": "${env:K}"}, "weights_folder"),
        ({"url": "gpu-1"}, "not the URL"),
        ({"url": "http://127.0.0.1:1", "args": ["--tp-size", "2"]}, "leave out url"),
        ({"api_key": "${env:K}"}, "need a url"),
        ({"urll": "http://127.0.0.1:1"}, "did you mean url"),
    ],
)
def test_what_can_not_be_used_is_refused_before_anything_starts(options, reason):
    with pytest.raises(ConfigError, match=reason):
        read_options(EngineSection(type="sglang", options=options))


def test_a_model_that_sees_is_refused(loaded):
    """SGLang would sample tokens that stand for images, to which the trainer gives no
    probability."""
    model = copy.deepcopy(loaded.model)
    ban_tokens(model, [3])
    section = EngineSection(type="sglang", options={"url": "http://127.0.0.1:1"})
    with pytest.raises(ConfigError, match=r"set model\.vision\.images=false"):
        engines.get("sglang")(model, loaded.tokenizer, section)
