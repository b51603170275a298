"""Does a turn cost only its new tokens? Eight turns whose history grows, the same number of new tokens in each."""

from __future__ import annotations

import asyncio
import time
from statistics import median

from agentevo.inference.torch_engine import TorchEngine
from agentevo.types import SamplingParams
from figures import Figure
from generate import random_prompts
from ours import DEADLINE_S

NUM_TURNS = 8
NUM_EPISODES = 8
OBSERVATION_TOKENS = 64
NEW_TOKENS = 32


async def play(engine: TorchEngine, seed: int) -> list[float]:
    """Wall seconds of each turn, all episodes taking it together."""
    contexts: list[list[int]] = [[] for _ in range(NUM_EPISODES)]
    seconds = []
    for turn in range(NUM_TURNS):
        observations = random_prompts(NUM_EPISODES, OBSERVATION_TOKENS, seed * 1000 + turn)
        contexts = [context + observation for context, observation in zip(contexts, observations, strict=True)]
        started = time.perf_counter()
        completions = await asyncio.gather(
            *(
                engine.generate(
                    context,
                    SamplingParams(max_new_tokens=NEW_TOKENS, seed=seed * 10_007 + turn * 101 + episode),
                    session=f"{seed}/{episode}",
                    deadline_s=DEADLINE_S,
                )
                for episode, context in enumerate(contexts)
            )
        )
        seconds.append(time.perf_counter() - started)
        contexts = [context + completion.ids for context, completion in zip(contexts, completions, strict=True)]
    for episode in range(NUM_EPISODES):
        await engine.release(f"{seed}/{episode}")
    return seconds


def flatness(engine: TorchEngine, repeats: int) -> Figure:
    """Time of turn 1 over time of turn 8, medians over `repeats` rounds of episodes after one that warms up."""
    rounds = [asyncio.run(play(engine, seed)) for seed in range(repeats + 1)][1:]
    medians = [median(column) for column in zip(*rounds, strict=True)]
    meaning = f"turn 1 over turn {NUM_TURNS}: {NUM_EPISODES} episodes, {OBSERVATION_TOKENS} observed and {NEW_TOKENS} new tokens a turn"
    return Figure("turn_flatness", medians[0] / medians[-1], meaning, {"unit": "s", "medians": medians, "repeats": rounds})
