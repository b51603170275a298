"""What a sequence gets does not depend on its company, to the last bit: float32 on an x86 CPU."""

from __future__ import annotations

import asyncio
import copy
import random

import pytest
import torch
from slow import slow, soak

from agentevo.config import EngineSection
from agentevo.errors import EngineError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute import cpu_kernels, linear
from agentevo.models.compute.attention import Aligned
from agentevo.types import SamplingParams

pytestmark = pytest.mark.skipif(not linear.available(), reason="another library multiplies here")

ARCHITECTURES = ["llama", "gemma2", *soak("qwen2", "qwen3", "phi3", "mistral", "gemma3")]
WIDE = [
    "granite-swa-wide",
    *soak("llama-wide", "granite-swa", "qwen3-wide", "mistral-wide", "phi3-wide"),
]


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 97) for _ in range(length)]


LONG = prompt_of(290, 1)
"""Longer than a stretch of sums."""
PROMPTS = [
    *[prompt_of(40, 2)] * 3,
    *[[*prompt_of(40, 2), *prompt_of(n, n)] for n in (1, 9, 20)],
    *[LONG] * 3,
    *[[*LONG[:257], *prompt_of(n, n)] for n in (1, 30)],
    *[[*LONG[:256], *prompt_of(n, 50 + n)] for n in (2, 3)],
    *[prompt_of(n, 100 + n) for n in (1, 2, 5, 15, 16, 17, 33, 300, 700)],
]
"""Equal prompts, common beginnings that are copied (under 128 tokens) and referred to, and some
that share nothing."""
PARAMS = [
    SamplingParams(temperature=0.5 + 0.25 * (index % 4), max_new_tokens=3 + index % 5, seed=index)
    for index in range(len(PROMPTS))
]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ARCHITECTURES, *WIDE])
def test_alone_and_in_company(name, random_model, complete):
    _compare_alone_and_in_company(random_model(name).model, complete)


@pytest.mark.slow
def test_alone_and_in_company_without_kernels_of_our_own(random_model, complete, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "_load_kernels", lambda: (None, "left out", ""))
    _compare_alone_and_in_company(random_model("llama").model, complete)


