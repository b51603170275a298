"""Engines and weight transports that other packages bring by entry point."""

from __future__ import annotations

import asyncio
import copy
import importlib.metadata

import numpy as np
import pytest
import safetensors.torch
import torch
from slow import soak

from agentevo.api import train
from agentevo.cli.listings import LISTS
from agentevo.config import EngineSection
from agentevo.errors import ConfigError, EngineError, UnknownNameError
from agentevo.inference.embedded.sampling import draw
from agentevo.inference.engine import NO_VERSION
from agentevo.inference.engines import engines
from agentevo.inference.weights.weight_transport import WeightTransport, transports
from agentevo.models.compute.parameters import trained_weights
from agentevo.runs.folder.run_folder import read_store
from agentevo.runs.processes.learn import learn
from agentevo.runtime import registry
from agentevo.types import Completion

pytestmark = pytest.mark.slow

SHORT = (
    "trainer.steps=2",
    "trainer.groups_per_step=2",
    "cold_start.episodes=8",
    "evaluation.every=0",
    "checkpoint.every=0",
)


class OneByOne:
    """Completes one request after the other, without a cache, on weights of its own."""

    def __init__(self, model, tokenizer, section):
        self.own = copy.deepcopy(model)
        self.version = NO_VERSION
        self.served = []
        self.own.set_attn_implementation("sdpa")
        made.append(self)

    async def begin(self, version, weights=None, *, deadline_s=60.0):
        self.version = version
        self.served.append(version)
        self.own.load_state_dict(weights or {}, strict=False)

    def verify(self, weights):
        return weights

    async def publish(self, version, weights=None, *, in_flight="finish", deadline_s=60.0):
        await self.begin(version, weights)

    async def generate(self, prompt_ids, sampling, *, session=None, deadline_s, listen=None):
        random = np.random.Generator(np.random.Philox(key=sampling.seed & (2**64 - 1)))
        ids = []
        logprobs = []
        reason = "length"
        while len(ids) < sampling.max_new_tokens and reason == "length":
            with torch.no_grad():
                logits = self.own(input_ids=torch.tensor([prompt_ids + ids])).logits[0, -1:]
            (token,), (logprob,) = draw(logits, [sampling], [float(random.random())])
            ids = [*ids, token]
            logprobs = [*logprobs, logprob]
            reason = "stop" if token in sampling.stop_token_ids else "length"

        return Completion(
            ids=ids, logprobs=logprobs, versions=[self.version] * len(ids), finish_reason=reason
        )

    async def release(self, session): ...
    async def forget_cache(self): ...
    async def close(self):
        self.served.append("closed")

    def check(self): ...
    def stats(self):
        return {}


made: list[OneByOne] = []


class ThroughBytes:
    """Serialises the weights, as something that leaves the process would."""

    def __init__(self, model, engine, config, note):
        self.model = model
        self.engine = engine
        assert engine.model is not model, "the engine has weights of its own"

    def _weights(self):
        return safetensors.torch.load(safetensors.torch.save(trained_weights(self.model)))

    async def begin(self, version):
        await self.engine.begin(version, self._weights())

    async def publish(self, version):
        await self.engine.publish(version, self._weights())

    async def look_after(self): ...


THROUGH_BYTES = WeightTransport("safetensors in memory", ThroughBytes)


@pytest.fixture
def installed(monkeypatch):
    """A package with an engine and a transport is installed."""
    points = [
        importlib.metadata.EntryPoint("one_by_one", f"{__name__}:OneByOne", "agentevo.engines"),
        importlib.metadata.EntryPoint("bytes", f"{__name__}:THROUGH_BYTES", "agentevo.transports"),
    ]
    monkeypatch.setattr(
        registry,
        "installed_points",
        lambda group: [point for point in points if point.group == group],
    )
    for known in (engines, transports):
        monkeypatch.setattr(known, "_items", dict(known._items))

    made.clear()


@pytest.fixture(scope="module")
def embedded(tmp_path_factory, small_config, quiet_view):
    """What a run with the embedded engine is made of."""
    return attempts(
        train(small_config(tmp_path_factory.mktemp("e") / "run", *SHORT), view=quiet_view())
    )


def attempts(run):
    """[(id, [(ids, log-probs, versions) of each turn])] of a run, in order."""

    async def read(store):
        return {
            trajectory.trajectory.id: [
                (turn.completion_ids, turn.logprobs, turn.versions)
                for turn in trajectory.trajectory.turns
            ]
            async for trajectory in store.trajectories()
        }

    assert run.audit().violations == []
    return sorted(read_store(run.config.run_dir, read).items())


