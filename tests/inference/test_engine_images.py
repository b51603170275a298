"""The embedded engine with images: its log-probs are those of transformers' own pass, and images
are never mixed up, left out or invented."""

from __future__ import annotations

import asyncio
from functools import cache

import msgspec
import pytest
import torch
from seeing import load_seeing
from seeing_policies import (
    BLUE,
    PATIENCE_S,
    RED,
    TALL,
    SeeingPolicy,
    SeenPrompt,
    ask,
    play_two_turns,
    seeing_policy,
)
from slow import slow, soak
from tiny_vision import FAMILIES, VARIANTS, write_tiny_vision

from agentevo.config import EngineSection, LoraSection
from agentevo.errors import DeadlineExceededError, EngineError
from agentevo.inference.embedded import images as module
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.rows import row_settings
from agentevo.runtime.byte_cache import ByteCache
from agentevo.training.batching.images import ImageProvider
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import Completion, Sample, SamplingParams
from agentevo.types.images import PromptImage, image_file

EXACT = 1e-4
QUICK = ("qwen2_vl", "idefics3")
SLOW = tuple(name for name in (*FAMILIES, *VARIANTS) if name not in QUICK)
ROWS = ("qwen3_5", "qwen3_5_linear", "gemma3", "gemma4_vision")
TREES = tuple(name for name in SLOW if name not in ROWS)
IN_CI = ("qwen3_5_linear", "gemma3", "gemma4_vision")
"""Recurrent layers, images that see both ways, layers that hand keys on."""
EVERY = [*QUICK, *slow(*IN_CI), *soak(*(name for name in SLOW if name not in IN_CI))]


@cache
def policy_of(name: str) -> SeeingPolicy:
    return seeing_policy(name)


def engine_of(name: str, **settings) -> TorchEngine:
    policy = policy_of(name)
    options = {"kv_cache_tokens": 8192, "prefill_tokens": 16} | settings
    return TorchEngine(policy.model, policy.processor.tokenizer, EngineSection(**options))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_log_probs_are_those_of_transformers_alone_in_turns_and_in_company(name):
    policy = policy_of(name)
    engine = engine_of(name)
    assert (row_settings(policy.model) is not None) == (name in ROWS)

    async def play() -> None:
        played = await play_two_turns(policy, engine)
        for prompt, answer in played:
            assert policy.difference(prompt, answer) < EXACT

        (first, _), (second, _) = played
        hits = engine.stats()["engine/session_hit_tokens"]
        assert hits == len(first.ids) + 9  # the last token of the answer was not computed

        text = policy.prompt("no image at all")
        same = policy.prompt("look at ", BLUE, " and say what it is")
        prompts = [first, same, text, second, first, same]
        answers = await asyncio.gather(*(ask(engine, p, seed=n) for n, p in enumerate(prompts)))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert policy.difference(prompt, answer) < EXACT

        stats = engine.stats()
        assert stats["engine/encoded_images"] == 3
        assert stats["engine/prefix_hit_tokens"] > 0
        scores = await engine.score(
            second.ids, answers[3].ids, deadline_s=PATIENCE_S, images=second.images
        )
        assert scores.logprobs == pytest.approx(answers[3].logprobs, abs=EXACT)

    asyncio.run(play())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *slow(*ROWS), *soak(*TREES)])
def test_prompts_share_no_token_of_different_images(name):
    """Equal ids, and 16 tokens of chunk: chunks end inside images, and prefixes before them."""
    policy = policy_of(name)
    engine = engine_of(name)
    words = "this is a long and common beginning: "
    red, blue = (policy.prompt(words, file, " end") for file in (RED, BLUE))
    assert red.ids == blue.ids
    place = red.images[0].span.offset

    async def play() -> None:
        answers = await asyncio.gather(*(ask(engine, p, temperature=1.0) for p in (red, blue)))
        assert engine.stats()["engine/prefix_hit_tokens"] <= 2 * place
        for prompt, answer in zip((red, blue), answers, strict=True):
            assert policy.difference(prompt, answer) < EXACT

        await ask(engine, red, session="s")
        before = engine.stats()["engine/session_hit_tokens"]
        answer = await ask(engine, blue, session="s")
        assert engine.stats()["engine/session_hit_tokens"] - before <= place
        assert policy.difference(blue, answer) < EXACT

    asyncio.run(play())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", *soak("idefics3")])
def test_new_weights_in_flight_recompute_images_of_a_trained_tower(name):
    policy = policy_of(name)
    model = policy.model
    new = {key: p.detach() * 1.05 for key, p in model.named_parameters()}
    old = {key: p.detach().clone() for key, p in model.named_parameters()}
    engine = engine_of(name)
    prompt = policy.prompt("look: ", TALL)

    async def play() -> None:
        waiting = asyncio.ensure_future(ask(engine, prompt, max_new_tokens=40))
        while engine.stats()["engine/generated_tokens"] < 5:
            await asyncio.sleep(0)
        await engine.publish(1, new, in_flight="continue")
        answer = await waiting
        assert set(answer.versions) == {0, 1}
        assert engine.stats()["engine/encoded_images"] == 2

        begin = answer.versions.index(1)
        twin = seeing_policy(name)
        twin.alone.load_state_dict({**twin.alone.state_dict(), **new}, strict=False)
        exact = twin.logprobs(prompt, answer.ids)[len(prompt.ids) - 1 : -1]
        drawn = exact.gather(1, torch.tensor(answer.ids)[:, None])[:, 0].tolist()
        assert answer.logprobs[begin:] == pytest.approx(drawn[begin:], abs=EXACT)

    try:
        asyncio.run(play())
    finally:
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(old[key])
        asyncio.run(engine.begin(0))


