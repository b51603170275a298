import itertools
import random
from fractions import Fraction

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.environments.countdown import (
    CountdownConfig,
    CountdownEnvironment,
    evaluate,
    random_expression,
    random_expression_success,
    solve,
)
from agentevo.errors import EnvironmentFailure
from examples import examples


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("1+2*3", 7, [1, 2, 3]),
        ("(1 + 2) * 3", 9, [1, 2, 3]),
        ("7/2", Fraction(7, 2), [7, 2]),
        ("-3 + 5", 2, [3, 5]),
        ("8 - (3 - -1)", 4, [8, 3, 1]),
        ("5/(2-2)", None, [5, 2, 2]),
    ],
)
def test_evaluate(text: str, value: Fraction | None, numbers: list[int]) -> None:
    made = evaluate(text)
    assert made is not None and made[0] == value and sorted(made[1]) == sorted(numbers)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 +",
        "(1",
        "2 ** 9",
        "7 // 2",
        "__import__('os')",
        "1 if 1 else 2",
        "1.5 + 2",
        "True + 1",
        "a + 1",
        "1, 2",
        "(1)(2)",
        "~1",
        "1 = 1",
        "07 + 1",
        "1e3",
        "\x00",
        "1+" * 150 + "1",
        "(" * 99 + "1",
        "1\n+2",
    ],
)
def test_evaluate_refuses(text: str) -> None:
    assert evaluate(text) is None


def test_evaluate_keeps_to_the_operations() -> None:
    assert evaluate("2*3", "+-") is None
    assert evaluate("-2+3", "+*") is None
    assert evaluate("2+3", "+*") == (5, [2, 3])


def environment(numbers: list[int], target: int, **options: object) -> CountdownEnvironment:
    made = CountdownEnvironment(CountdownConfig.model_validate(options))
    made.reset(seed=0)
    made.numbers = numbers
    made.target = target
    made._solution = None
    return made


@pytest.mark.parametrize(
    ("action", "reward", "valid", "success"),
    [
        ("(2 + 3) * 4", 1.0, True, True),
        ("4*(3+2)", 1.0, True, True),
        ("2 + 3 + 4", 0.1, True, False),
        ("5 * 4", 0.0, False, False),  # 5 was not given
        ("2 * 3 * 4 - 4", 0.0, False, False),  # 4 twice
        ("4 * 3 + 4 * 2", 0.0, False, False),
        ("4 * 5 = 20", 0.0, False, False),
        ("twenty", 0.0, False, False),
    ],
)
def test_rewards(action: str, reward: float, valid: bool, success: bool) -> None:
    _, paid, terminated, truncated, info = environment([2, 3, 4], 20).step(action)
    assert paid == reward and (info["valid"], info["success"]) == (valid, success)
    assert terminated is valid and truncated is not valid


def test_division_by_zero_is_only_wrong() -> None:
    _, reward, _, _, info = environment([2, 2, 5], 7, operations="+-/").step("5/(2-2)")
    assert reward == 0.1 and info["valid"] and not info["success"]


def all_values(numbers: list[int], operations: str) -> set[Fraction]:
    """Values of all expressions over all the numbers, by splitting instead of joining."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}

    found = set()
    for size in range(1, len(numbers)):
        for chosen in itertools.combinations(range(len(numbers)), size):
            left = all_values([numbers[index] for index in chosen], operations)
            right = all_values(
                [number for index, number in enumerate(numbers) if index not in chosen], operations
            )
            for a, b in itertools.product(left, right):
                for sign in operations:
                    if sign != "/" or b:
                        found.add(
                            {"+": a + b, "-": a - b, "*": a * b}[sign] if sign != "/" else a / b
                        )

    return found


@given(
    numbers=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    operations=st.sampled_from(["+-", "+-*", "+-*/", "*"]),
)
@settings(max_examples=examples(15), deadline=None)
def test_solve_finds_exactly_what_exists(numbers: list[int], operations: str) -> None:
    reachable = all_values(numbers, operations)
    for target in range(-2, 30, 4):
        found = solve(numbers, target, operations)
        assert (found is not None) == (target in reachable)
        if found is not None:
            made = evaluate(found, operations)
            assert made is not None and made[0] == target and sorted(made[1]) == sorted(numbers)


@pytest.mark.slow
def test_random_rate_is_exact() -> None:
    assert random_expression_success([2, 3], 5, "+-") == pytest.approx(1 / 2)
    assert random_expression_success([2, 3], 1, "+-*/") == pytest.approx(1 / 8)

    rng = random.Random(0)
    for numbers, target in (([1, 2, 3], 6), ([3, 3, 8, 8], 24), ([1, 1, 2, 4], 4)):
        exact = random_expression_success(numbers, target)
        drawn = [evaluate(random_expression(numbers, "+-*/", rng)) for _ in range(4000)]
        share = sum(made is not None and made[0] == target for made in drawn) / 4000
        assert share == pytest.approx(exact, abs=4 * (exact * (1 - exact) / 4000) ** 0.5 + 1e-9)


@pytest.mark.slow
def test_sampled_rate_of_five_numbers_is_near_the_exact_one() -> None:
    made = CountdownEnvironment(CountdownConfig(num_numbers=5, operations="+-"))
    made.reset(seed=2)
    exact = random_expression_success(made.numbers, made.target, "+-")
    assert made.baselines().random == pytest.approx(
        exact, abs=4 * (exact * (1 - exact) / 4000) ** 0.5
    )


@given(
    seed=st.integers(0, 2**31 - 1),
    count=st.integers(2, 5),
    operations=st.sampled_from(["+-", "+-*", "+-*/"]),
)
@settings(max_examples=examples(30), deadline=None)
def test_instances_keep_to_their_ranges(seed: int, count: int, operations: str) -> None:
    config = CountdownConfig(
        num_numbers=count, operations=operations, max_number=15, min_target=5, max_target=60
    )
    made = CountdownEnvironment(config)
    shown, _ = made.reset(seed=seed)

    assert (
        len(made.numbers) == count
        and all(1 <= number <= 15 for number in made.numbers)
        and 5 <= made.target <= 60
    )
    assert shown == f"Numbers: {', '.join(map(str, made.numbers))}. Target: {made.target}."


@pytest.mark.slow
def test_an_impossible_range_is_refused_with_the_remedy() -> None:
    made = CountdownEnvironment(
        CountdownConfig(num_numbers=2, max_number=3, operations="+", min_target=50)
    )
    with pytest.raises(EnvironmentFailure, match="widen the target's range"):
        made.reset(seed=0)

    for wrong in (
        {"min_target": 5, "max_target": 4},
        {"operations": "+^"},
        {"operations": "++"},
        {"num_numbers": 6},
    ):
        with pytest.raises(pydantic.ValidationError):
            CountdownConfig.model_validate(wrong)
