"""`rollout.transport: broadcast`: what a recipe may say, and an engine that follows it."""

from __future__ import annotations

import asyncio
import copy
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from broadcast_member import taken
from transformers import AutoConfig, AutoModelForCausalLM

from agentevo.cli.listings import LISTS
from agentevo.config import LoraSection, build_config
from agentevo.errors import ConfigError, EngineError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.inference.engine import NO_VERSION
from agentevo.inference.vllm.weights import places_of_workers
from agentevo.inference.weights.broadcast_files import BroadcastFiles
from agentevo.inference.weights.broadcast_sender import BroadcastSender
from agentevo.inference.weights.broadcast_source import BroadcastSource
from agentevo.inference.weights.transports import check_transport, distributed, remote_source
from agentevo.models.compute.adapters import add_adapter
from agentevo.models.compute.parts import Spec
from agentevo.runs.orchestration.components import load_policy
from agentevo.runs.processes.serve import VersionFollower
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

    check_transport(config(), is_separate=True)
    assert dict(LISTS["transports"]())["broadcast"].startswith("a process group")
    with pytest.raises(ConfigError, match="and this run has none"):
        check_transport(config(samplers=0), is_separate=False)
    with pytest.raises(
        ConfigError, match=r"only with rollout.transport=object_store, not broadcast"
    ):
        config(weights={"url": "file:///x"})
    with pytest.raises(ConfigError, match=r"rollout.weights.delta is for weights in files"):
        config(weights={"delta": True}, model={"dtype": "bfloat16"})

    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    with pytest.raises(ConfigError, match="needs gloo"):
        check_transport(config(), is_separate=True)


def test_workers_of_vllm_receive_what_their_checkpoint_has_alone():
    """A mixture of experts is merged when it is loaded, and parted when it is saved."""
    sizes = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32,
        "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    merged = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mixtral", num_local_experts=2, num_experts_per_tok=1, **sizes)
    )
    asked = []

    async def call(method):
        asked.append(method)
        return ["cpu", "cpu"]

    async def places(model, **changed):
        specs = {name: Spec(one.dtype, tuple(one.shape)) for name, one in model.named_parameters()}
        return await places_of_workers(call, model, specs | changed)

    assert asyncio.run(places(plain)) == ["cpu", "cpu"]
    assert asyncio.run(places(merged)) == []
    assert asyncio.run(places(add_adapter(plain, LoraSection(rank=2), seed=1))) == []

    with pytest.raises(EngineError, match=r"unknown \['what'\]"):
        asyncio.run(places(merged, what=Spec(torch.float32, (1,))))

    assert asked == ["place_of_agentevo_weights"]


@pytest.mark.slow
def test_an_engine_follows_and_refuses_once(tmp_path, small_config):
    """What can't be served is not asked for again, and the next version is."""
    made = small_config(tmp_path / "run", "engine.kv_cache_gb=0.1")
    model = load_policy(made).model
    notes = []
    sent = []

    async def work():
        engine = TorchEngine(copy.deepcopy(model), config=made.engine)
        await engine.begin(NO_VERSION)
        sender = BroadcastSender(tmp_path / "weights", model, note=sent.append)
        source = BroadcastSource(tmp_path / "weights", torch.device("cpu"))
        follower = VersionFollower(source, engine, "continue", deadline_s=300, note=notes.append)

        async def look(version):
            publishing = asyncio.ensure_future(sender.publish(version))
            async with asyncio.timeout(300):
                while source.latest_version() is None or source.latest_version().version < version:
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
            [3, 5, 8], SamplingParams(max_new_tokens=4, temperature=0), deadline_s=300
        )
        alone = await _alone(model, made, found.ids)
        assert found.ids == alone.ids and set(found.versions) == {2}
        assert follower.stats()["engine/refused_publishes"] == 1

    asyncio.run(work())
    assert sent == []
    assert [notes[0], notes[-1]] == ["serving version 0", "serving version 2"] and len(notes) == 3


def test_an_engine_that_ends_asks_no_more(tmp_path):
    """Nor does the thread that asks for it."""
    folder = tmp_path / "weights"
    notes = []
    sender = BroadcastSender(folder, torch.nn.Linear(2, 2), note=notes.append)
    engine = SimpleNamespace(version=NO_VERSION)
    source = BroadcastSource(folder, torch.device("cpu"))
    follower = VersionFollower(source, engine, "continue", deadline_s=300, note=notes.append)

    async def work():
        await sender.begin(1)
        following = asyncio.ensure_future(follower.follow(0.01))
        async with asyncio.timeout(300):
            while not list((folder / "asks").glob("*.json")):
                await asyncio.sleep(0.01)

        following.cancel()
        await asyncio.wait([following], timeout=300)
        assert following.cancelled()

    asyncio.run(work())  # which waits for the thread
    assert not list((folder / "asks").glob("*.json")) and notes == []


def test_an_engine_that_ends_as_it_is_answered_is_in_the_round(tmp_path, monkeypatch):
    """Else the others would wait for it until the round is broken off."""
    folder = tmp_path / "weights"
    notes = []
    sender = BroadcastSender(folder, torch.nn.Linear(2, 2), note=notes.append)
    source = BroadcastSource(folder, torch.device("cpu"))
    real = BroadcastFiles.take

    def take(self, asks):
        taken = real(self, asks)
        source.withdraw()
        return taken

    monkeypatch.setattr(BroadcastFiles, "take", take)
    asyncio.run(sender.begin(1))
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(taken, source)
        while not coming.done():
            asyncio.run(sender.look_after())
            time.sleep(0.01)
        assert coming.result()[0] == 1

    assert notes == []


async def _alone(model, made, ids):
    engine = TorchEngine(model, config=made.engine)
    await engine.begin(2)
    return await engine.generate(
        [3, 5, 8], SamplingParams(max_new_tokens=len(ids), temperature=0), deadline_s=300
    )
