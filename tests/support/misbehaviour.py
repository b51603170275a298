"""Misdeeds (misdeeds.py) in places, at moments: `cases()` makes hundreds of kinds of them, and
`played` has one of them happen, or many at once, in a small run of two steps."""

from __future__ import annotations

import asyncio
import io
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from misdeeds import (
    ASKED_BY_AGENTS,
    DONE_BY_AGENTS,
    FINE,
    HANGS,
    RAISED,
    RESET,
    RETURNED_BY_AGENTS,
    RETURNED_BY_GROUP_SCORERS,
    RETURNED_BY_SCORERS,
    STEPPED,
    TIMEOUT_S,
    Deed,
)

import agentevo
from agentevo.agents import Reply
from agentevo.api.run import Run, train
from agentevo.config import build_config
from agentevo.observability import LiveView

MOMENTS = ("first evaluation", "first step", "mid-run", "last evaluation")
AGENT = ("before generate", "after generate", "tool")
SCORER = ("scorer", "async scorer", "group scorer")
ENVIRONMENT = ("make", "reset", "step", "close")


STEPPING = ("first step", "mid-run", "later")
"""The moments of the moment `training`."""


@dataclass(frozen=True)
class Case:
    deed: Deed
    place: str
    moment: str

    @property
    def name(self) -> str:
        return f"{self.deed.name}, {self.place}, {self.moment}"

    @property
    def num_failed(self) -> int:
        """Attempts that it may cost."""
        if not self.deed.fails or self.moment == "check":
            return 0
        if self.deed.hangs and self.place == "close":
            return 0  # what was played is over, and counts
        return 2 if self.place == "group scorer" and "step" in STEPS.get(self.moment, "step") else 1


STEPS = {
    "first evaluation": "before",
    "first step": "step 1",
    "mid-run": "step 2",
    "last evaluation": "after",
    "check": "",
}


