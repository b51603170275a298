"""The three steps of RLHF, each as its command does it: supervised training, a reward model from
comparisons (`agentevo sft --reward-model`), and PPO against that reward model.

    python examples/free_form/rlhf.py

A tiny policy answers walks (walks.py) in four wordings, as it was shown. Comparisons say which one
is preferred, and nobody tells PPO that rule, nor what is right. Right, at the end, is the right
answer in the wording that is preferred. The walks of the comparisons, of those that the reward
model is tried on, of PPO and of the last question are different ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "search_and_code"))

from rlpr import SEEN, SIZE
from walks import WORDINGS, Walk, demonstrations, tasks, walks, words

from agentevo.config import build_config
from agentevo.runs.orchestration.reward_model import train as train_reward_model
from arms import Arm, Results, main
from stages import Size, make_policy, reinforce, taught, write_rows

PREFERRED = WORDINGS[2]
"""How whoever compares wants to be answered."""
COMPARED = 4
"""Comparisons of each walk that is shown in them."""
KL_COEF = 0.3
"""Weight of the KL to the policy of SFT: the ways, of which the reward model says nothing, are to
stay as they are."""


def comparisons(chosen: Sequence[Walk], seed: int) -> list[dict[str, Any]]:
    """Pairs of replies to a walk: the same way, and the answer in the wording that is preferred
    beside one in another."""
    rng = random.Random(f"compared {seed}")
    others = [wording for wording in WORDINGS if wording != PREFERRED]
    return [
        {
            "prompt": [{"role": "user", "content": walk.query}],
            "chosen": walk.reply(PREFERRED.format(walk.places[-1])),
            "rejected": walk.reply(rng.choice(others).format(walk.places[-1])),
        }
        for walk in chosen
        for _ in range(COMPARED)
    ]


def preferred(chosen: Sequence[Walk]) -> list[dict[str, Any]]:
    """Rows of a file whose answer is the right one in the wording that is preferred."""
    rows = tasks(chosen, wordings=None, seed=0)
    return [
        row | {"answer": PREFERRED.format(walk.places[-1])}
        for row, walk in zip(rows, chosen, strict=True)
    ]


def steps(folder: Path, seed: int, size: Size, _: int) -> Results:
    """SFT, reward model, PPO."""
    known = list(walks(held_out=False, seed=seed))
    shown = known[: size.demonstrations]
    asked = known[size.demonstrations :][: size.questions]
    held_out = list(itertools.islice(walks(held_out=True, seed=0), size.held_out))
    files = {
        "train": write_rows(folder / "train.jsonl", preferred(asked)),
        "eval": write_rows(folder / "eval.jsonl", preferred(held_out)),
    }

    base = make_policy(folder / "base", size, words(), seed)
    policy = taught(base, demonstrations(shown, seed), folder / "sft", size, seed)
    others = known[size.demonstrations + size.questions :]
    pairs = write_rows(folder / "pairs.jsonl", comparisons(shown, seed))
    tried = write_rows(folder / "tried.jsonl", comparisons(others, seed))
    judged = train_reward_model(
        build_config(
            {
                "model": {"name": str(policy)},
                "rm": {"pairs": pairs, "eval": tried, "epochs": 3, "learning_rate": 1e-3},
                "run": {"dir": str(folder / "rm"), "overwrite": True, "seed": seed},
            },
            needs_environment=False,
        )
    )

    rewards = [SEEN, {"name": "reward_model", "model": str(folder / "rm" / "model")}]
    before, after = reinforce(
        {"type": "single_turn"},
        policy,
        files,
        folder / "ppo",
        size,
        seed,
        rewards,
        {"critic": {"learning_rate": 1e-3}},
        name="ppo",
        kl_coef=KL_COEF,
    )
    of_pairs = {"all": judged["rm/eval/accuracy"]}

    return {
        "SFT": before,
        "SFT and PPO against the reward model": after,
        "the reward model, of held-out comparisons": of_pairs,
    }


ARMS = [Arm("rlhf", steps)]
FEW = dataclasses.replace(SIZE, epochs=8, steps=20)
"""The reward model has little more to say after that."""

if __name__ == "__main__":
    sys.exit(main(__doc__, Path(__file__), ARMS, ("all",), 0, FEW))
