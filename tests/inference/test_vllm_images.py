"""vLLM with images: the tokens and pixels are those of training, and so are the log-probs. Where
vLLM is installed (`make test-vllm`), it draws; it takes minutes to start, so the tests share an
engine."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from seeing_policies import SeeingPolicy, SeenPrompt, picture, seeing_policy

from agentevo.config import EngineSection, LoraSection
from agentevo.errors import ConfigError, EngineError, MissingExtraError
from agentevo.inference.engine import why_text_only
from agentevo.inference.engines import check_model, engines
from agentevo.inference.vllm import images as vllm_images
from agentevo.inference.vllm import models
from agentevo.inference.vllm.images import check_expanded, collapse
from agentevo.models.compute.adapters import add_adapter
from agentevo.training.batching.images import ImageProvider
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import Completion, Sample, SamplingParams
from agentevo.types.image_span import ImageSpan
from agentevo.types.images import PromptImage

needs_vllm = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("vllm", "torchvision"))),
        reason="vLLM is not installed: `make test-vllm` does that (minutes)",
    ),
]
EXACT = 1e-3
PATIENCE_S = 600.0
RED = picture(1)
BLUE = picture(2)
TALL = picture(3, 24, 48)
WIDE = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
    },
}
"""Heads of a size that vLLM computes on a CPU."""
VLLM = EngineSection(type="vllm", kv_cache_gb=0.5, max_running=8)


def span(offset: int, length: int) -> ImageSpan:
    return ImageSpan(offset, length, (1, 2, 2 * length), "0" * 64)


@pytest.mark.parametrize(
    ("ids", "spans", "expected"),
    [
        ([1, 2, 3], [], [1, 2, 3]),
        ([9, 9, 9, 9], [span(0, 4)], [9]),
        ([1, 9, 9, 2, 9, 3], [span(1, 2), span(4, 1)], [1, 9, 2, 9, 3]),
        ([9, 9, 9, 9, 9], [span(0, 2), span(2, 3)], [9, 9]),
        ([1, 9, 5, 9, 2], [span(1, 3)], [1, 9, 2]),
    ],
)
def test_a_span_becomes_one_placeholder(
    ids: list[int], spans: list[ImageSpan], expected: list[int]
) -> None:
    assert collapse(ids, spans) == expected


def test_other_ids_than_the_prompts_are_refused() -> None:
    check_expanded([1, 9, 9, 2], (1, 9, 9, 2))
    with pytest.raises(EngineError, match=r"as 3 tokens, and training as 4: token 2 is 2 .* 9"):
        check_expanded([1, 9, 9, 2], [1, 9, 2])
    with pytest.raises(EngineError, match=r"as 3 tokens, and training as 2: token 2 is 7 .* None"):
        check_expanded([1, 2], [1, 2, 7])
    with pytest.raises(EngineError, match=r"as 2 tokens, and training as 2: token 1 is 3 .* 2"):
        check_expanded([1, 2], [1, 3])


@pytest.mark.slow
def test_models_that_vllm_can_not_show_images_are_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert why_text_only(VLLM) == ""
    qwen = seeing_policy("qwen2_vl")
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install torchvision"):
        check_model(VLLM, qwen.model)

    monkeypatch.setattr(models, "find_spec", lambda name: object())
    check_model(VLLM, qwen.model)

    other = seeing_policy("idefics3").model
    check_model(EngineSection(), other)
    with pytest.raises(ConfigError, match=r"family idefics3: set model.vision.images=false"):
        check_model(VLLM, other)

    language = add_adapter(qwen.alone, LoraSection(rank=2, targets=["q_proj"]), seed=1)
    check_model(VLLM, language)
    tower = seeing_policy("qwen2_vl").alone
    tower = add_adapter(tower, LoraSection(rank=2, targets=["q_proj", "tower"]), seed=1)
    with pytest.raises(ConfigError, match=r"adapters in the tower or projector .*\(model.lora\)"):
        check_model(VLLM, tower)


class Seeing(NamedTuple):
    policy: SeeingPolicy
    engine: Any
    runner: asyncio.Runner

    async def ask(self, prompt: SeenPrompt, *, images: Any = None, **sampling: Any) -> Completion:
        params = SamplingParams(**{"max_new_tokens": 10, "seed": 3} | sampling)
        images = prompt.images if images is None else images
        answer: Completion = await self.engine.generate(
            prompt.ids, params, deadline_s=PATIENCE_S, images=images
        )
        return answer


@pytest.fixture(scope="module")
def seeing():
    policy = seeing_policy("qwen2_vl", **WIDE)
    engine = engines.get("vllm")(policy.model, policy.processor.tokenizer, VLLM)
    with asyncio.Runner() as runner:
        runner.run(engine.begin(1, dict(policy.model.named_parameters()), deadline_s=PATIENCE_S))
        yield Seeing(policy, engine, runner)
        runner.run(engine.close())


def trained_logprobs(
    policy: SeeingPolicy, prompt: SeenPrompt, answers: list[Completion], temperature: float
) -> list[float]:
    """The log-probs that the trainer computes of these answers, in ascending order."""
    samples = [
        msgspec.structs.replace(
            Sample.given(
                f"t{number}",
                "g",
                [*prompt.ids, *answer.ids],
                [False] * len(prompt.ids) + [True] * len(answer.ids),
                temperature,
            ),
            images=tuple(image.span for image in prompt.images),
            processor=policy.processor.fingerprint,
        )
        for number, answer in enumerate(answers)
    ]
    provider = ImageProvider.of(policy.model)
    assert provider is not None
    provider.hold({image.span.digest: image.file for image in prompt.images})
    batch = pack(samples, torch.device("cpu"), images=provider)
    return sorted(token_logprobs(policy.model, batch)[0].tolist())


class TestSeeing:
    pytestmark = needs_vllm

    def test_log_probs_are_those_of_training_in_turns_and_in_company(self, seeing: Seeing) -> None:
        policy = seeing.policy

        async def play() -> None:
            first = policy.prompt("look at ", RED, " and say what it is")
            answer = await seeing.ask(first)
            assert policy.difference(first, answer) < EXACT

            hits = seeing.engine.stats()["engine/prefix_hit_tokens"]
            second = first.after(answer, policy.prompt("now this: ", TALL, RED))
            answers = await asyncio.gather(
                *(seeing.ask(second, seed=seed, temperature=0.8) for seed in range(4))
            )
            assert seeing.engine.stats()["engine/prefix_hit_tokens"] > hits
            drawn = sorted(logprob for answer in answers for logprob in answer.logprobs)
            trained = trained_logprobs(policy, second, answers, 0.8)
            assert drawn == pytest.approx(trained, abs=EXACT)

            never = policy.processor.vision_ids
            assert not never & {id for answer in answers for id in answer.ids}

            same = policy.prompt("look at ", BLUE, " and say what it is")
            assert same.ids == first.ids
            for prompt in (same, first, policy.prompt("no image at all")):
                assert policy.difference(prompt, await seeing.ask(prompt)) < EXACT

        seeing.runner.run(play())

    def test_requests_that_training_would_see_otherwise_are_refused(
        self, seeing: Seeing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompt = seeing.policy.prompt("see ", RED, " and ", TALL, ".")
        first, second = prompt.images

        async def play() -> None:
            for images, words in (
                ([first], "outside of its images"),
                ([second, first], "in the order"),
                ([PromptImage(first.span, second.file), second], "file of each span"),
            ):
                with pytest.raises(EngineError, match=words):
                    await seeing.ask(prompt, images=images)

            with pytest.raises(EngineError, match="stand for images"):
                await seeing.engine.score(
                    prompt.ids, [5], deadline_s=PATIENCE_S, images=prompt.images
                )

            with monkeypatch.context() as patch:
                patch.setattr(vllm_images, "collapse", lambda *given: [*collapse(*given), 5])
                with pytest.raises(EngineError, match=rf"and training as {len(prompt.ids)}"):
                    await seeing.ask(prompt)

            assert seeing.policy.difference(prompt, await seeing.ask(prompt)) < EXACT

        seeing.runner.run(play())

    def test_new_weights_of_all_parts_recompute_images_also_in_flight(self, seeing: Seeing) -> None:
        """The last test: the engine has other weights afterwards."""
        policy = seeing.policy
        prompt = policy.prompt("look: ", TALL)
        generator = torch.Generator().manual_seed(7)
        new = {
            name: p.detach() * (1 + 0.3 * torch.randn(p.shape, generator=generator))
            for name, p in policy.model.named_parameters()
        }
        twin = seeing_policy("qwen2_vl", **WIDE)
        twin.alone.load_state_dict({**twin.alone.state_dict(), **new}, strict=False)

        async def play() -> None:
            seen: list[int] = []
            running = asyncio.ensure_future(
                seeing.engine.generate(
                    prompt.ids,
                    SamplingParams(max_new_tokens=300, seed=3),
                    deadline_s=PATIENCE_S,
                    images=prompt.images,
                    listen=lambda ids, _: seen.extend(ids),
                )
            )
            async with asyncio.timeout(PATIENCE_S):
                while len(seen) < 3:
                    await asyncio.sleep(0.001)
            await seeing.engine.publish(2, new, in_flight="continue", deadline_s=PATIENCE_S)

            answer = await running
            assert set(answer.versions) == {1, 2}
            begin = answer.versions.index(2)
            ids = torch.tensor(answer.ids)
            for part, model in ((slice(begin), policy), (slice(begin, None), twin)):
                rows = model.logprobs(prompt, answer.ids)[len(prompt.ids) - 1 : -1]
                wanted = rows.gather(1, ids[:, None])[part, 0].tolist()
                assert answer.logprobs[part] == pytest.approx(wanted, abs=EXACT)

            later = await seeing.ask(prompt)
            assert twin.difference(prompt, later) < EXACT
            assert policy.difference(prompt, later) > 0.1

        seeing.runner.run(play())
