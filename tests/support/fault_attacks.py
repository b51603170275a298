"""Attacks on a run: its processes are killed and started again until as many were killed as was
asked for, and the run has ended."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from fault_processes import AIMED_AT, PHASES_OF, Component, PlannedKill

RARE_PHASES = ("begin", "replay", "checkpoint", "prune", "weights written")
"""Phases that most processes come to once at best."""


INSIDE = 0.65
"""Share of random kills that are planned inside a phase; the others come from outside at any
time."""


FRUITLESS = 6
"""Starts in a row that may make no progress. A task whose workers die 20 times is set aside as
poison, as it should be."""


FRUITFUL_S = 10.0
"""How long a process may then take to make progress."""


SPARE = 1.25
"""How many random kills there may be for each that was asked for: some phases are hard to hit."""


AIMED_SPARE = 3.0
"""How many kills there may be for each phase, where every phase is aimed at once."""


def finish(parts: Sequence[Component], *, within_s: float = 300.0) -> None:
    """Starts them, and waits until the last one has ended the run; then ends the others. Raises
    AssertionError if one fails."""
    ends = time.monotonic() + within_s
    for part in parts:
        part.start()

    while parts[-1].process.is_alive():
        assert time.monotonic() < ends, _stuck(parts, Tally())
        wait([parts[-1].process.sentinel], timeout=1.0)

    for part in reversed(parts):
        code = part.reap() if part is parts[-1] else part.end()
        assert code == 0, f"{part.name} ended with {code}:\n{part.tail()}"


@dataclass
class Tally:
    """What an attack has done."""

    kills: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    """Phase -> kills while it ran; "-" for kills outside of all."""
    aimed: Counter[str] = field(default_factory=Counter)
    """Phase -> kills planned in it, whether or not the process came to it."""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kills} kills in {self.seconds:.0f} s: " + ", ".join(
            f"{count} in {name}" for name, count in self.phases.most_common()
        )


def attack(
    members: Sequence[Component],
    victim: Component,
    *,
    kills: int | None,
    rng: random.Random,
    within_s: float,
) -> Tally:
    """Kills the victim `kills` times, and a few times more if some phase was not hit, starting it
    again each time at once; then lets the run end, which its last member does by ending itself.
    `None`: once in each phase of AIMED_AT, and never from outside. Raises AssertionError if anybody
    ends in another way, or the run takes longer than `within_s`."""
    began = time.monotonic()
    tally = Tally()
    last = members[-1]
    reached = (AIMED_AT if kills is None else PHASES_OF)[victim.kind]
    phases = deque(rng.sample(reached, len(reached)))
    inside = INSIDE if kills is not None else 1.0
    most = int(SPARE * kills if kills is not None else AIMED_SPARE * len(phases))
    steps = last.config.trainer.steps
    assert steps > most, "each kill needs a step"

    try:
        last.marks.hold_at = 1
        for member in members:
            if member is not victim:
                member.start()

        while tally.kills < (kills or 0) or (
            tally.kills < most and not set(phases) <= set(tally.phases)
        ):
            _start_and_kill(members, victim, phases, rng, tally, inside=inside)
            last.marks.hold_at = min(steps - 1, int(steps * (tally.kills + 1) / most))
            assert time.monotonic() < began + within_s, _stuck(members, tally)

        last.marks.hold_at = 0
        victim.start()
        while last.process.is_alive():
            assert time.monotonic() < began + within_s, _stuck(members, tally)
            wait([last.process.sentinel], timeout=1.0)
            _check_others(members, None)

        code = last.reap()
        assert code == 0, f"{last.name} ended with {code}:\n{last.tail()}"
        for member in members[:-1]:
            code = member.end()
            assert code == 0, f"{member.name}, asked to end, ended with {code}:\n{member.tail()}"
    finally:
        for member in members:
            if member.process is not None and member.process.is_alive():
                member.kill()

    tally.seconds = time.monotonic() - began
    return tally


def _start_and_kill(
    members: Sequence[Component],
    victim: Component,
    phases: deque[str],
    rng: random.Random,
    tally: Tally,
    *,
    inside: float,
) -> None:
    """Starts the victim once and kills it. The first of `phases` moves to the end once it was hit,
    or was missed often enough."""
    last = members[-1]
    planned = None
    limit_s = rng.uniform(0.0, 2.0 * victim.progress_s)
    patient = victim.num_fruitless >= FRUITLESS
    if patient:
        limit_s = FRUITFUL_S
    elif rng.random() < inside:
        phase = phases[0]
        number = 1 if phase in RARE_PHASES else rng.randint(1, 2)
        planned = PlannedKill(phase, number, rng.uniform(0.0, 1.2 * victim.took_s[phase]))
        # A phase that comes ends the wait; one that does not costs it whole. Beside others a start
        # may take several times what the last one took.
        limit_s = 0.5 + 5.0 * victim.progress_s

    victim.start(planned)
    ends = time.monotonic() + limit_s
    while (
        victim.process.is_alive()
        and last.process.is_alive()
        and (left := ends - time.monotonic()) > 0
    ):
        if patient and victim.marks.progress_s:
            break
        wait(
            [member.process.sentinel for member in members],
            timeout=min(left, 0.05) if patient else left,
        )
        _check_others(members, victim)

    assert victim is last or last.process.is_alive(), (
        f"{last.name} ended by itself with {last.process.exitcode}:\n{last.tail()}"
    )
    if victim.process.is_alive():
        victim.process.kill()

    code = victim.reap()
    assert code == -signal.SIGKILL, f"{victim.name} ended by itself with {code}:\n{victim.tail()}"

    where = victim.marks.where()
    tally.kills += 1
    tally.phases.update(where or ["-"])

    if planned is not None:
        tally.aimed[planned.phase] += 1
        if planned.phase in where or tally.aimed[planned.phase] % 3 == 0:
            phases.rotate(-1)


def _check_others(members: Sequence[Component], victim: Component | None) -> None:
    for member in members[:-1]:
        if (
            member is not victim
            and not member.process.is_alive()
            and (member.kind != "sample" or member.process.exitcode)
        ):
            raise AssertionError(
                f"{member.name} ended by itself with {member.process.exitcode}:\n{member.tail()}"
            )


def _stuck(members: Sequence[Component], tally: Tally) -> str:
    return "\n".join(
        [
            f"the run does not end ({tally}):",
            *(
                f"--- {member.name}: in {member.marks.where()}\n{member.tail(15)}"
                for member in members
            ),
        ]
    )
