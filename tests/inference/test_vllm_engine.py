"""vLLM keeps what every engine promises. `make test-vllm` runs this where vLLM is installed; it
takes a minute to start, so all tests share one engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from engine_case import PATIENCE_S, TOLERANCE, Case, sampled, told
from engine_conformance import ADAPTER_CHECKS, CHECKS, name_of
from safetensors.torch import load_file, save_file

from agentevo.config import EngineSection
from agentevo.errors import EngineError
from agentevo.inference import vllm_engine
from agentevo.inference.engines import engines
from agentevo.inference.vllm_weights import write_weights
from agentevo.inference.vllm_words import engine_arguments

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
