"""vLLM keeps what every engine promises. `make test-vllm` runs this where vLLM is installed; it
takes a minute to start, so all tests share one engine."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from engine_case import PATIENCE_S, TOLERANCE, Case, sampled, told
from engine_conformance import ADAPTER_CHECKS, CHECKS, name_of
from safetensors.torch import load_file, save_file

from agentevo.config import EngineSection
from agentevo.errors import EngineError
from agentevo.inference.engines import engines
from agentevo.inference.vllm import engine as vllm_engine
from agentevo.inference.vllm.terms import engine_arguments
from agentevo.inference.vllm.weights import write_weights
from agentevo.inference.weights import broadcast_group
from agentevo.inference.weights.broadcast_sender import BroadcastSender
from agentevo.inference.weights.broadcast_source import BroadcastSource
from agentevo.runs.processes.serve import VersionFollower

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed: `make test-vllm` does that (minutes)",
    ),
]


@pytest.fixture(scope="module")
def case():
    with pytest.MonkeyPatch.context() as patch:

        def arguments(*given):
            extension = {"worker_extension_cls": "failing_loader.FailingLoader"}
            return engine_arguments(*given) | extension

        patch.setattr(vllm_engine, "engine_arguments", arguments)
        section = EngineSection(type="vllm", kv_cache_gb=0.5, max_running=16)
        made = Case.of(engines.get("vllm"), section)

    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_vllm(check, case):
    case.run(check(case))


def spoiled(damage):
    """`write_weights`, whose file is damaged before vLLM's workers read it."""

    def write(model, weights, path):
        write_weights(model, weights, path)
        damage(path)

    return write


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_a_row(path):
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][1:].contiguous()
    save_file(tensors, path)


@pytest.mark.parametrize("damage", [cut_in_half, without_a_row, Path.unlink])
def test_files_that_workers_can_not_read_change_nothing(damage, case, monkeypatch):
    async def work():
        running = await told(case, 3, sampled(max_new_tokens=300))
        with pytest.raises(EngineError, match="nothing changed: vLLM could not read version 5"):
            await case.engine.publish(5, case.new, in_flight="continue", deadline_s=PATIENCE_S)
        for found in (await running, await case.draw()):
            assert set(found.versions) == {4}
            assert case.difference(case.old, found).max() < TOLERANCE

    case.run(case.begin(4))
    monkeypatch.setattr(vllm_engine, "write_weights", spoiled(damage))
    case.run(work())


class Sending:
    """A trainer that sends weights, and a follower of the engine that asks for them."""

    def __init__(self, case, folder, version, weights):
        self.case = case
        self.notes = []
        self.sent = []
        self.model = copy.deepcopy(case.alone)
        self.model.load_state_dict(weights, strict=False)

        self.version = version
        self.sender = BroadcastSender(folder, self.model, note=self.sent.append)
        self.source = BroadcastSource(folder, torch.device("cpu"))
        self.follower = VersionFollower(
            self.source, case.engine, "continue", deadline_s=PATIENCE_S, note=self.notes.append
        )

    async def look(self):
        """Whether the engine has taken what it was sent."""
        await self.sender.publish(self.version)
        looking = asyncio.ensure_future(self.follower.look())
        async with asyncio.timeout(PATIENCE_S):
            while not looking.done():
                await self.sender.look_after()
                await asyncio.sleep(0.05)
        return looking.result()


def test_workers_receive_weights_themselves(case, tmp_path, monkeypatch):
    """No file has them, and the engine's own process reads none. What runs goes on with the new
    ones, and what comes afterwards is of them alone, also over a prompt whose keys were cached."""

    def never(*given):
        raise AssertionError("the weights went by files, or through this process")

    async def work():
        await case.begin(20)
        assert case.difference(case.old, await case.draw()).max() < TOLERANCE

        sending = Sending(case, tmp_path / "weights", 21, case.new)
        running = []
        pause = case.engine._pause

        async def pausing(*given):
            running.append(await told(case, 3, sampled(max_new_tokens=600, seed=3)))
            await pause(*given)

        monkeypatch.setattr(case.engine, "_pause", pausing)
        monkeypatch.setattr(vllm_engine, "write_weights", never)
        monkeypatch.setattr(BroadcastSource, "read", never)
        assert await sending.look()

        found = await running[0]
        assert set(found.versions) == {20, 21}

        first = found.versions.index(21)
        assert case.difference(case.old, found)[:first].max() < TOLERANCE
        assert case.difference(case.new, found)[first:].max() < TOLERANCE

        later = await case.draw()
        assert set(later.versions) == {21}
        assert case.difference(case.new, later).max() < TOLERANCE
        assert sending.sent == [] and sending.notes == ["serving version 21"]

    case.run(work())
    sizes = [path.stat().st_size for path in (tmp_path / "weights").rglob("*") if path.is_file()]
    assert sum(sizes) < sum(one.nbytes for one in case.new.values()) / 4


