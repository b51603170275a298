"""The calculator of the recipe."""

from __future__ import annotations

import ast
import operator
from typing import Annotated

from pydantic import Field

import agentevo

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
Expression = Annotated[str, Field(pattern=r"^[0-9]+( ?[-+*/] ?[0-9]+)*$", max_length=24)]


@agentevo.tool("calculate")
def calculate(expression: Expression) -> str:
    """Computes an arithmetic expression, such as 12 * 7.

    Args:
        expression: numbers with + - * / between them
    """
    try:
        return f"{_compute(ast.parse(expression, mode='eval').body):.10g}"
    except (SyntaxError, ZeroDivisionError, OverflowError) as error:
        raise agentevo.ToolError(str(error)) from error


def _compute(node: ast.expr) -> float:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_compute(node.left), _compute(node.right))
    return ast.literal_eval(node)
