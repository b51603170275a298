"""The tool of the recipe: AgentEvo's calculator, with a schema that allows plain expressions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

import agentevo
from agentevo.agents.tool_servers.calculator import calculator

Expression = Annotated[str, Field(pattern=r"^[0-9]+( ?[-+*/] ?[0-9]+)*$", max_length=24)]


@agentevo.tool("calculate")
def calculate(expression: Expression) -> str:
    """Computes an arithmetic expression, such as 12 * 7.

    Args:
        expression: numbers with + - * / between them
    """
    return calculator(expression)