def test_a_round_that_fails_leaves_the_old_version_serving(case, tmp_path, monkeypatch):
    """Then what was refused is not asked for again, and what was lost is."""

    async def work():
        await case.begin(30)
        running = await told(case, 3, sampled(max_new_tokens=400))

        lost = Sending(case, tmp_path / "lost", 31, case.new)
        with monkeypatch.context() as patch:
            patch.setattr(broadcast_group, "fingerprint", lambda tensor: "0" * 32)
            assert not await lost.look()

        assert "did not arrive as they were sent" in lost.notes[0]
        assert len(lost.sent) == 1

        unfit = {**case.new, "lm_head.weight": case.new["lm_head.weight"].clone()}
        unfit["lm_head.weight"][0, 0] = float("nan")
        refused = Sending(case, tmp_path / "refused", 31, unfit)
        assert not await refused.look()
        assert "weights refused, nothing changed" in refused.notes[0]
        assert "lm_head.weight holds NaN" in refused.notes[0]
        assert not await refused.follower.look() and len(refused.notes) == 1

        for found in (await running, await case.draw()):
            assert set(found.versions) == {30}
            assert case.difference(case.old, found).max() < TOLERANCE
        assert await lost.look()

        found = await case.draw()
        assert set(found.versions) == {31}
        assert case.difference(case.new, found).max() < TOLERANCE

    case.run(work())


def test_each_of_several_workers_receives(tmp_path, monkeypatch):
    """Tensor parallelism: a worker has a part of each layer, and receives all of the weights."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    options = {"tensor_parallel_size": 2}
    section = EngineSection(type="vllm", kv_cache_gb=0.25, max_running=8, options=options)
    two = Case.of(engines.get("vllm"), section)

    async def work():
        await two.begin(1)
        sending = Sending(two, tmp_path / "weights", 2, two.new)
        assert await sending.look()

        specs = sending.source.specs(sending.source.latest_version())
        assert await two.engine.places(specs) == ["cpu", "cpu"]
        found = await two.draw()
        assert set(found.versions) == {2}
        assert two.difference(two.new, found).max() < TOLERANCE

    try:
        two.run(work())
    finally:
        two.close()


def test_a_load_that_fails_halfway_never_serves(case):
    """The last test: the engine is no good afterwards."""

    async def work():
        await case.begin(8)
        running = await told(case, 3, sampled(max_new_tokens=800))
        await case.engine._llm.collective_rpc("fail_in_the_next_load")

        with pytest.raises(EngineError, match="may hold a part of it"):
            await case.engine.publish(9, case.new, in_flight="continue", deadline_s=PATIENCE_S)
        with pytest.raises(EngineError, match="may hold a part of it"):
            await running

        for later in (case.draw(), case.engine.begin(1, case.old), case.engine.forget_cache()):
            with pytest.raises(EngineError, match="may hold a part of it"):
                await later

        with pytest.raises(EngineError, match="may hold a part of it"):
            case.engine.check()

    case.run(work())


@pytest.fixture(scope="module")
def adapted():
    section = EngineSection(type="vllm", kv_cache_gb=0.5, max_running=16)
    made = Case.of(engines.get("vllm"), section, rank=4, targets=["q_proj", "v_proj", "down_proj"])
    yield made
    made.close()


@pytest.mark.parametrize("check", ADAPTER_CHECKS, ids=name_of)
def test_vllm_with_an_adapter(check, adapted):
    adapted.run(check(adapted))
