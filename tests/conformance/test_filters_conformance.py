"""Filters and length rewards against their definitions, whatever the order."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentevo.algorithms import filters, shaping

from . import slow_filters as slow

rewards = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-5, 5), st.just(0.1))
batches = st.lists(
    st.tuples(rewards, st.sampled_from(["a", "b", "c", ("d", 1), 5])), min_size=1, max_size=24
)


def columns(rows):
    return [row[0] for row in rows], [row[1] for row in rows]


def groups_of(kept, ids):
    """Groups that stayed; also checks that groups stay or go as a whole, and the order."""
    stayed = {ids[position] for position in kept}
    assert kept == [position for position, name in enumerate(ids) if name in stayed]
    return stayed


@given(batches, st.integers(1, 6))
def test_dynamic_sampling_fills_the_batch_in_order(rows, wanted):
    values, ids = columns(rows)
    kept = filters.dynamic_sampling(values, ids, wanted=wanted)
    useful = [name for name in dict.fromkeys(ids) if name in slow.informative(values, ids)]
    assert groups_of(kept, ids) == set(useful[:wanted])


@given(batches, st.floats(0.01, 1.0), st.randoms(use_true_random=False))
def test_starpo_s_keeps_the_groups_with_the_highest_deviation(rows, keep, random):
    values, ids = columns(rows)
    spread = {name: slow.std(members) for name, members in slow.groups(values, ids).items()}
    stayed = groups_of(filters.starpo_s(values, ids, keep=keep), ids)
    assert len(stayed) == max(1, int(keep * len(spread) + 1e-9))
    assert (
        min(spread[name] for name in stayed)
        >= max((s for name, s in spread.items() if name not in stayed), default=0.0) - 1e-12
    )

    distinct = sorted(spread.values())
    assume(all(b - a > 1e-9 for a, b in itertools.pairwise(distinct)))
    random.shuffle(rows)
    assert groups_of(filters.starpo_s(*columns(rows), keep=keep), columns(rows)[1]) == stayed


def test_starpo_s_keeps_two_of_eight():
    values = [x for group in range(8) for x in (0.0, float(group))]
    ids = [group for group in range(8) for _ in range(2)]
    assert filters.starpo_s(values, ids, keep=0.25) == [12, 13, 14, 15]


@given(st.lists(rewards, min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_deviation(values, random):
    exact = filters.reward_std(values)
    assert exact == pytest.approx(slow.std(values), rel=1e-9, abs=1e-12)
    assert exact > 0 if min(values) < max(values) else exact == 0
    random.shuffle(values)
    assert filters.reward_std(values) == exact
    assert filters.reward_std([x * 1e250 for x in values]) == pytest.approx(exact * 1e250, rel=1e-9)


filled = st.lists(st.tuples(rewards, st.sampled_from(["a", "b", "c"])), max_size=8).map(
    lambda rows: [*rows, *((value, name) for name in "abc" for value in (0.0, 0.5))]
)


@settings(deadline=None)
@given(
    st.lists(filled, min_size=1, max_size=9),
    st.floats(0, 2),
    st.floats(0, 1),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_rlpr_std_follows_the_recipe_through_restarts_and_refills(
    steps, beta, decay, record_from, more
):
    make = {"beta": beta, "decay": decay, "record_from": record_from, "start": record_from + more}
    batches = [columns(rows) for rows in steps]
    expected = slow.rlpr(batches, **make)
    one = filters.RLPRStd(**make)
    for (values, ids), wanted in zip(batches, expected, strict=True):
        stayed = set()
        for name in ("a", "b", "c"):  # sampled in three rounds of one step
            members = [(r, g) for r, g in zip(values, ids, strict=True) if g == name]
            limit = one.threshold
            near = limit is not None and abs(slow.std([r for r, _ in members]) - limit) < 1e-9
            kept = groups_of(one.filter(*columns(members)), columns(members)[1])
            stayed |= (wanted & {name}) if near else kept
            fresh = filters.RLPRStd(**make)
            fresh.load_state_dict(json.loads(json.dumps(one.state_dict())))
            one = fresh

        assert stayed == wanted

        one.end_step()


def test_rlpr_std_waits_for_something_to_record_and_ignores_groups_of_one():
    one = filters.RLPRStd(record_from=1, start=2)
    one.filter([1.0], ["alone"])
    one.end_step()
    assert one.threshold is None and one.filter([0.0, 2.0], ["x", "x"]) == [0, 1]
    one.end_step()
    assert one.threshold == pytest.approx(0.5 * math.sqrt(2))
    assert one.filter([1.0, 0.0, 2.0], ["alone", "x", "x"]) == [1, 2]


lengths = st.integers(0, 300)


@given(
    st.lists(st.tuples(rewards, lengths), max_size=9),
    st.integers(1, 200),
    st.integers(1, 200),
    st.floats(0, 3),
)
def test_soft_overlong(rows, buffer, more, penalty):
    values, sizes = columns(rows)
    shaped = shaping.soft_overlong(
        values, sizes, max_length=buffer + more, buffer=buffer, penalty=penalty
    )
    expected = [r + penalty * slow.soft_overlong(n, buffer + more, buffer) for r, n in rows]
    assert shaped == pytest.approx(expected)


@given(st.lists(st.tuples(rewards, lengths), max_size=9), st.floats(0, 1))
def test_linear_length(rows, per_token):
    assert shaping.linear_length(*columns(rows), per_token=per_token) == pytest.approx(
        [r - per_token * n for r, n in rows]
    )


@given(st.lists(st.tuples(lengths, st.booleans()), max_size=9), st.integers(1, 250))
def test_cosine_length(rows, max_length):
    sizes, successes = columns(rows)
    shaped = shaping.cosine_length(sizes, successes, max_length=max_length)
    for (size, success), value in zip(rows, shaped, strict=True):
        low, high = (1.0, 2.0) if success else (0.0, -10.0)
        assert value == pytest.approx(
            -10.0 if size >= max_length else slow.cosine(size, max_length, low, high)
        )


def test_cosine_length_prefers_short_successes_and_long_failures():
    assert shaping.cosine_length([0, 0], [True, False], max_length=10) == [2.0, -10.0]
    short, long = shaping.cosine_length([2, 8], [True, True], max_length=10)
    assert 2 > short > long > 1
    short, long = shaping.cosine_length([2, 8], [False, False], max_length=10)
    assert -10 < short < long < 0


@given(
    st.lists(
        st.tuples(st.floats(-2, 2), lengths, st.booleans(), st.sampled_from("ab")), max_size=9
    ),
    st.floats(0, 2),
)
def test_relative_length(rows, weight):
    shaped = shaping.relative_length(*([row[i] for row in rows] for i in range(4)), weight=weight)
    for (reward, size, success, group), value in zip(rows, shaped, strict=True):
        sizes = [row[1] for row in rows if row[3] == group]
        assert value == pytest.approx(reward + weight * slow.kimi(size, sizes, success))


def test_a_state_of_something_else_is_refused():
    with pytest.raises(ValueError, match="not a state"):
        filters.RLPRStd().load_state_dict({})


@pytest.mark.slow
def test_the_entries_and_the_configuration_need_no_torch():
    imports = "import sys, agentevo.algorithms.describe, agentevo.config"
    code = f"{imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
