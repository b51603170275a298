"""Actions of structured spaces as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gymnasium import spaces

from agentevo.environments.json_actions import (
    ActionError,
    can_be_said,
    describe_space,
    read_action,
    write_action,
)

TORQUE = spaces.Box(-2.0, 2.0, (1,), np.float32)
MOVE = spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 0.7]), dtype=np.float32)
FREE = spaces.Box(-np.inf, np.inf, (2, 2))
PIXELS = spaces.Box(0, 255, (2,), np.uint8)
MANY = spaces.Box(-np.arange(1, 10.0), np.arange(1, 10.0))
CLICK = spaces.Dict(
    {
        "kind": spaces.Discrete(3, start=1),
        "at": PIXELS,
        "keys": spaces.Text(5, charset="ab"),
        "more": spaces.Tuple((spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3]))),
    }
)
SPACES = [TORQUE, MOVE, FREE, PIXELS, MANY, CLICK, spaces.Box(0, 1, ()), spaces.MultiBinary((2, 2))]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_what_is_written_is_read_as_the_same_action(space):
    assert can_be_said(space)
    space.seed(3)
    for _ in range(20):
        drawn = space.sample()
        read = read_action(write_action(drawn), space)
        assert space.contains(read)
        assert write_action(read) == write_action(drawn)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (TORQUE, "a list of 1 number within [-2, 2]"),
        (MOVE, "a list of 2 numbers within [-1, 1], [0, 0.7], in this order"),
        (FREE, "a list of 2 lists of 2 numbers"),
        (PIXELS, "a list of 2 whole numbers within [0, 255]"),
        (MANY, "a list of 9 numbers within [-9, 9], some within less"),
        (spaces.Box(0, np.inf, ()), "a number within [0, inf]"),
        (
            CLICK,
            'an object {"kind": a whole number from 1 to 3, "at": a list of 2 whole numbers within '
            '[0, 255], "keys": a text of 1 to 5 characters, "more": a list of [a list of 2 whole '
            "numbers within [0, 1], a list of 2 whole numbers within [0, 1], [0, 2], in this "
            "order]}",
        ),
    ],
)
def test_the_form_of_an_action_is_said_with_its_bounds(space, words):
    assert sorted(describe_space(space)) == sorted(words)  # Dict sorts its keys


SPEED = spaces.Box(-1, 1, ())
GOOD = {"kind": 1, "at": [0, 255], "keys": "ab", "more": [[0, 1], [1, 2]]}


@pytest.mark.parametrize(
    ("space", "text", "words"),
    [
        (TORQUE, "[2.5]", "the action is 2.5: give a list of 1 number within [-2, 2]"),
        (TORQUE, "left", "it is not JSON"),
        (TORQUE, "[NaN]", "the action is NaN"),
        (TORQUE, "1e999", "the action is Infinity"),
        (TORQUE, "[true]", "the action is true"),
        (TORQUE, '["1"]', 'the action is "1"'),
        (TORQUE, "[1, 1]", "the action has 2 entries"),
        (TORQUE, "{}", "the action is {}"),
        (MOVE, "1", "the action is not a list"),
        (MOVE, "[0, 0.8]", "number 2 of the action is 0.8"),
        (FREE, "[[1, 2], [3]]", "entry 2 of the action has 1 entries"),
        (FREE, "[[1, 2], [3, 1e39]]", "number 4 of the action is 1e+39"),
        (FREE, "[[[], []], [[], []]]", "entry 1 of entry 1 of the action is a list"),
        (FREE, "[[1, 2], [3, [4]]]", "entry 2 of entry 2 of the action is a list"),
        (MOVE, "[[], []]", "entry 1 of the action is a list"),
        (SPEED, "[0.1, 0.2]", "the action is a list: give a number within [-1, 1]"),
        (SPEED, "[]", "the action is a list"),
        (SPEED, f"[{'0,' * 500_000}0]", "the action is a list"),
        (SPEED, '"\\ud800"', 'the action is "?"'),
        (TORQUE, "[[1], [2]]", "the action has 2 entries"),
        (TORQUE, "[[1]]", "entry 1 of the action is a list"),
        (spaces.MultiBinary(3), "[[], [], []]", "entry 1 of the action is a list"),
        (spaces.MultiDiscrete([2, 3]), "[[0], 1]", "entry 1 of the action is a list"),
        (PIXELS, "[0.5, 1]", "number 1 of the action is 0.5"),
        (PIXELS, "[1, 256]", "number 2 of the action is 256"),
        (PIXELS, f"[1, {10**30}]", "number 2 of the action is 1000"),
        (CLICK, "[]", "the action is not an object"),
        (CLICK, json.dumps({"kind": 1}), "the action lacks 'at'"),
        (CLICK, json.dumps(GOOD | {"x": 1}), "the action has an unknown key 'x'"),
        (CLICK, json.dumps(GOOD | {"kind": 0}), '"kind" is 0: give a whole number from 1 to 3'),
        (CLICK, json.dumps(GOOD | {"keys": "abc"}), '"keys" is not such a text'),
        (CLICK, json.dumps(GOOD | {"at": [0]}), '"at" has 1 entries'),
        (CLICK, json.dumps(GOOD | {"more": [[0, 1]]}), '"more" is not such a list'),
        (CLICK, json.dumps(GOOD | {"more": [[0, 2], [1, 2]]}), 'number 2 of entry 1 of "more"'),
    ],
)
def test_what_is_no_action_is_refused_with_the_place_and_the_bounds(space, text, words):
    with pytest.raises(ActionError) as refusal:
        read_action(text, space)
    assert words in str(refusal.value)


def test_numbers_are_read_as_the_space_keeps_them():
    assert read_action("-1.5", TORQUE) == np.float32(-1.5)
    assert read_action("[1, 0.7]", MOVE)[1] == np.float32(0.7)
    assert MOVE.contains(read_action("[1, 0.7]", MOVE))
    assert CLICK.contains(read_action(json.dumps(GOOD), CLICK))


def test_spaces_without_a_form_in_json():
    graph = spaces.Graph(spaces.Discrete(2), None)
    assert not can_be_said(graph)
    assert not can_be_said(spaces.Dict({"a": graph}))
