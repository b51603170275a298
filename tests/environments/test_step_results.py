"""What reset and step return, in Gymnasium's form and in the old one of gym."""

from __future__ import annotations

import pytest

from agentevo.environments.step_results import read_reset, read_step
from agentevo.errors import EnvironmentFailure


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (("o", 1.0, True, False, {}), ("o", 1.0, True, False, {})),
        (("o", 1.0, True, {}), ("o", 1.0, True, False, {})),
        (("o", 0.0, False, {"a": 1}), ("o", 0.0, False, False, {"a": 1})),
        (
            ("o", 0.0, True, {"TimeLimit.truncated": True}),
            ("o", 0.0, False, True, {"TimeLimit.truncated": True}),
        ),
        (
            ("o", 0.0, True, {"TimeLimit.truncated": False}),
            ("o", 0.0, True, False, {"TimeLimit.truncated": False}),
        ),
    ],
)
def test_a_step_has_five_values_or_the_four_of_the_old_api(result, expected):
    assert read_step(result) == expected


@pytest.mark.parametrize(
    ("result", "words"), [(("o", 1.0, True), "3 values"), ("o", "a str"), (None, "a NoneType")]
)
def test_other_results_of_a_step_are_refused(result, words):
    with pytest.raises(EnvironmentFailure, match=rf"step\(\) returned {words}: return \(obs"):
        read_step(result)


def test_a_reset_gives_the_observation_with_or_without_an_info():
    assert read_reset(("o", {})) == "o"
    assert read_reset("o") == "o"
    assert read_reset((1, 2)) == (1, 2)


def test_halves_of_surrogate_pairs_are_in_no_observation():
    assert read_step(("a \ud800 é", 1.0, True, False, {}))[0] == "a ? é"
    assert read_step(("\udfff", 1.0, True, {}))[0] == "?"
    assert read_reset(("\ud800", {})) == read_reset("\ud800") == "?"
    assert read_reset("\U0001f600") == "\U0001f600"
