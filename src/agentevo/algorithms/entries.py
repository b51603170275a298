"""Entries: the parts of an algorithm by name, each with formula, defaults, valid ranges, source,
function, and names in verl and TRL.

    @LOSSES.entry(
        meaning="the plain policy gradient",
        formula="-A l",
        source="Williams, 'Simple statistical gradient-following algorithms' (1992), eq. 5",
    )
    def reinforce(inputs: LossInputs) -> Terms:
        return -inputs.advantages * inputs.logp, {}

A file has one table, and its functions are the entries. Everything else reads the tables: the keys
of a recipe and their checks, `agentevo list algorithms`, `agentevo config` and
docs/algorithms.md. Only entries hold defaults; the functions get every hyper-parameter from
`EntryTable.resolve`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

from agentevo.runtime.registry import nearest

Kind = Literal["advantage", "policy loss", "kl", "aggregation", "preference loss"]
Value = float | int | bool | str | None

FUNCTION = "function"
"""Name of the advantage and of the policy loss that a function of the user computes."""


@dataclass(frozen=True)
class Hyperparameter:
    """One hyper-parameter. Its type is that of `default`; None as a default means that a value is
    required."""

    name: str
    default: Value
    meaning: str
    low: float = -math.inf
    high: float = math.inf
    low_allowed: bool = True
    """Whether `low` itself is a valid value."""
    choices: tuple[str, ...] = ()

    @property
    def range(self) -> str:
        """The valid values in words."""
        if isinstance(self.default, bool):
            return "true or false"
        if self.choices:
            return f"one of {', '.join(self.choices)}"

        kind = "a whole number" if isinstance(self.default, int) else "a number"
        parts = (
            [f"{'at least' if self.low_allowed else 'above'} {self.low:g}"]
            if self.low > -math.inf
            else []
        )
        parts += [f"at most {self.high:g}"] if self.high < math.inf else []
        return " ".join([kind, " and ".join(parts)]).strip()

    def check(self, entry: str, value: object) -> None:
        """Raises ValueError with the valid range."""
        if isinstance(self.default, bool):
            good = isinstance(value, bool)
        elif self.choices:
            good = value in self.choices
        elif (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or (isinstance(self.default, int) and value != int(value))
        ):
            good = False
        else:
            good = self.low <= value <= self.high and (self.low_allowed or value > self.low)

        if not good:
            raise ValueError(f"{entry}: {self.name}={value!r} is not possible: give {self.range}")


@dataclass(frozen=True)
class Switch(Hyperparameter):
    """A hyper-parameter that 0 (or None) turns off and that is above `low` otherwise."""

    @property
    def range(self) -> str:
        return f"0 for off, or a number above {self.low:g}"

    def check(self, entry: str, value: object) -> None:
        """Raises ValueError with the valid range."""
        if value is None or (value == 0 and not isinstance(value, bool)):
            return
        super().check(entry, value)


@dataclass(frozen=True)
class AlgorithmEntry:
    """One named entry of an algorithm."""

    function: Callable[..., Any]
    """Takes the inputs of its kind, and each of `hyper` by its name."""
    name: str = field(default="", kw_only=True)
    """Default: the function's."""
    meaning: str = field(kw_only=True)
    """One line for lists."""
    formula: str = field(kw_only=True)
    source: str = field(kw_only=True)
    """Paper with arXiv number and equation."""
    hyper: tuple[Hyperparameter, ...] = field(default=(), kw_only=True)
    needs: tuple[str, ...] = field(default=(), kw_only=True)
    """Inputs that it requires in addition to those that every entry of its kind gets."""
    peers: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """Its name in other systems, and how theirs differs: {"verl": "...", "TRL": "..."}."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.function.__name__)

    @property
    def hyper_names(self) -> set[str]:
        return {hyper.name for hyper in self.hyper}


E = TypeVar("E", bound=AlgorithmEntry)
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


class EntryTable(dict[str, E], Generic[P, E]):
    """Entries of one kind by name. `entry_type` makes them; `tables` has the first entries."""

    def __init__(
        self,
        kind: Kind,
        entry_type: Callable[Concatenate[Callable[..., Any], P], E],
        *tables: Mapping[str, E],
    ) -> None:
        super().__init__()
        self.kind = kind
        self._entry_type = entry_type
        for table in tables:
            for entry in table.values():
                self._add(entry)

    def entry(self, *args: P.args, **fields: P.kwargs) -> Callable[[F], F]:
        """Decorator of a function: adds it with the fields of `entry_type`. Raises ValueError for a
        name that the table has."""

        def add(function: F) -> F:
            self._add(self._entry_type(function, *args, **fields))
            return function

        return add

    def _add(self, entry: E) -> None:
        if entry.name in self:
            raise ValueError(f"two entries of the kind {self.kind} have the name {entry.name!r}")
        self[entry.name] = entry

    def find(self, name: str) -> E:
        """The entry of that name. Raises ValueError with the nearest name, or with all names."""
        if name not in self:
            guess = nearest(name, list(self))
            hint = f"did you mean {guess!r}?" if guess else f"choose one of {', '.join(self)}"
            raise ValueError(f"there is no {self.kind} {name!r}: {hint}")
        return self[name]

    def resolve(self, name: str, overrides: Mapping[str, Value]) -> dict[str, Any]:
        """All hyper-parameters of `name`: those given, checked, and the defaults of the others.
        Raises ValueError."""
        entry = self.find(name)
        hyper_by_name = {hyper.name: hyper for hyper in entry.hyper}
        for key, value in overrides.items():
            if key not in hyper_by_name:
                guess = nearest(key, list(hyper_by_name))
                hint = (
                    f"did you mean {guess}?"
                    if guess
                    else f"it has {', '.join(hyper_by_name) or 'none'}"
                )
                raise ValueError(f"{self.kind} {name} has no hyper-parameter {key!r}: {hint}")
            hyper_by_name[key].check(f"{self.kind} {name}", value)

        missing = [
            hyper for hyper in entry.hyper if hyper.default is None and hyper.name not in overrides
        ]
        if missing:
            raise ValueError(
                f"{self.kind} {name} needs {missing[0].name}: give {missing[0].range} "
                f"({missing[0].meaning})"
            )

        return {hyper.name: overrides.get(hyper.name, hyper.default) for hyper in entry.hyper}


def check_function(kind: Kind, name: str, function: object) -> None:
    """Raises ValueError unless FUNCTION, and no other name, has a function."""
    if (name == FUNCTION) != (function is not None):
        has = "needs a function" if name == FUNCTION else "takes no function"
        raise ValueError(f"{kind} {name} {has}")
