"""Arithmetic over given numbers: a safe evaluator of expressions, a search for an expression with a
given value, and the random player's success rate.

Values are exact fractions. A single kind of move builds every expression that uses each number
once: join two of the remaining terms, in order, with an operation, until a single term is left.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache

OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
NODES: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
MAX_CHARACTERS = 200
"""Longer expressions are not parsed, which limits their depth and size."""
PLAIN = re.compile(r"[0-9+\-*/() ]+")

Term = tuple[Fraction, str]
"""A value and the expression that has it."""


def evaluate(expression: str, operations: str = "+-*/") -> tuple[Fraction | None, list[int]] | None:
    """The (value, used numbers) of an expression of whole numbers, parentheses and `operations`
    (`-` also as a sign).

    The value is None for a division by zero. Returns None for any other text. Nothing is executed.
    """
    if len(expression) > MAX_CHARACTERS or not PLAIN.fullmatch(expression):
        return None

    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None

    numbers: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)

        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and "-" in operations:
            return -value(node.operand)

        if isinstance(node, ast.BinOp) and NODES.get(type(node.op), "?") in operations:
            left = value(node.left)
            right = value(node.right)
            return OPERATIONS[NODES[type(node.op)]](left, right)

        raise SyntaxError(f"{type(node).__name__} is not arithmetic over {operations}")

    try:
        return value(tree), numbers
    except ZeroDivisionError:
        return None, [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, int)
        ]
    except SyntaxError:
        return None


def joins(terms: list[Term], operations: str) -> Iterator[list[Term]]:
    """Every list of terms that a move can lead to, in a fixed order, without divisions by zero."""
    for first in range(len(terms)):
        for second in range(len(terms)):
            if first == second:
                continue
            rest = [term for index, term in enumerate(terms) if index not in (first, second)]
            for sign in operations:
                if (sign in "+*" and first > second) or (sign == "/" and terms[second][0] == 0):
                    continue
                yield [*rest, join(terms[first], terms[second], sign)]


def join(left: Term, right: Term, sign: str) -> Term:
    """The two terms joined by an operation. Raises ZeroDivisionError."""
    return OPERATIONS[sign](left[0], right[0]), f"({left[1]} {sign} {right[1]})"


def bare(expression: str) -> str:
    """The expression without its outer parentheses, which every joined term has."""
    return expression[1:-1] if expression.startswith("(") else expression


def solve(numbers: list[int], target: int, operations: str = "+-*/") -> str | None:
    """An expression that uses every number once and equals `target`. None if there is none. The
    search is depth-first and visits equal terms once."""
    visited: set[tuple[Fraction, ...]] = set()

    def search(terms: list[Term]) -> str | None:
        if len(terms) == 1:
            return terms[0][1] if terms[0][0] == target else None

        key = tuple(sorted(value for value, _ in terms))
        if key in visited:
            return None

        visited.add(key)
        return next(
            (solution for following in joins(terms, operations) if (solution := search(following))),
            None,
        )

    solution = search([(Fraction(number), str(number)) for number in numbers])
    return None if solution is None else bare(solution)


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

    return bare(terms[0])


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
                for sign in operations:
                    if sign == "/" and values[second] == 0:
                        continue
                    total += chance(
                        tuple(sorted([*rest, OPERATIONS[sign](values[first], values[second])]))
                    )

        return total / (len(values) * (len(values) - 1) * len(operations))

    return chance(tuple(sorted(Fraction(number) for number in numbers)))
