"""Does a turn cost only its new tokens? Eight turns whose history grows, the same number of new
tokens in each.

Nothing is computed twice, yet a turn can't be free of its history: every new token reads all keys
and values before it. In one episode the weights that are read for each token hide that; in many at
once the weights are read once for all, and the histories are what grows.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median

from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.types import SamplingParams
from figures import Figure
from generate import random_prompts
from ours import DEADLINE_S

NUM_TURNS = 8
OBSERVATION_TOKENS = 64
NEW_TOKENS = 32


async def play(engine: TorchEngine, num_episodes: int, seed: int) -> list[float]:
    """Wall seconds of each turn, all episodes taking it together."""
    contexts: list[list[int]] = [[] for _ in range(num_episodes)]
    seconds = []
    for turn in range(NUM_TURNS):
        observations = random_prompts(num_episodes, OBSERVATION_TOKENS, seed * 1000 + turn)
        contexts = [
            context + observation
            for context, observation in zip(contexts, observations, strict=True)
        ]
        started = time.perf_counter()
        completions = await asyncio.gather(
            *(
                engine.generate(
                    context,
                    SamplingParams(
                        max_new_tokens=NEW_TOKENS, seed=seed * 10_007 + turn * 101 + episode
                    ),
                    session=f"{seed}/{episode}",
                    deadline_s=DEADLINE_S,
                )
                for episode, context in enumerate(contexts)
            )
        )
        seconds.append(time.perf_counter() - started)
        contexts = [
            context + completion.ids
            for context, completion in zip(contexts, completions, strict=True)
        ]

    for episode in range(num_episodes):
        await engine.release(f"{seed}/{episode}")

    return seconds


def flatness(engine: TorchEngine, num_episodes: int, repeats: int) -> Figure:
    """Time of turn 1 over time of turn 8, medians over `repeats` rounds of episodes after one that
    warms up."""
    rounds = [asyncio.run(play(engine, num_episodes, seed)) for seed in range(repeats + 1)][1:]
    medians = [median(column) for column in zip(*rounds, strict=True)]
    name = "turn_flatness" if num_episodes == 1 else f"turn_flatness_{num_episodes}_episodes"
    meaning = (
        f"turn 1 over turn {NUM_TURNS}: {num_episodes} at once, {OBSERVATION_TOKENS} "
        f"observed and {NEW_TOKENS} new tokens a turn"
    )

    return Figure(
        name,
        medians[0] / medians[-1],
        meaning,
        {"unit": "s", "medians": medians, "repeats": rounds},
    )
