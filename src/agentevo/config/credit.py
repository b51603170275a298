"""Credit by a function of the user's: what each turn of an attempt has earned. `algorithm.credit`
names one, and the advantage `credit` compares what it says (catalogue/advantages.py).

    @agentevo.credit("last_turn")
    def last_turn(group):
        return [[0.0] * (len(one.turns) - 1) + [one.reward] for one in group]

It gets the trajectories of one group, with their final rewards, and returns a number for each turn
of each, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from agentevo.errors import ConfigError, UnknownNameError
from agentevo.registry import Registry
from agentevo.types import Trajectory

CreditFunction: TypeAlias = Callable[[list[Trajectory]], Sequence[Sequence[float]]]
F = TypeVar("F", bound=CreditFunction)

credit_functions: Registry[CreditFunction] = Registry("credits")


def find_credit(name: str) -> CreditFunction:
    """The function that `algorithm.credit` names. Raises UnknownNameError."""
    try:
        return credit_functions.get(name)
    except UnknownNameError as error:
        raise UnknownNameError(
            f"algorithm.credit: {error}; one of your own is `@agentevo.credit({name!r})` above a "
            "function `def credit(group)`, in a file that the recipe imports (key import), or in "
            "the program, before it trains"
        ) from error


def credit(name: str) -> Callable[[F], F]:
    """Decorator: registers a function as the credit `name`, for recipes that import its module (key
    `import`). Raises ConfigError for what is no function."""

    def add(function: F) -> F:
        if not callable(function):
            raise ConfigError(f"the credit {name!r} is no function: make it `def credit(group)`")
        credit_functions.register(name)(function)
        return function

    return add
