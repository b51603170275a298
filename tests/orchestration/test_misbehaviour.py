"""Agents, environments and scorers that misbehave cost the attempts in which they do, and nothing
else. The kinds are made in tests/support/misbehaviour.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from misbehaviour import AGENT, ENVIRONMENT, MOMENTS, NOW, Case, cases, played

from agentevo.agents import environment_thread
from agentevo.rollout import group, scoring

KINDS = cases()


@pytest.fixture(autouse=True)
def brief_goodbyes(monkeypatch):
    monkeypatch.setattr(group, "LETTING_GO_S", 0.2)
    monkeypatch.setattr(scoring, "LETTING_GO_S", 0.2)
    monkeypatch.setattr(environment_thread, "CLOSE_S", 0.3)
    monkeypatch.setattr("agentevo.event_loop.CLOSING_S", 0.2)


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


@pytest.mark.slow
@pytest.mark.parametrize("plays", [False, True], ids=["agent", "environment"])
def test_many_kinds_in_one_run(plays, tmp_path):
    """A sample that differs by nothing but the seed: at most one attempt in two misbehaves."""
    rng = random.Random(7)
    groups = 12
    wanted = list[Case]()
    places = (*ENVIRONMENT,) if plays else (*AGENT, "scorer", "async scorer")
    for moment in (*MOMENTS, *(["check"] if plays else [])):
        kinds = [
            case
            for case in KINDS
            if (case.place, case.moment) in {(place, moment) for place in places}
            and not case.deed.hangs
            and case.deed.name != "returns nothing"
        ]
        wanted += rng.sample(kinds, min(len(kinds), groups // 2))

    num_failed = check(wanted, tmp_path / "run", plays=plays, groups=groups)
    most = sum(case.num_failed for case in wanted)
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


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KINDS)), ids=lambda number: KINDS[number].name)
def test_every_kind_alone(number, tmp_path, monkeypatch):
    case = KINDS[number]
    if not case.deed.hangs:  # a busy machine may take longer to raise than what hangs is given
        monkeypatch.setattr(environment_thread, "CLOSE_S", 30.0)
    plays = case.place in ENVIRONMENT
    resumes = number % 5 == 0
    assert check([case], tmp_path / "run", plays=plays, resumes=resumes) == case.num_failed
