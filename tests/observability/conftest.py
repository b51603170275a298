"""A made-up but realistic run: what the trainer would log while a policy learns FrozenLake, as rows
of metrics.jsonl. A clock that is set by hand, and a terminal that keeps what is drawn on it."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable

import pytest

from agentevo.observability.metrics import MetricsRow

STEPS = 60


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "50")
    return Terminal()


def _training_row(step: int, rng: random.Random) -> MetricsRow:
    skill = 1 / (1 + math.exp(-(step - 24) / 7))
    success = min(max(0.12 + 0.6 * skill + rng.gauss(0, 0.06), 0), 1)
    gen = 1.6 + rng.random() * 0.3 + (1 - skill) * 0.8
    update = 1.4 + rng.random() * 0.2
    tokens = round(5200 - 1500 * skill + rng.gauss(0, 150))
    zero = min(max(0.15 + 0.3 * abs(skill - 0.5) * 2 + rng.gauss(0, 0.05), 0), 1)
    length = 46 - 14 * skill + rng.gauss(0, 1.5)

    return {
        "training/global_step": step,
        "critic/score/mean": success - 0.05 * (1 - skill),
        "critic/score/max": 1.0,
        "critic/score/min": -0.3,
        "critic/advantages/mean": 0.0,
        "train/success": success,
        "actor/pg_loss": rng.gauss(-0.01, 0.02),
        "actor/entropy": 0.9 - 0.5 * skill + rng.gauss(0, 0.03),
        "actor/pg_clipfrac": abs(rng.gauss(0.01, 0.006)),
        "actor/ppo_kl": abs(rng.gauss(4e-4, 2e-4)),
        "actor/grad_norm": abs(rng.gauss(0.6 - 0.2 * skill, 0.12)),
        "actor/lr": 1e-4,
        "response_length/mean": length,
        "response_length/max": length * 1.7,
        "response_length/min": length * 0.3,
        "response_length/clip_ratio": max(0.06 * (1 - skill) + rng.gauss(0, 0.01), 0),
        "prompt_length/mean": 118 + rng.gauss(0, 2),
        "num_turns/mean": 6.2 - 1.8 * skill + rng.gauss(0, 0.2),
        "timing_s/gen": gen,
        "timing_s/adv": 0.01,
        "timing_s/update_actor": update,
        "timing_s/update_weights": 0.02,
        "timing_s/step": gen + update + 0.05,
        "perf/total_num_tokens": tokens,
        "perf/throughput": tokens / (gen + update),
        "engine/tokens_per_s": tokens * 0.4 / gen,
        "perf/tokens_per_s_logical": tokens / update,
        "group/reward_std/mean": 0.45 - 0.3 * abs(skill - 0.5),
        "group/zero_std_ratio": zero,
        "rollout/in": 64.0,
        "rollout/dropped": 8.0,
        "rollout/dropped/zero_variance": 8.0,
    }


def _evaluation(step: int) -> MetricsRow:
    skill = 1 / (1 + math.exp(-(step - 24) / 7))
    greedy = round((0.14 + 0.56 * skill) * 64) / 64
    name = "val-core/frozen_lake"
    row: MetricsRow = {
        f"{name}/success/greedy": greedy,
        f"{name}/reward/greedy": greedy - 0.02,
        f"{name}/random": 0.06,
        f"{name}/optimal": 0.78,
    }
    if step in (0, STEPS):
        row |= {f"{name}/success/sampled": greedy - 0.05, f"{name}/reward/sampled": greedy - 0.09}

    return row


@pytest.fixture
def rows() -> list[MetricsRow]:
    """60 training rows, evaluations at 0, 10, ... 60, one gradient norm that was not finite."""
    rng = random.Random(0)
    made: list[MetricsRow] = [
        {"step": 0, "time": 1_771_000_000.0, **_evaluation(0), "timing_s/testing": 4.0}
    ]
    for step in range(1, STEPS + 1):
        made.append({"step": step, "time": 1_771_000_000.0 + 4 * step, **_training_row(step, rng)})
        if step % 10 == 0:
            made.append(
                {
                    "step": step,
                    "time": 1_771_000_001.0 + 4 * step,
                    **_evaluation(step),
                    "timing_s/testing": 3.5,
                }
            )

    next(row for row in made if row["step"] == 33)["actor/grad_norm"] = None
    return made


@pytest.fixture
def summary() -> dict[str, object]:
    return {
        "name": "frozen_lake",
        "recipe": "frozen_lake",
        "model": "tiny",
        "environment": "frozen_lake",
        "eval": {
            "before": 0.156,
            "after": 0.70,
            "n": 64,
            "cold_start_before": 0.02,
            "random": 0.06,
            "optimal": 0.78,
        },
        "wall_s": 312.4,
        "steps": STEPS,
        "tokens": {"generated": 118_204, "trained": 96_411},
        "best": {"step": 60, "value": 0.70},
        "warnings": [
            {
                "code": "gradient_spike",
                "step": 33,
                "message": "The gradient norm jumped to 9.1, 15 times its running mean of 0.6.",
            }
        ],
    }


@pytest.fixture
def decode() -> Callable[[int], str]:
    words = [
        "<think>",
        "the",
        " goal",
        " is",
        " right",
        "</think>",
        "<answer>",
        "Right",
        "</answer>",
        "<|im_end|>",
        "\n",
        "é&<b>",
    ]
    return lambda token: words[token % len(words)]
