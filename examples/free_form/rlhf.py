"""The three steps of RLHF, each as its command does it: supervised training, a reward model from
comparisons (`agentevo rm`), and PPO against that reward model.

    python examples/free_form/rlhf.py

Nobody tells PPO what is right: comparisons show right ways beside wrong ones, on walks (walks.py)
that neither PPO nor the last question has. Right, at the end, is an answer in any wording.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "search_and_code"))

from rlpr import SEEN, SIZE
from walks import PLACES, WAYS, WORDINGS, Walk, demonstrations, tasks, walks, words

from agentevo.config import build_config
from agentevo.orchestration.reward_model import train as train_reward_model
from arms import Arm, Results, main
from stages import Size, make_policy, reinforce, taught, write_rows

COMPARED = 4
"""Comparisons of each walk that is shown in them."""


def astray(walk: Walk, rng: random.Random) -> str:
    """The reply of somebody who takes one wrong turn and goes on from there."""
    wrong, places = rng.randrange(len(walk.directions)), [walk.start]
    for number, direction in enumerate(walk.directions):
        right = WAYS[places[-1], direction]
        others = [place for place in PLACES if place != right]
        places.append(rng.choice(others) if number == wrong else right)
    steps = " ".join(
        f"{way} {place}" for way, place in zip(walk.directions, places[1:], strict=True)
    )
    answer = rng.choice(WORDINGS).format(places[-1])
    return f"<think> {steps} </think> <answer> {answer} </answer>"


def comparisons(chosen: Sequence[Walk], seed: int) -> list[dict[str, Any]]:
    """Pairs of replies: the right way is better than one that goes astray."""
    rng = random.Random(f"compared {seed}")
    return [
        {
            "prompt": [{"role": "user", "content": walk.query}],
            "chosen": walk.reply(rng.choice(walk.answers())),
            "rejected": astray(walk, rng),
        }
        for walk in chosen
        for _ in range(COMPARED)
    ]


def steps(folder: Path, seed: int, size: Size, _: int) -> Results:
    """SFT, reward model, PPO."""
    known = list(walks(held_out=False, seed=seed))
    shown, asked = known[: size.demonstrations], known[size.demonstrations :][: size.questions]
    held_out = list(itertools.islice(walks(held_out=True, seed=0), size.held_out))
    files = {
        "train": write_rows(folder / "train.jsonl", tasks(asked, wordings=None, seed=seed)),
        "eval": write_rows(folder / "eval.jsonl", tasks(held_out, wordings=None, seed=0)),
    }
    base = make_policy(folder / "base", size, words(), seed)
    policy = taught(base, demonstrations(shown, seed), folder / "sft", size, seed)
    pairs = write_rows(folder / "pairs.jsonl", comparisons(known[: 3 * size.demonstrations], seed))
    judged = train_reward_model(
        build_config(
            {
                "model": {"name": str(policy)},
                "rm": {"pairs": pairs, "epochs": 3, "learning_rate": 1e-3},
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
    )
    of_pairs = {"all": judged["rm/eval/accuracy"]}
    return {
        "SFT": before,
        "SFT and PPO against the reward model": after,
        "the reward model, of held-out comparisons": of_pairs,
    }


ARMS = [Arm("rlhf", steps)]

if __name__ == "__main__":
    sys.exit(main(__doc__, Path(__file__), ARMS, ("all",), 0, SIZE))
