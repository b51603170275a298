"""The user's functions that the algorithm section names: the credit of each turn, the loss of a
token, the advantage of an attempt or a token.

    @agentevo.credit("last_turn")
    def last_turn(group):
        return [[0.0] * (len(one.turns) - 1) + [one.reward] for one in group]

    @agentevo.policy_loss("plain")
    def plain(inputs):
        return -inputs.advantages * inputs.logp

    @agentevo.advantage("centred")
    def centred(inputs):
        return inputs.score - inputs.score.mean()

Their arguments and results: docs/rewards.md, docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

from agentevo.errors import ConfigError, UnknownNameError
from agentevo.runtime.registry import Registry
from agentevo.types import Trajectory

if TYPE_CHECKING:
    from agentevo.config.algorithm import AlgorithmSection

CreditFunction: TypeAlias = Callable[[list[Trajectory]], Sequence[Sequence[float]]]
"""The trajectories of one group, with their final rewards -> a number for each turn of each."""
LossFunction: TypeAlias = Callable[[Any], Any]
"""algorithms.loss_inputs.LossInputs -> token losses [S, T], or these and metrics [S, T] by name."""
AdvantageFunction: TypeAlias = Callable[[Any], Any]
"""algorithms.advantage_inputs.Inputs -> advantages, [N] or [S, T]."""
C = TypeVar("C", bound=CreditFunction)
L = TypeVar("L", bound=LossFunction)
A = TypeVar("A", bound=AdvantageFunction)
T = TypeVar("T", bound=Callable[..., Any])
F = TypeVar("F", bound=Callable[..., Any])


class AlgorithmFunctions(Generic[T]):
    """The functions that one key of the algorithm section can name."""

    def __init__(self, key: str, kind: str, decorator: str, signature: str) -> None:
        self.key = key
        self.registry: Registry[T] = Registry(kind)
        self._decorator = decorator
        self._signature = signature

    def find(self, name: str) -> T:
        """Raises UnknownNameError."""
        try:
            return self.registry.get(name)
        except UnknownNameError as error:
            raise UnknownNameError(
                f"{self.key}: {error}; to add your own, write "
                f"`@agentevo.{self._decorator}({name!r})` above a function "
                f"`{self._signature}`, in a file that the recipe imports (key import), or in "
                "the program before it trains"
            ) from error

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator: registers a function under `name`. Raises ConfigError for anything else."""

        def add(function: F) -> F:
            if not callable(function):
                raise ConfigError(
                    f"the {self._decorator} {name!r} is not a function: make it `{self._signature}`"
                )
            self.registry.register(name)(cast(T, function))
            return function

        return add


CREDITS: AlgorithmFunctions[CreditFunction] = AlgorithmFunctions(
    "algorithm.credit", "credits", "credit", "def credit(group)"
)
POLICY_LOSSES: AlgorithmFunctions[LossFunction] = AlgorithmFunctions(
    "algorithm.loss_function", "loss functions", "policy_loss", "def loss(inputs)"
)
ADVANTAGES: AlgorithmFunctions[AdvantageFunction] = AlgorithmFunctions(
    "algorithm.advantage_function", "advantage functions", "advantage", "def advantage(inputs)"
)


def credit(name: str) -> Callable[[C], C]:
    """Decorator that registers a credit function under `name`. A recipe imports its module with the
    key `import`. Raises ConfigError for any other object."""
    return CREDITS.register(name)


def policy_loss(name: str) -> Callable[[L], L]:
    """Decorator that registers a policy loss under `name`, as `credit` does."""
    return POLICY_LOSSES.register(name)


def advantage(name: str) -> Callable[[A], A]:
    """Decorator that registers an advantage function under `name`, as `credit` does."""
    return ADVANTAGES.register(name)


def check_names(section: AlgorithmSection) -> None:
    """Raises UnknownNameError if the section names a function that no module has registered."""
    if section.credit is not None:
        CREDITS.find(section.credit)
    if section.loss_function is not None:
        POLICY_LOSSES.find(section.loss_function)
    if section.advantage_function is not None:
        ADVANTAGES.find(section.advantage_function)
