"""Agents, environments and scorers that misbehave cost the attempts in which they do, and nothing
else. The kinds are made in tests/support/misbehaviour.py."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from misbehaviour import AGENT, ENVIRONMENT, NOW, Case, cases, played

from agentevo.agents import environment_thread
from agentevo.rollout import group, scoring

KINDS = cases()


AWAITED = (*AGENT, "async scorer")
"""Places in which the event loop waits for what is done."""


def first_of_each() -> set[str]:
    """Names of the cases alone in a run that CI takes: each misdeed once in the places alike."""
    seen: dict[tuple[str, str, bool], str] = {}
    for case in KINDS:
        place = "awaited" if case.place in AWAITED else case.place
        seen.setdefault((case.deed.name, place, case.moment == "check"), case.name)
    return set(seen.values())


def can_be_mixed(case: Case) -> bool:
    return not case.deed.hangs and case.deed.name != "returns nothing"


@dataclass(frozen=True)
class Mixture:
    """Cases that happen in one run; at each moment at most `most_at_once` of them."""

    name: str
    cases: list[Case]
    plays: bool
    most_at_once: int


def mixtures(
    name: str, places: tuple[str, ...], *, plays: bool, most_at_once: int
) -> list[Mixture]:
    """Every kind of these places that can be mixed, in as few runs as hold them."""
    kinds = [case for case in KINDS if case.place in places and can_be_mixed(case)]
    random.Random(7).shuffle(kinds)

    kinds.sort(key=lambda case: case.place)  # so that every run has as many of each place
    by_moment = defaultdict(list)
    for case in kinds:
        by_moment[case.moment].append(case)

    num_runs = -(-max(map(len, by_moment.values())) // most_at_once)
    return [
        Mixture(
            f"{name} {run}",
            [case for group in by_moment.values() for case in group[run::num_runs]],
            plays,
            most_at_once,
        )
        for run in range(num_runs)
    ]


MIXED = [
    *mixtures("agent", (*AGENT, "scorer", "async scorer"), plays=False, most_at_once=24),
    *mixtures("group scorer", ("group scorer",), plays=False, most_at_once=12),
    *mixtures("environment", (*ENVIRONMENT,), plays=True, most_at_once=6),
]


@pytest.fixture(autouse=True)
def brief_goodbyes(monkeypatch):
    monkeypatch.setattr(group, "CANCEL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(scoring, "CANCEL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(environment_thread, "CLOSE_S", 0.3)
    monkeypatch.setattr("agentevo.runtime.event_loop.CLOSE_TIMEOUT_S", 0.2)


def check(
    wanted: list[Case], folder: Path, *, plays: bool, resumes: bool = True, **more: int
) -> int:
    """The run comes to its end, every case has happened, and the run can be resumed. Returns how
    many attempts failed."""
    run, view = played(wanted, folder, plays=plays, **more)
    assert run.summary["steps"] == 2
    assert not NOW.cases, f"these did not happen: {[case.name for case in NOW.cases]}"

    failed = run.trajectories(status="failed")
    assert all(one.error for one in failed) and bool(failed) == (" failed: " in view.text)

    if resumes:
        resumed, _ = played(wanted, folder, plays=plays, resume=True, steps=3, **more)
        assert resumed.summary["steps"] == 3

    return len(failed)


def test_there_are_hundreds_of_kinds():
    assert len({case.name for case in KINDS}) == len(KINDS) >= 300


def test_every_kind_that_can_be_mixed_is_in_one_mixture():
    mixed = [case.name for mixture in MIXED for case in mixture.cases]
    assert sorted(mixed) == sorted(case.name for case in KINDS if can_be_mixed(case))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MIXED)), ids=lambda number: MIXED[number].name)
def test_every_kind_beside_others(number, tmp_path):
    """Every kind happens in one of a few runs, and at most one attempt in two misbehaves. What
    hangs, and what is no failure of an attempt, is alone below."""
    mixture = MIXED[number]
    num_failed = check(
        mixture.cases,
        tmp_path / "run",
        plays=mixture.plays,
        resumes=number % 5 == 0,
        groups=3 * mixture.most_at_once // 2,
    )
    most = sum(case.num_failed for case in mixture.cases)
    assert most // 2 <= num_failed <= most, "two of them may happen in one attempt"


@pytest.mark.slow
@pytest.mark.parametrize("plays", [False, True], ids=["agent", "environment"])
def test_many_kinds_beside_the_trainer(plays, tmp_path):
    """On one event loop with the trainer, the sampler's service and its leases."""
    rng = random.Random(8)
    places = ENVIRONMENT if plays else (*AGENT, "scorer", "async scorer")
    kinds = [
        Case(case.deed, case.place, "training")
        for case in KINDS
        if case.place in places
        and case.moment != "check"
        and not case.deed.hangs
        and case.deed.name != "returns nothing"
    ]
    wanted = rng.sample(kinds, 12)
    num_failed = check(wanted, tmp_path / "run", plays=plays, groups=12, staleness=1)
    assert 0 < num_failed <= sum(case.num_failed for case in wanted)


FIRST = first_of_each()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number,
            id=case.name,
            marks=pytest.mark.slow
            if case.name in FIRST and not can_be_mixed(case)
            else pytest.mark.soak,
        )
        for number, case in enumerate(KINDS)
    ],
)
def test_every_kind_alone(number, tmp_path, monkeypatch):
    case = KINDS[number]
    if not case.deed.hangs:  # a busy machine may take longer to raise than what hangs is given
        monkeypatch.setattr(environment_thread, "CLOSE_S", 30.0)
    plays = case.place in ENVIRONMENT
    resumes = number % 5 == 0
    assert check([case], tmp_path / "run", plays=plays, resumes=resumes) == case.num_failed