def test_a_run_trains_with_an_engine_of_another_package(
    installed, tmp_path, small_config, quiet_view, embedded
):
    """It draws the tokens that the embedded engine draws: nothing else of an engine is asked for.
    Without a model that it shares, it is handed what was trained."""
    config = small_config(tmp_path / "run", *SHORT, "engine.type=one_by_one")
    found = attempts(train(config, view=quiet_view()))
    assert [name for name, _ in found] == [name for name, _ in embedded]

    for (_, turns), (_, theirs) in zip(found, embedded, strict=True):
        assert [(ids, versions) for ids, _, versions in turns] == [
            (ids, versions) for ids, _, versions in theirs
        ]
        for (_, logprobs, _), (_, others, _) in zip(turns, theirs, strict=True):
            assert np.allclose(logprobs, others, atol=1e-4)

    assert made[0].served == [0, 0, 1, 2, "closed"]
    assert {name for name, _ in LISTS["engines"]()} == {"one_by_one", "sglang", "torch", "vllm"}


@pytest.mark.parametrize("beside", [(), *soak(("rollout.staleness=1", "rollout.sharing=overlap"))])
def test_a_run_trains_with_a_transport_of_another_package(
    installed, tmp_path, small_config, quiet_view, embedded, beside
):
    config = small_config(tmp_path / "run", *SHORT, "rollout.transport=bytes", *beside)
    found = attempts(train(config, view=quiet_view()))
    assert beside or found == embedded
    versions = {version for _, turns in found for turn in turns for version in turn[2]}
    assert {0, 2} <= versions <= {0, 1, 2}
    assert ("bytes", "safetensors in memory") in LISTS["transports"]()


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["engine.type=torhc"], "no engine is called 'torhc': did you mean 'torch'"),
        (
            ["engine.type=vllm", "engine.options={tensor_paralel_size: 2}"],
            "engine.options.tensor_paralel_size.* mean tensor_parallel_size",
        ),
        (["engine.type=vllm", "engine.options={dtype: int4}"], "engine.options.dtype: got 'int4'"),
        (["engine.type=vllm", "engine.batch_invariant=true"], "engine.batch_invariant: vLLM"),
        (["rollout.transport=bites"], "did you mean 'bytes'"),
        (["rollout.transport=folder"], "for engines in other processes, and this run has none"),
        (["rollout.transport=copy", "rollout.samplers=1"], "does not reach engines in other proc"),
        (
            ["rollout.transport=shared", "rollout.sharing=overlap", "rollout.staleness=1"],
            "needs weights of its own",
        ),
    ],
)
def test_what_can_not_work_is_refused_before_anything_is_created(
    overrides, reason, installed, tmp_path, small_config, quiet_view
):
    with pytest.raises(ConfigError, match=reason) as refusal:
        train(small_config(tmp_path / "run", *overrides), view=quiet_view())
    assert isinstance(refusal.value, UnknownNameError) == ("did you mean" in reason)
    assert not (tmp_path / "run").exists()


def test_a_trainer_alone_needs_a_transport_that_leaves_the_process(
    tmp_path, small_config, quiet_view
):
    with pytest.raises(ConfigError, match="copy does not reach engines in other processes"):
        learn(small_config(tmp_path / "run", "rollout.transport=copy"), view=quiet_view())
    assert not (tmp_path / "run").exists()


def test_an_engine_that_can_not_sleep_or_share_is_refused_where_it_would_have_to(
    installed, tmp_path, small_config, quiet_view
):
    for overrides, reason in (
        (["rollout.staleness=1"], "can't sleep while the trainer computes"),
        (["rollout.transport=shared"], "does not compute with the trainer's own model"),
    ):
        config = small_config(
            tmp_path / "run", *SHORT, "engine.type=one_by_one", "run.overwrite=true", *overrides
        )
        with pytest.raises(ConfigError, match=reason):
            train(config, view=quiet_view())

    assert [one.served[-1] for one in made] == ["closed", "closed"]


def test_the_embedded_engine_begins_with_weights_that_it_is_given(loaded):
    """Also under a lower version than before; what does not fit changes nothing."""
    engine = engines.get("torch")(loaded.model, loaded.tokenizer, EngineSection())
    before = {
        name: trained_weight.clone()
        for name, trained_weight in trained_weights(loaded.model).items()
    }
    doubled = {name: 2 * one for name, one in before.items()}
    asyncio.run(engine.begin(7, doubled))

    assert engine.version == 7
    assert all(
        torch.equal(trained_weight, doubled[name])
        for name, trained_weight in trained_weights(engine.model).items()
    )

    asyncio.run(engine.begin(3, before))
    assert engine.version == 3
    with pytest.raises(EngineError, match="missing"):
        asyncio.run(engine.begin(4, dict(list(before.items())[1:])))

    assert engine.version == 3
    assert all(
        torch.equal(trained_weight, before[name])
        for name, trained_weight in trained_weights(engine.model).items()
    )
