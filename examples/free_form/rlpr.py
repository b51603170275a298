"""RL from answers in free words: a rule that knows every wording, one that knows the row's alone,
and the policy's own probability of the row's answer, which needs no rule (RLPR).

    python examples/free_form/rlpr.py

A tiny policy with random weights is shown some walks (walks.py) and then trained by GRPO on others.
Right is an answer in any wording; the walks that are asked at the end were never trained on.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "search_and_code"))

from walks import demonstrations, tasks, walks, words

from arms import Arm, Results, main
from stages import Size, make_policy, reinforce, taught, write_rows

SIZE = Size(
    hidden_size=64,
    num_layers=2,
    demonstrations=150,
    epochs=24,
    steps=60,
    groups=8,
    learning_rate=3e-4,
    questions=300,
    held_out=140,
)
RULE = {"name": "exact_match", "place": "answer"}
SEEN = {**RULE, "weight": 0.0}
"""Says what is right, and pays nothing."""
RLPR = {"name": "rlpr", "place": "answer"}
REWARDS: dict[str, tuple[list[dict[str, Any]], int | None]] = {
    "rule, every wording": ([RULE], None),
    "rule, the row's wording": ([RULE], 1),
    "rlpr": ([SEEN, RLPR], 1),
    "rlpr without debiasing": ([SEEN, {**RLPR, "debias": False}], 1),
}
"""What an attempt is worth, and how many wordings of its answer a row has."""


def play(title: str, folder: Path, seed: int, size: Size) -> Results:
    """One way to be rewarded, from random weights."""
    rewards, wordings = REWARDS[title]
    known = list(walks(held_out=False, seed=seed))
    shown = known[: size.demonstrations]
    asked = known[size.demonstrations :][: size.questions]
    held_out = list(itertools.islice(walks(held_out=True, seed=0), size.held_out))
    files = {
        "train": write_rows(folder / "train.jsonl", tasks(asked, wordings=wordings, seed=seed)),
        "eval": write_rows(folder / "eval.jsonl", tasks(held_out, wordings=None, seed=0)),
    }

    base = make_policy(folder / "base", size, words(), seed)
    policy = taught(base, demonstrations(shown, seed), folder / "sft", size, seed)
    before, after = reinforce(
        {"type": "single_turn"}, policy, files, folder / "rl", size, seed, rewards
    )
    start = {"SFT": before} if title == "rlpr" else {}
    return start | {f"SFT, {title}": after}


ARMS = [
    Arm(
        title.replace(" ", "-").replace(",", "").replace("'", ""),
        lambda *given, title=title: play(title, *given[:3]),
    )
    for title in REWARDS
]

if __name__ == "__main__":
    sys.exit(main(__doc__, Path(__file__), ARMS, ("all",), 0, SIZE))
