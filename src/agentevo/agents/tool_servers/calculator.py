"""A calculator: evaluates arithmetic in Python's syntax. No other Python code runs.

Every answer takes bounded time and memory: no whole number has more than MAX_BITS bits, and no
expression more than MAX_CHARS characters.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from agentevo.config.tools import tool
from agentevo.errors import ToolError

MAX_CHARS = 500
MAX_BITS = 2000
"""The maximum bits of a whole number, about 600 digits."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: _power(base, exponent),
}
_SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "sin", "cos", "tan", "log", "log10", "exp")},
    **{name: getattr(math, name) for name in ("floor", "ceil", "gcd")},
    "abs": abs,
    "max": max,
    "min": min,
    "round": round,
}


@tool("calculator", cache=True)
def calculator(expression: str) -> str:
    """Computes an expression.

    Args:
        expression: Arithmetic such as (3 + 4) * 2 ** 5 / sqrt(2), with + - * / // % **, pi, e,
            sqrt, sin, cos, tan, log, log10, exp, floor, ceil, gcd, abs, max, min and round.
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression is longer than {MAX_CHARS} characters")

    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, MemoryError, RecursionError):
        raise ToolError("this is no arithmetic: write an expression such as (3 + 4) * 2") from None
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolError(f"this can't be computed: {error}") from None

    if isinstance(value, float) and not value.is_integer():
        return f"{value:.12g}"

    return str(int(value))


def _value(node: ast.expr) -> Any:
    """The value of an expression. Raises ToolError for anything but arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _check_bounds(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _check_bounds(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _check_bounds(_FUNCTIONS[name](*map(_value, arguments)))

    raise ToolError(f"{ast.unparse(node)[:60]!r} is no arithmetic that the calculator knows")


def _power(base: Any, exponent: Any) -> Any:
    """A power. Raises ToolError before a number becomes too large."""
    is_integer = isinstance(base, int) and isinstance(exponent, int)
    if is_integer and abs(base) > 1 and abs(exponent) * base.bit_length() > MAX_BITS:
        raise ToolError(f"a power is larger than {MAX_BITS} bits")
    return base**exponent


def _check_bounds(value: Any) -> Any:
    """Returns the number. Raises ToolError for a number that is not real, or is too large."""
    if isinstance(value, complex):
        raise ToolError("the result is no real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError(f"a number is larger than {MAX_BITS} bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the result is too large")
    return value