@dataclass
class _Now:
    """What is to be done in the run that is under way."""

    cases: list[Case] = field(default_factory=list)
    moment: str = "check"
    run: int = 0
    """Counts the runs: an environment that hung in an earlier one is closed late, and does nothing
    in this one."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def due(self, *places: str) -> Deed | None:
        """The deed that is to be done here and now; each once."""
        with self.lock:
            for case in self.cases:
                moments = STEPPING if case.moment == "training" else (case.moment,)
                if case.place in places and self.moment in moments:
                    self.cases.remove(case)
                    return case.deed
        return None


NOW = _Now()


class Watch(LiveView):
    """Says nothing, and tells the deeds what time it is."""

    def __init__(self) -> None:
        super().__init__("test", stream=io.StringIO(), plain=True)

    def phase(self, name: str, detail: str = "") -> None:
        if name in ("evaluating", "sampling"):
            moments = {step: moment for moment, step in STEPS.items()}
            NOW.moment = moments.get(detail, "later")
        super().phase(name, detail)

    @property
    def text(self) -> str:
        return str(self._stream.getvalue())


def cases() -> list[Case]:
    """Every kind. Moments take turns over what is done in the same place."""
    kinds: list[tuple[Deed, str]] = [
        (deed, place)
        for place, deeds in (
            ("before generate", [*RAISED, *RETURNED_BY_AGENTS, *DONE_BY_AGENTS]),
            ("after generate", [*RAISED, *RETURNED_BY_AGENTS, *DONE_BY_AGENTS, *ASKED_BY_AGENTS]),
            ("tool", [*RAISED, *DONE_BY_AGENTS]),
            ("scorer", [*RAISED, *RETURNED_BY_SCORERS, HANGS]),
            ("async scorer", [*RAISED, *RETURNED_BY_SCORERS, *DONE_BY_AGENTS]),
            ("group scorer", [*RAISED, *RETURNED_BY_GROUP_SCORERS]),
            ("make", [*RAISED, HANGS]),
            ("reset", [*RAISED, *RESET, HANGS]),
            ("step", [*RAISED, *STEPPED, HANGS]),
            ("close", [*RAISED, HANGS]),
        )
        for deed in deeds
    ]
    turns = {place: itertools.cycle(MOMENTS) for _, place in kinds}
    made = [Case(deed, place, next(turns[place])) for deed, place in kinds]
    return made + [
        Case(deed, place, "check") for place in ("close", "reset") for deed in [*RAISED, HANGS]
    ]


async def agent(task: Any, policy: Any) -> Any:
    if (deed := NOW.due("before generate")) is not None:
        return await _outcome(deed, policy, task)

    reply = await policy.generate([agentevo.Message("user", task.query)])
    if (deed := NOW.due("tool")) is not None:
        async with policy.call("tool", "search"):
            return await _outcome(deed, policy, task)

    if (deed := NOW.due("after generate")) is not None:
        return await _outcome(deed, policy, task)

    return len(reply.text) % 3 / 2


async def _outcome(deed: Deed, policy: Any, task: Any) -> Any:
    returned = deed.do(policy, task)
    returned = await returned if asyncio.iscoroutine(returned) else returned
    return returned.turn * 1.0 if isinstance(returned, Reply) else returned


@agentevo.reward("unruly_scorer")
def scorer(completion: str, task: Any) -> Any:
    deed = NOW.due("scorer")
    return len(completion) % 3 / 2 if deed is None else deed.do(None, task)


@agentevo.reward("unruly_async_scorer")
async def async_scorer(completion: str, task: Any) -> Any:
    deed = NOW.due("async scorer")
    return len(completion) % 3 / 2 if deed is None else await _outcome(deed, None, task)


@agentevo.reward("unruly_group_scorer")
class GroupScorer:
    def __init__(self, config: Any) -> None:
        pass

    async def score_group(self, trajectories: Sequence[Any], task: Any) -> Any:
        deed = NOW.due("group scorer")
        if deed is not None:
            return deed.do(None, task)
        return [float(number % 2) for number, _ in enumerate(trajectories)]


@agentevo.environment("unruly")
class Environment(agentevo.TextEnvironment):
    """Two moves; pays for the length of what is said."""

    instructions = "Say up or down."

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._run = NOW.run
        self._do("make")

    def _do(self, place: str) -> Any:
        deed = NOW.due(place) if self._run == NOW.run else None
        return None if deed is None else (deed.do(None, None), deed)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.left = 2
        if (done := self._do("reset")) is not None and not done[1].hangs:
            return done[0]
        return "up or down", {}

    def step(self, action: str) -> Any:
        self.left -= 1
        if (done := self._do("step")) is not None and not done[1].hangs:
            return done[0]
        return "down or up", len(action) / 10, self.left == 0, False, FINE

    def close(self) -> None:
        self._do("close")


def played(
    wanted: Sequence[Case],
    folder: Path,
    *,
    plays: bool,
    resume: bool = False,
    steps: int = 2,
    groups: int = 2,
    staleness: int = 0,
) -> tuple[Run, Watch]:
    """A run in which these cases happen. `plays` an environment, or else it is an agent function
    with the scorers that the cases need. When it is resumed, nothing happens."""
    NOW.cases = [] if resume else list(wanted)
    NOW.moment = "check"
    NOW.run += 1
    hangs = any(case.deed.hangs for case in wanted)
    tiny = {"hidden_size": 16, "num_layers": 1, "num_heads": 1, "context_length": 256}

    timeout_s = TIMEOUT_S if hangs else 120.0
    tree: dict[str, Any] = {
        "model": {"name": "tiny", "tiny": tiny | {"tokenizer": "word" if plays else "byte"}},
        "sampling": {"max_new_tokens": 4},
        "agent": {"timeout_s": timeout_s},
        "trainer": {"steps": steps, "groups_per_step": groups, "group_size": 2},
        "evaluation": {"tasks": groups, "every": 0, "samples": 0},
        "tracking": {"tensorboard": False, "report": False},
        "rollout": {"staleness": staleness, "poll_s": 0.01},
        "run": {"seed": 3, "threads": 1},
    }
    tasks = None
    if plays:
        tree["environment"] = {"type": "unruly", "max_actions": 2}
        tree["agent"] |= {"format": "plain", "max_turns": 2}
    else:
        scorers = [place for place in SCORER if any(case.place == place for case in wanted)]
        tree["rewards"] = [
            {"name": f"unruly_{place.replace(' ', '_')}", "timeout_s": timeout_s}
            for place in scorers
        ]
        tasks = [agentevo.Task(id=f"t{n}", query="x" * n) for n in range(1, 5 * groups + 1)]

    config = build_config(tree, [f"run.dir={folder}"], needs_environment=plays)
    view = Watch()
    run = train(config, agent=None if plays else agent, tasks=tasks, view=view, resume=resume)
    return run, view
