"""Engines that share no folder with the run: reached by URL alone, with a secret that every process
has in its environment."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from engine_door import CountingEngine
from fake_engines import Engines

from agentevo.errors import ConfigError, EngineUnavailableError
from agentevo.inference.serving.certificate import RunCertificate
from agentevo.inference.serving.directory import EngineDirectory
from agentevo.inference.serving.http_server import open_socket, url_of
from agentevo.inference.serving.remote import RemoteEngine
from agentevo.inference.serving.secret import RunSecret
from agentevo.inference.serving.server import EngineApp, listening
from agentevo.types import SamplingParams

NAME = "ENGINE_SECRET"
REFERENCE = "${env:ENGINE_SECRET}"
SECRET = "5e" * 32
PARAMS = SamplingParams(max_new_tokens=4)


@pytest.mark.slow
@pytest.mark.parametrize("secret", [SECRET, "6f" * 32])
def test_an_engine_elsewhere_serves_beside_the_announced_ones_to_who_has_the_secret(
    tmp_path, monkeypatch, secret
):
    pytest.importorskip("cryptography")
    monkeypatch.setenv(NAME, SECRET)
    there = tmp_path / "there"
    here = tmp_path / "here"

    async def play():
        async with AsyncExitStack() as stack:
            far = CountingEngine()
            door = EngineApp(far, name="far", secret=RunSecret(there, REFERENCE))
            listener = open_socket("127.0.0.1", 0)
            tls, fingerprint = RunCertificate(there).server_context()
            await stack.enter_async_context(listening(door, listener, tls=tls))
            url = f"{url_of(listener, encrypted=True)}#sha256={fingerprint}"
            monkeypatch.setenv(NAME, secret)  # as this machine has it

            client = RemoteEngine(
                EngineDirectory(here), also=[url], secret=RunSecret(here, REFERENCE), poll_s=0.02
            )
            stack.push_async_callback(client.close)
            monkeypatch.setenv(NAME, secret if secret == SECRET else SECRET)

            if secret != SECRET:
                client._secret = RunSecret(here)  # a file of its own, which is another secret
                with pytest.raises(EngineUnavailableError):
                    await client.generate([7], PARAMS, deadline_s=1.0)
                assert far.asked == []
                return

            found = await client.generate([7], PARAMS, deadline_s=300.0)
            assert found.ids == [7] and far.asked == [7]

    asyncio.run(play())
    assert not (there / "secret").exists()


def test_announced_engines_and_those_by_url_are_known_together(tmp_path):
    async def play():
        async with AsyncExitStack() as stack:
            engines = Engines(tmp_path, stack)
            await engines.start(1)

            secret = RunSecret(tmp_path)
            door = EngineApp(CountingEngine(), name="far", secret=secret)
            listener = open_socket("127.0.0.1", 0)
            await stack.enter_async_context(listening(door, listener))
            client = RemoteEngine(
                EngineDirectory(tmp_path), also=[url_of(listener)], secret=secret, poll_s=0.02
            )
            stack.push_async_callback(client.close)

            async with asyncio.timeout(300):
                while client.stats()["engine/engines"] < 2:
                    await client.refresh()
                    await asyncio.sleep(0.02)

    asyncio.run(play())


def test_a_secret_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    with pytest.raises(ConfigError, match=f"{NAME} holds no key"):
        RunSecret(tmp_path, REFERENCE).check()

    monkeypatch.setenv(NAME, "short")
    with pytest.raises(ConfigError, match="64"):
        RunSecret(tmp_path, REFERENCE).value()
    with pytest.raises(ConfigError, match=r"env:NAME"):
        RunSecret(tmp_path, SECRET).check()

    assert list(tmp_path.iterdir()) == []
