"""Countdown: write an arithmetic expression that uses each given number once and equals the target.

Reward: 1 for the target, and 0.1 for an expression that uses the numbers exactly once but has
another value. Any other action is invalid and has the reward 0. The target is the value of a random
expression, so all instances are solvable.

Values are exact fractions. Moves build every expression that uses each number once. A move joins
an ordered pair of the remaining terms by an operation. The last move leaves a single term.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from typing import ClassVar, Literal

import pydantic

from agentevo.environments.environment import EnvironmentConfig, environments
from agentevo.environments.episode import INVALID, ActionResult, EpisodicEnvironment, stream
from agentevo.errors import EnvironmentFailure
from agentevo.types import Baselines

OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
OPERATION_OF_NODE: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
}
MAX_CHARACTERS = 200
"""Longer expressions are not parsed, which limits their depth and size."""
_ARITHMETIC_TEXT = re.compile(r"[0-9+\-*/() ]+")

Term = tuple[Fraction, str]
"""The value of an expression, and its text."""


def evaluate(expression: str, operations: str = "+-*/") -> tuple[Fraction | None, list[int]] | None:
    """The (value, used numbers) of an expression of whole numbers, parentheses and `operations`
    (`-` also as a sign).

    The value is None for a division by zero. Returns None for any other text. Nothing is executed.
    """
    if len(expression) > MAX_CHARACTERS or not _ARITHMETIC_TEXT.fullmatch(expression):
        return None

    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None

    numbers: list[int] = []

    def evaluate_node(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)

        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and "-" in operations:
            return -evaluate_node(node.operand)

        if isinstance(node, ast.BinOp) and OPERATION_OF_NODE.get(type(node.op), "?") in operations:
            left = evaluate_node(node.left)
            right = evaluate_node(node.right)
            return OPERATIONS[OPERATION_OF_NODE[type(node.op)]](left, right)

        raise SyntaxError(f"{type(node).__name__} is not arithmetic over {operations}")

    try:
        return evaluate_node(tree), numbers
    except ZeroDivisionError:
        return None, [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, int)
        ]
    except SyntaxError:
        return None


def possible_moves(terms: list[Term], operations: str) -> Iterator[list[Term]]:
    """The terms after each possible move, in a fixed order, without divisions by zero."""
    for first in range(len(terms)):
        for second in range(len(terms)):
            if first == second:
                continue
            rest = [term for index, term in enumerate(terms) if index not in (first, second)]
            for operation in operations:
                if (operation in "+*" and first > second) or (
                    operation == "/" and terms[second][0] == 0
                ):
                    continue
                yield [*rest, join_terms(terms[first], terms[second], operation)]


def join_terms(left: Term, right: Term, operation: str) -> Term:
    """Joins two terms by an operation. Raises ZeroDivisionError."""
    return OPERATIONS[operation](left[0], right[0]), f"({left[1]} {operation} {right[1]})"


def strip_parentheses(expression: str) -> str:
    """The expression without its outer parentheses, which every joined term has."""
    return expression[1:-1] if expression.startswith("(") else expression


def solve(numbers: list[int], target: int, operations: str = "+-*/") -> str | None:
    """An expression that uses every number once and equals `target`. None if no expression does.
    The search is depth-first and visits equal terms once."""
    visited: set[tuple[Fraction, ...]] = set()

    def search(terms: list[Term]) -> str | None:
        if len(terms) == 1:
            return terms[0][1] if terms[0][0] == target else None

        key = tuple(sorted(value for value, _ in terms))
        if key in visited:
            return None

        visited.add(key)
        return next(
            (
                solution
                for next_terms in possible_moves(terms, operations)
                if (solution := search(next_terms))
            ),
            None,
        )

    solution = search([(Fraction(number), str(number)) for number in numbers])
    return None if solution is None else strip_parentheses(solution)


def random_expression(numbers: list[int], operations: str, rng: random.Random) -> str:
    """An expression over all the numbers, by uniformly random moves. It may divide by zero."""
    terms = [str(number) for number in numbers]
    while len(terms) > 1:
        first, second = rng.sample(range(len(terms)), 2)
        joined = f"({terms[first]} {rng.choice(operations)} {terms[second]})"
        terms = [
            *(term for index, term in enumerate(terms) if index not in (first, second)),
            joined,
        ]

    return strip_parentheses(terms[0])


def random_expression_success(numbers: list[int], target: int, operations: str = "+-*/") -> float:
    """The probability that `random_expression` equals `target`, exact up to the rounding of the
    float."""

    @cache
    def chance(values: tuple[Fraction, ...]) -> float:
        if len(values) == 1:
            return float(values[0] == target)

        total = 0.0
        for first in range(len(values)):
            for second in range(len(values)):
                if first == second:
                    continue

                rest = [value for index, value in enumerate(values) if index not in (first, second)]
                for operation in operations:
                    if operation == "/" and values[second] == 0:
                        continue
                    total += chance(
                        tuple(sorted([*rest, OPERATIONS[operation](values[first], values[second])]))
                    )

        return total / (len(values) * (len(values) - 1) * len(operations))

    return chance(tuple(sorted(Fraction(number) for number in numbers)))


WRONG_VALUE_REWARD = 0.1
MAX_TRIES = 20_000
SIGN_ORDER = "+-*/"
EXACT_NUMBERS = 4
"""Up to this many numbers, the random player's rate is computed exactly. Beyond, it is estimated by
play."""
SAMPLED_EXPRESSIONS = 4000


class CountdownConfig(EnvironmentConfig):
    """The number and size of the given numbers, and the operations."""

    type: Literal["countdown"] = "countdown"
    max_actions: int = pydantic.Field(default=1, ge=1)
    """The number of actions after which an unfinished episode is truncated. With more than 1, a
    player can try again after a malformed expression."""
    num_numbers: int = pydantic.Field(default=3, ge=2, le=5)
    """The number of given numbers, all of which must be used."""
    max_number: int = pydantic.Field(default=20, ge=1)
    """The largest number. Numbers are random from 1."""
    min_target: int = 1
    """Lowest target."""
    max_target: int = 100
    """Highest target."""
    operations: str = pydantic.Field(default="+-*", pattern=r"^[-+*/]+$")
    """The allowed operations, a subset of `+-*/`."""

    @pydantic.model_validator(mode="after")
    def _check_targets(self) -> CountdownConfig:
        if self.min_target > self.max_target:
            raise ValueError(
                f"min_target={self.min_target} is above max_target={self.max_target}: swap or "
                "widen them"
            )

        if len(set(self.operations)) != len(self.operations):
            raise ValueError(f"operations={self.operations!r} repeats a sign: name each once")
        return self


@environments.register("countdown")
class CountdownEnvironment(EpisodicEnvironment):
    """A single expression, which is checked exactly."""

    Config: ClassVar[type[EnvironmentConfig]] = CountdownConfig
    config: CountdownConfig

    @property
    def instructions(self) -> str:
        signs = " ".join(sign for sign in SIGN_ORDER if sign in self.config.operations)
        return (
            "Write an arithmetic expression that equals the target. Use each number exactly "
            f"once, with {signs} and parentheses. "
            "Your action is the expression alone."
        )

    def start(self, seed: int) -> None:
        rng = stream(self.config, seed, "instance")
        config = self.config
        for _ in range(MAX_TRIES):
            self.numbers = [rng.randint(1, config.max_number) for _ in range(config.num_numbers)]
            result = evaluate(
                random_expression(self.numbers, config.operations, rng), config.operations
            )
            value = result[0] if result else None
            if (
                value is not None
                and value.denominator == 1
                and config.min_target <= value <= config.max_target
            ):
                self.target = int(value)
                self._solution: str | None = None
                return

        raise EnvironmentFailure(
            f"countdown: none of {MAX_TRIES} expressions over {config.num_numbers} numbers up to "
            f"{config.max_number} "
            f"with {config.operations} is within {config.min_target}..{config.max_target}: "
            "widen the target's range"
        )

    def observe(self) -> str:
        return f"Numbers: {', '.join(map(str, self.numbers))}. Target: {self.target}."

    def act(self, action: str) -> ActionResult:
        result = evaluate(action, self.config.operations)
        if result is None or sorted(result[1]) != sorted(self.numbers):
            return INVALID
        success = result[0] == self.target
        return ActionResult(
            reward=1.0 if success else WRONG_VALUE_REWARD, terminated=True, success=success
        )

    def random_action(self, rng: random.Random) -> str:
        return random_expression(self.numbers, self.config.operations, rng)

    def optimal_action(self) -> str | None:
        if self._solution is None:
            self._solution = solve(self.numbers, self.target, self.config.operations)
        return self._solution

    def baselines(self, max_actions: int | None = None) -> Baselines:
        numbers = self.numbers
        operations = self.config.operations
        if len(numbers) <= EXACT_NUMBERS:
            return Baselines(
                random=random_expression_success(numbers, self.target, operations), optimal=1.0
            )

        rng = random.Random(f"{numbers} {self.target}")
        results = (
            evaluate(random_expression(numbers, operations, rng), operations)
            for _ in range(SAMPLED_EXPRESSIONS)
        )
        return Baselines(
            random=sum(1 for result in results if result and result[0] == self.target)
            / SAMPLED_EXPRESSIONS,
            optimal=1.0,
        )
