"""Tokens per second of the embedded engine against the better of transformers `generate` and vLLM
on the same weights and cores.

Ours and theirs take turns; every repeat has new prompts, so that no cache helps from one repeat to
the next. Everybody samples at temperature 1 and ignores the end of text. Ours returns the log-prob
of every token, which training needs; the peers are not asked for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

from transformers import PreTrainedModel

from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.flops import ForwardWork, model_flops
from figures import Figure
from machine import Rate
from ours import time_generate
from peers import Peer

NEW_TOKENS = 64
PROMPT_TOKENS = 48
PREFIX_TOKENS = 500
TEMPERATURE = 1.0
TUNED = "vllm_tuned"

Speeds = dict[str, list[float]]
"""Tokens per second of each contender, one number a repeat."""


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids without meaning: what a completion costs does not depend on them."""
    rng = random.Random(seed)
    return [[rng.randrange(100, 40_000) for _ in range(length)] for _ in range(count)]


def compare(
    engine: TorchEngine,
    peers: list[Peer],
    make_prompts: Callable[[int], list[list[int]]],
    repeats: int,
) -> Speeds:
    """One warm-up round and `repeats` timed ones; in each round everybody completes the same
    prompts."""
    speeds: Speeds = {"agentevo": [], **{peer.name: [] for peer in peers}}
    for repeat in range(repeats + 1):
        prompts = make_prompts(repeat)
        seconds, tokens = time_generate(engine, prompts, NEW_TOKENS, TEMPERATURE, seed=repeat)
        of_round = {"agentevo": tokens / seconds}
        for peer in peers:
            answer = peer.ask(
                {"prompts": prompts, "new_tokens": NEW_TOKENS, "temperature": TEMPERATURE}
            )
            of_round[peer.name] = answer["tokens"] / answer["seconds"]

        if repeat:
            for name, speed in of_round.items():
                speeds[name].append(speed)

    return speeds


def generation_flops(model: PreTrainedModel, prompts: list[int], completions: list[int]) -> float:
    """Operations of completing prompts of these lengths, each computed once for all completions of
    it: as many for every prompt, in the same order."""
    flops = model_flops(model)
    share = len(completions) // len(prompts)
    ends = [prompts[index // share] + length for index, length in enumerate(completions)]
    repeated = (share - 1) * sum(length * (length + 1) // 2 for length in prompts)
    pairs = sum(end * (end + 1) // 2 for end in ends) - repeated
    tokens = sum(prompts) + sum(completions)
    return flops.forward(ForwardWork(tokens, sum(completions), dict.fromkeys(flops.windows, pairs)))


def rate(model: PreTrainedModel, num_prompts: int, length: int, count: int, speed: float) -> Rate:
    """What `speed` tokens per second ask of the machine, where `count` requests share `num_prompts`
    prompts: all operations, and the weights that are read once for each step of all requests."""
    flops = generation_flops(model, [length] * num_prompts, [NEW_TOKENS] * count)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return Rate(flops * speed / (count * NEW_TOKENS), weights * speed / count)


def figures(
    case: str, against: str, speeds: Speeds, meaning: str, rate_of: Callable[[float], Rate]
) -> list[Figure]:
    """`CASE_vs_AGAINST`: ours over the best peer as it installs; `CASE_vs_vllm_tuned`: ours over
    vLLM with its manual's tuning."""
    medians = {contender: median(values) for contender, values in speeds.items()}
    best = max(
        (peer for peer in medians if peer not in {"agentevo", TUNED}),
        key=lambda peer: medians[peer],
    )
    rivals = {f"{case}_vs_{against}": best} | (
        {f"{case}_vs_{TUNED}": TUNED} if TUNED in medians else {}
    )
    raw = {"unit": "tokens/s", "medians": medians, "repeats": speeds}

    return [
        Figure(
            name,
            medians["agentevo"] / medians[peer],
            meaning,
            raw | {"peer": peer},
            rate_of(medians["agentevo"]),
        )
        for name, peer in rivals.items()
    ]


def concurrent(engine: TorchEngine, peers: list[Peer], count: int, repeats: int) -> list[Figure]:
    """`count` requests with different prompts at once."""
    speeds = compare(
        engine,
        peers,
        lambda repeat: random_prompts(count, PROMPT_TOKENS, 1000 * count + repeat),
        repeats,
    )
    meaning = (
        f"{count} concurrent requests, prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new "
        "tokens each"
    )
    return figures(
        f"generate_{count}",
        "best",
        speeds,
        meaning,
        lambda speed: rate(engine.model, count, PROMPT_TOKENS, count, speed),
    )


def shared_prefix(engine: TorchEngine, vllm: list[Peer], repeats: int) -> list[Figure]:
    """64 requests with one and the same prompt of 500 tokens, new in each repeat."""
    speeds = compare(
        engine, vllm, lambda repeat: random_prompts(1, PREFIX_TOKENS, 77 + repeat) * 64, repeats
    )
    meaning = (
        f"64 concurrent requests sharing a prompt of {PREFIX_TOKENS} tokens, {NEW_TOKENS} "
        "new tokens each; vLLM's prefix cache is on"
    )
    return figures(
        "prefix500_64",
        "vllm",
        speeds,
        meaning,
        lambda speed: rate(engine.model, 1, PREFIX_TOKENS, 64, speed),
    )
