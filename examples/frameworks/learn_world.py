"""Trains one of the worlds: the cold start of the frameworks' examples, then GRPO with the world's
own tasks and reward, then success on its held-out tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cold_start import make_policy, open_box
from learn import options as arguments
from learn import reinforced


def learn_world(
    trained: Any,
    teacher: Any,
    *,
    opens: Callable[[str], str] = open_box,
    steps: int = 9,
    **options: Any,
) -> None:
    """Trains, prints success before and after, and leaves both in result.json. `trained`: what
    `agentevo.train` takes, with the sections `options`; `teacher`: an agent that plays hunts in the
    same world; `opens`: how a box is opened there."""
    name = Path(sys.argv[0]).stem
    given = arguments(Path("runs/worlds") / name, steps=steps).parse_args()
    policy = make_policy(given.out, teacher, conversations=given.conversations, opens=opens)
    reinforced(given, trained, model=str(policy), **options)
