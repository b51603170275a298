"""Self-play from nothing: no tasks are given, and beside it a proposer that stays as it is.

A tiny policy is shown what a question and what an answer looks like: lengths of words and keys,
both drawn at random, so that its answers are right as often as guesses are. From there it plays
solver and proposer (docs/multi_agent.md), once with both trained and once with the solver alone.

    python examples/evolve/self_play.py --out runs/self_play --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import yaml

from agentevo.cli.main import main as agentevo
from keypad import KEYS, LONGEST, Keypad, drawn, spelt


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/self_play"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of policy and draws")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--shown", type=int, default=600, help="answers; half as many questions")
    parser.add_argument("--held-out", type=int, default=72, help="words of 3 letters, a sixth of 2")
    return parser.parse_args()


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path.absolute())


def data(given: argparse.Namespace) -> dict[str, str]:
    """Files of held-out words, of what is shown, and of words for an evaluation between."""
    rng = random.Random(1)
    held_out: list[str] = []
    while len(held_out) < given.held_out:
        word = drawn(rng, 2 if len(held_out) < given.held_out // 6 else LONGEST)
        if word not in held_out:
            held_out.append(word)

    words = []
    while len(words) < given.shown * 3 // 2:
        word = drawn(rng, rng.randint(1, LONGEST))
        if word not in held_out:
            words.append(word)

    shown = []
    for number, word in enumerate(words):
        guess = "".join(rng.choice(sorted(set(KEYS.values()))) for _ in word)
        asked = word
        said = guess
        if number >= given.shown:
            asked = Keypad().prompt(rng)
            said = str(rng.randint(1, LONGEST))

        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        shown.append({"messages": turns})

    tasks = {name: {"query": name, "answer": spelt(name)} for name in (*held_out, *words)}
    return {
        "held_out": write(given.out / "held_out.jsonl", [tasks[one] for one in held_out]),
        "shown": write(given.out / "shown.jsonl", shown),
        "words": write(given.out / "words.jsonl", [tasks[one] for one in dict.fromkeys(words)]),
    }


def pipeline(given: argparse.Namespace, files: dict[str, str]) -> dict[str, Any]:
    """What `agentevo pipeline` reads."""
    shape = {"tokenizer": "byte", "hidden_size": 64, "num_layers": 2, "num_heads": 4}
    playing = {
        "tasks": {
            "train": [],
            "self_play": {"family": "keypad", "group_size": 4, "repetition": 0.25},
        },
        "algorithm": {
            "name": "grpo",
            "clip_high": 0.28,
            "kl_coef": 0.2,  # without it a proposer soon asks one thing alone, and stays there
            "drop_zero_variance": False,  # what is solved is held near the reference, too
        },
        "trainer": {
            "steps": given.steps,
            "groups_per_step": 32,
            "group_size": 8,
            "minibatches": 2,
            "learning_rate": 1e-3,
        },
        "evaluation": {"every": 20},
    }
    still = {"agents": {"solver": {}, "proposer": {"train": False}}}
    start = "${stages.shown.checkpoint}"

    return {
        "dir": str((given.out / "pipeline").absolute()),
        "seeds": given.seeds,
        "table": str((given.out / "table.md").absolute()),
        "held_out": {"tasks": given.held_out},
        "config": {
            "import": [str(Path(__file__).with_name("keypad.py").absolute())],
            "model": {"name": "tiny", "tiny": {**shape, "context_length": 128}},
            "tasks": {"train": files["words"], "eval": files["held_out"]},
            "rewards": ["exact_match"],
            "sampling": {"max_new_tokens": 2 * LONGEST},
            "evaluation": {"tasks": given.held_out, "every": 0, "samples": 0},
            "checkpoint": {"every": 0},
            "tracking": {"report": False, "tensorboard": False},
        },
        "stages": {
            "shown": {
                "kind": "sft",
                "config": {
                    "data": {"train": files["shown"], "eval_share": 0},
                    "sft": {"epochs": 3, "batch_conversations": 32, "learning_rate": 3e-3},
                },
            },
            "self_play": {"model": start, "config": playing},
            "proposer_still": {"model": start, "config": {**playing, **still}},
        },
    }


def main() -> int:
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "self_play.pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline(given, data(given)), sort_keys=False))
    return agentevo(["pipeline", str(file)])


if __name__ == "__main__":
    sys.exit(main())