def _compare_alone_and_in_company(model, complete):
    alone = [
        complete(TorchEngine(model), [prompt], [params])[0]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    for section in (
        EngineSection(),
        EngineSection(prefix_sharing=False, prefill_tokens=48),
        EngineSection(kv_cache_tokens=1600, max_running=5, prefill_tokens=100),
    ):
        together = complete(TorchEngine(model, config=section), PROMPTS, PARAMS)
        for prompt, one, other in zip(PROMPTS, alone, together, strict=True):
            assert one.ids == other.ids, len(prompt)
            assert one.logprobs == other.logprobs, (section, len(prompt))


@pytest.mark.slow
def test_a_conversation_beside_others(random_model):
    """Turns of a session, whose cache is kept, dropped when memory is short, and dropped by new
    weights; against the same turns asked one by one."""
    model = random_model("llama").model

    async def converse(engine, index, session):
        context = prompt_of(30, index)
        said = []
        for turn in range(3):
            params = SamplingParams(max_new_tokens=5 + index, seed=10 * index + turn)
            one = await engine.generate(context, params, session=session, deadline_s=300)
            said.append((one.ids, one.logprobs))
            context = [*context, *one.ids, *prompt_of(3 + 40 * index, turn)]

        return said

    async def together(engine):
        return await asyncio.gather(*(converse(engine, n, f"s{n}") for n in range(5)))

    async def interrupted(engine):
        talk = asyncio.create_task(together(engine))
        for version in (1, 2):
            for _ in range(40):
                await asyncio.sleep(0)
            await engine.publish(version, in_flight="continue")
        return await talk

    small = EngineSection(kv_cache_tokens=768, prefill_tokens=32)
    alone = [asyncio.run(converse(TorchEngine(model), n, None)) for n in range(5)]
    assert asyncio.run(together(TorchEngine(model))) == alone
    assert asyncio.run(together(TorchEngine(model, config=small))) == alone
    assert asyncio.run(interrupted(TorchEngine(model))) == alone


@pytest.mark.slow
@pytest.mark.usefixtures("with_and_without_kernels")
@pytest.mark.parametrize("threads", [2, *soak(1, 3)])
@pytest.mark.parametrize(
    "shape", [(64, 192), (100, 130), *slow((2200, 64)), *soak((576, 640), (1536, 576))]
)
def test_a_row_of_a_product_does_not_depend_on_the_others(shape, threads):
    num_inputs, num_outputs = shape
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight = torch.randn(num_outputs, num_inputs)
        bias = torch.randn(num_outputs)
        packed = linear.PackedMatrix(weight, bias)
        x = torch.randn(130, num_inputs)
        other = torch.randn(130, num_outputs)
        with torch.no_grad():
            for kind in (
                packed.product,
                lambda rows: packed.product(rows, "swish"),
                lambda rows: packed.product_plus(rows, other[: len(rows)]),
                lambda rows: packed.product_times(rows, other[: len(rows)]),
            ):
                whole = kind(x)
                for count in (1, 2, 3, 16, 17, 64, 129):
                    assert torch.equal(kind(x[:count]), whole[:count]), count

            scaled = x * torch.logspace(-20, 4, len(x))[:, None]
            for activation in ("none", "swish"):
                alone = [packed.product(row[None], activation) for row in scaled]
                assert torch.equal(torch.cat(alone), packed.product(scaled, activation))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("function", [torch.nn.SiLU(), torch.nn.GELU(approximate="tanh")])
def test_a_number_of_an_activation_does_not_depend_on_its_place(function, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(400, 300) * 3
        with torch.no_grad():
            whole = Aligned(function)(x)
            assert torch.allclose(whole, function(x), atol=1e-6)
            for start, count in ((0, 1), (5, 1), (3, 7), (100, 111), (1, 399)):
                part = Aligned(function)(x[start : start + count])
                assert torch.equal(part, whole[start : start + count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_where_company_matters_it_can_be_refused(random_model):
    strict = EngineSection(batch_invariant=True)
    for name in ("llama", "qwen3", "gemma2", "mistral"):
        TorchEngine(random_model(name).model, config=strict)

    with pytest.raises(EngineError, match=r"batch_invariant: .*\(Mixtral.*has its own way"):
        TorchEngine(random_model("mixtral").model, config=strict)

    half = copy.deepcopy(random_model("llama").model).to(torch.bfloat16)
    with pytest.raises(EngineError, match="only float32"):
        TorchEngine(half, config=strict)


@pytest.mark.slow
def test_a_version_that_is_kept_serves_on_beside_newer_ones(random_model):
    """The same tokens as before the newer ones came, also from a cached prefix; and a conversation
    across a publish stays with its version."""
    model = copy.deepcopy(random_model("llama").model)
    engine = TorchEngine(model)
    prompt = prompt_of(40, 1)
    params = [SamplingParams(max_new_tokens=9, seed=seed) for seed in range(4)]

    def ask(asked, seed):
        return asked.generate(prompt, params[seed], deadline_s=300)

    async def change(version):
        engine.keep(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        await engine.publish(version, in_flight="continue")

    async def work():
        before = [await ask(engine.serving(0), seed) for seed in range(4)]
        across = [asyncio.create_task(ask(engine.serving(0), seed)) for seed in range(4)]
        while not engine.scheduler.running:
            await asyncio.sleep(0)

        for _ in range(12):
            await asyncio.sleep(0)

        await change(1)
        assert await asyncio.gather(*across) == before

        newest = await ask(engine, 0)
        await change(2)
        beside = [ask(engine.serving(seed % 3), seed) for seed in range(4)]
        beside = await asyncio.gather(*beside)
        assert (beside[0], beside[3]) == (before[0], before[3])
        assert [one.versions[0] for one in beside] == [0, 1, 2, 0]
        assert await ask(engine.serving(1), 0) == newest != before[0]

        await change(3)
        assert (await ask(engine.serving(0), 0)).versions == [1] * 9, "the oldest that is there"

    asyncio.run(work())
