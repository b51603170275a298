"""`rollout.transport: broadcast`: what a recipe may say, and an engine that follows it."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from agentevo.config import build_config
from agentevo.errors import ConfigError
from agentevo.inference.broadcast_sender import BroadcastSender
from agentevo.inference.broadcast_source import BroadcastSource
from agentevo.inference.engine import NO_VERSION
from agentevo.inference.torch_engine import TorchEngine
from agentevo.inference.transports import check_transport, distributed, remote_source
from agentevo.listings import LISTS
from agentevo.orchestration.components import load_policy
from agentevo.processes.serve import Follower
from agentevo.types import SamplingParams


def config(*, model=None, **rollout):
    return build_config(
        {
            "environment": {"type": "coins"},
            "model": {"name": "tiny"} | (model or {}),
            "rollout": {"samplers": 1, "transport": "broadcast"} | rollout,
        }
    )


def test_the_recipe_chooses_it(monkeypatch):
    assert isinstance(remote_source(config()), BroadcastSource)
    check_transport(config(), apart=True)
    assert dict(LISTS["transports"]())["broadcast"].startswith("a process group")
    with pytest.raises(ConfigError, match="and this run has none"):
        check_transport(config(samplers=0), apart=False)
    with pytest.raises(ConfigError, match=r"is for rollout.transport=object_store, not broadcast"):
        config(weights={"url": "file:///x"})
    with pytest.raises(ConfigError, match=r"rollout.weights.delta is for weights in files"):
        config(weights={"delta": True}, model={"dtype": "bfloat16"})
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    with pytest.raises(ConfigError, match="needs gloo"):
        check_transport(config(), apart=True)


def test_an_engine_follows_and_refuses_once(tmp_path, small_config):
    """What can't be served is not asked for again, and the next version is."""
    made = small_config(tmp_path / "run", "engine.kv_cache_gb=0.1")
    model = load_policy(made).model
    notes, sent = [], []

    async def work():
        engine = TorchEngine(copy.deepcopy(model), config=made.engine)
        await engine.begin(NO_VERSION)
        sender = BroadcastSender(tmp_path / "weights", model, note=sent.append)
        source = BroadcastSource(tmp_path / "weights", torch.device("cpu"))
        follower = Follower(source, engine, "continue", deadline_s=60, note=notes.append)

        async def look(version):
            publishing = asyncio.ensure_future(sender.publish(version))
            async with asyncio.timeout(60):
                while source.announced() is None or source.announced().version < version:
                    await asyncio.sleep(0.01)
                looking = asyncio.ensure_future(follower.look())
                while not looking.done():
                    await publishing
                    await sender.look_after()
                    await asyncio.sleep(0.01)
            return looking.result()

        assert await look(0) and engine.version == 0
        weight = model.get_input_embeddings().weight.data
        before = weight.clone()
        weight[0, 0] = float("nan")
        assert not await look(1)
        assert not await follower.look(), "refused, and not asked for again"
        assert engine.version == 0 and "holds NaN" in notes[1]
        weight.copy_(2 * before)
        assert await look(2)
        found = await engine.generate(
            [3, 5, 8], SamplingParams(max_new_tokens=4, temperature=0), deadline_s=60
        )
        alone = await _alone(model, made, found.ids)
        assert found.ids == alone.ids and set(found.versions) == {2}
        assert follower.stats()["engine/refused_publishes"] == 1

    asyncio.run(work())
    assert sent == []
    assert [notes[0], notes[-1]] == ["serving version 0", "serving version 2"] and len(notes) == 3


async def _alone(model, made, ids):
    engine = TorchEngine(model, config=made.engine)
    await engine.begin(2)
    return await engine.generate(
        [3, 5, 8], SamplingParams(max_new_tokens=len(ids), temperature=0), deadline_s=60
    )