@pytest.mark.slow
def test_a_frozen_tower_keeps_its_features_over_versions():
    policy = seeing_policy("idefics3")
    for key, parameter in policy.model.named_parameters():
        parameter.requires_grad_("text_model" in key or "lm_head" in key)
    engine = TorchEngine(policy.model, policy.processor.tokenizer, EngineSection())
    prompt = policy.prompt(RED)

    async def play() -> None:
        for version in (1, 2):
            assert policy.difference(prompt, await ask(engine, prompt)) < EXACT
            await engine.publish(version)
        assert engine.stats()["engine/encoded_images"] == 1
        await engine.sleep()
        assert engine.stats()["engine/image_bytes"] == 0
        await engine.wake()
        assert policy.difference(prompt, await ask(engine, prompt)) < EXACT

    asyncio.run(play())


@pytest.mark.slow
def test_another_adapter_of_a_tower_encodes_images_again(tmp_path):
    """Also where nothing is trained, as in an engine that only serves."""
    pytest.importorskip("peft")
    folder = write_tiny_vision("idefics3", tmp_path)
    loaded = load_seeing(folder, lora=LoraSection(rank=2, targets=["tower"]))
    model = prepare(loaded.model.requires_grad_(False))
    engine = TorchEngine(model, loaded.tokenizer, EngineSection())
    prompt = policy_of("idefics3").prompt(RED)

    async def play() -> list[Completion]:
        answers = [await ask(engine, prompt)]
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        await engine.publish(1, adapter="default")
        return [*answers, await ask(engine, prompt)]

    with torch.no_grad():
        first, second = asyncio.run(play())
    assert engine.stats()["engine/encoded_images"] == 2
    assert first.logprobs != second.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", *soak("idefics3")])
def test_tokens_of_images_are_never_sampled(name):
    policy = seeing_policy(name)
    banned = sorted(policy.processor.vision_ids)
    for model in (policy.model, policy.alone):
        head = model.get_output_embeddings()
        with torch.no_grad():
            head.weight[banned] *= 30
    engine = TorchEngine(policy.model, policy.processor.tokenizer, EngineSection())
    prompt = policy.prompt("look: ", RED)

    async def play() -> None:
        hot = [ask(engine, prompt, seed=n, temperature=2.0, max_new_tokens=40) for n in range(4)]
        cold = ask(engine, prompt, temperature=0.0, max_new_tokens=40)
        plain = ask(engine, prompt, top_logprobs=20)
        *answers, last = await asyncio.gather(*hot, cold, plain)
        for answer in (*answers, last):
            assert not set(answer.ids) & set(banned)
        assert not {id for row in last.top_logprobs for id, _ in row} & set(banned)
        assert policy.difference(prompt, last) < EXACT
        with pytest.raises(EngineError, match="never sampled"):
            await engine.score(prompt.ids, banned[:1], deadline_s=1.0, images=prompt.images)

    asyncio.run(play())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", *slow("idefics3", "qwen3_5_linear", "gemma3")])
def test_the_trainer_computes_the_log_probs_of_the_engine(name):
    policy = policy_of(name)
    engine = engine_of(name)

    async def play() -> tuple[SeenPrompt, list[Completion]]:
        prompt = policy.prompt("look: ", RED, " and ", TALL)
        return prompt, [await ask(engine, prompt, seed=seed, temperature=0.8) for seed in (1, 2)]

    prompt, answers = asyncio.run(play())
    samples = [
        msgspec.structs.replace(
            Sample.given(
                f"t{number}",
                "g",
                [*prompt.ids, *answer.ids],
                [False] * len(prompt.ids) + [True] * len(answer.ids),
                0.8,
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
    trained, _ = token_logprobs(policy.model, batch)
    drawn = [logprob for answer in answers for logprob in answer.logprobs]
    assert sorted(trained.tolist()) == pytest.approx(sorted(drawn), abs=EXACT)


def hostile() -> dict[str, tuple[SeenPrompt, str]]:
    """Requests that must be refused, and what the error says."""
    policy = policy_of("qwen2_vl")
    prompt = policy.prompt("see ", RED, " and ", TALL, ".")
    first, second = prompt.images

    def images(*changed: PromptImage) -> SeenPrompt:
        return prompt._replace(images=list(changed))

    def moved(image: PromptImage, **change) -> PromptImage:
        return PromptImage(msgspec.structs.replace(image.span, **change), image.file)

    ids = list(prompt.ids)
    ids[second.span.offset + 1] = 5
    feature = policy.processor.feature_id
    length = first.span.length
    return {
        "overlap": (images(first, moved(second, offset=first.span.offset + 1)), "begins at token"),
        "order": (images(second, first), "in the order"),
        "outside": (images(first, moved(second, offset=len(prompt.ids) - 1)), "never cut"),
        "negative": (images(moved(first, offset=-1), second), "never cut"),
        "not features": (images(moved(first, offset=first.span.offset - 1), second), "begins at"),
        "other id": (prompt._replace(ids=ids), "fit its grid"),
        "no image": (images(first), "outside of its images"),
        "none": (images(), "outside of its images"),
        "one more": (prompt._replace(ids=[*prompt.ids, feature]), "outside of its images"),
        "grid": (images(moved(first, grid=(1, 2, 2 * length)), second), "has the grid"),
        "more tokens": (
            prompt._replace(
                ids=[
                    *prompt.ids[: first.span.offset],
                    *[feature] * length,
                    *prompt.ids[first.span.offset :],
                ],
                images=[
                    moved(first, length=2 * length),
                    moved(second, offset=second.span.offset + length),
                ],
            ),
            f"{length} features, and its span has",
        ),
        "cut": (
            prompt._replace(
                ids=[*prompt.ids[: first.span.offset], *prompt.ids[first.span.offset + 4 :]],
                images=[
                    moved(first, length=length - 4, grid=(1, 2, 2 * (length - 4))),
                    moved(second, offset=second.span.offset - 4),
                ],
            ),
            "has the grid",
        ),
        "digest": (images(moved(first, digest=second.span.digest), second), "file of each span"),
        "bytes": (
            images(
                PromptImage(first.span, msgspec.structs.replace(first.file, data=b"other")), second
            ),
            "another SHA-256",
        ),
        "no digest": (images(moved(first, digest="../../etc"), second), "SHA-256"),
    }


def test_images_that_do_not_belong_to_the_prompt_are_refused():
    engine = engine_of("qwen2_vl")

    async def play() -> None:
        for prompt, words in hostile().values():
            with pytest.raises(EngineError, match=words):
                await ask(engine, prompt)
        good = policy_of("qwen2_vl").prompt("see ", RED)
        assert policy_of("qwen2_vl").difference(good, await ask(engine, good)) < EXACT

    asyncio.run(play())


def test_a_damaged_image_and_a_late_one_end_their_request_alone(monkeypatch):
    policy = policy_of("idefics3")
    engine = engine_of("idefics3")
    good = policy.prompt(RED)
    broken = good.images[0].file.data[:-40]
    file = image_file(broken, "image/png")
    span = msgspec.structs.replace(good.images[0].span, digest=file.part.sha256)

    async def play() -> None:
        with pytest.raises(EngineError, match="image"):
            await ask(engine, good, images=[PromptImage(span, file)])

        policy.processor.forget_pixels()
        params = SamplingParams(max_new_tokens=4)
        with pytest.raises(DeadlineExceededError, match="images were not processed"):
            await engine.generate(good.ids, params, deadline_s=-1.0, images=good.images)
        assert policy.difference(good, await ask(engine, good)) < EXACT

    asyncio.run(play())


@pytest.mark.slow
def test_a_model_whose_images_see_both_ways_computes_an_image_at_once():
    policy = policy_of("gemma3")
    engine = engine_of("gemma3")
    prompt = policy.prompt("see ", RED)
    span = prompt.images[0].span
    cut = prompt._replace(ids=prompt.ids[: span.end])

    async def play() -> None:
        with pytest.raises(EngineError, match="ends inside an image"):
            await ask(engine, cut)

    asyncio.run(play())


def test_text_models_and_invariant_engines_refuse_images(loaded):
    prompt = policy_of("qwen2_vl").prompt(RED)
    text = TorchEngine(prepare(loaded.model), loaded.tokenizer)

    async def play() -> None:
        with pytest.raises(EngineError, match="choose a vision-language model"):
            await ask(text, prompt._replace(ids=[1, 2, 3]))

    asyncio.run(play())


def test_a_cache_keeps_its_newest_values_within_its_bytes():
    cache: ByteCache[str, int] = ByteCache(10)
    cache.put("a", 1, 4)
    cache.put("b", 2, 4)
    assert cache.get("a") == 1  # used last
    cache.put("c", 3, 4)
    assert (cache.get("a"), cache.get("b"), cache.get("c"), cache.num_bytes) == (1, None, 3, 8)
    cache.put("large", 4, 100)
    assert cache.get("large") == 4 and cache.get("a") is None and cache.num_bytes == 100


def test_features_that_do_not_fit_the_cache_are_computed_again(monkeypatch):
    monkeypatch.setattr(module, "SHARE", 0.0)
    policy = policy_of("qwen2_vl")
    engine = engine_of("qwen2_vl")
    prompt = policy.prompt(RED, TALL, BLUE)

    async def play() -> None:
        assert policy.difference(prompt, await ask(engine, prompt)) < EXACT
        assert engine.stats()["engine/encoded_images"] >= 3

    asyncio.run(play())
