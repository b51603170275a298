"""The parts of an algorithm by name: formula, defaults, valid ranges, source, and its names in verl
and TRL.

It does not import torch, because the configuration and `agentevo config` read it. Only the
catalogue holds defaults; the functions get every hyper-parameter from `resolve`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentevo.registry import nearest

Kind = Literal["advantage", "policy loss", "kl", "aggregation", "value loss", "preference loss"]
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
class CatalogueEntry:
    """One named entry of an algorithm."""

    name: str
    meaning: str
    """One line for lists."""
    formula: str
    source: str
    """Paper with arXiv number and equation."""
    hyper: tuple[Hyperparameter, ...] = ()
    needs: tuple[str, ...] = ()
    """Inputs that it requires in addition to those that every entry of its kind gets."""
    within_group: bool = False
    """An advantage that compares a trajectory with others of its group, and is 0 without them."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """Its name in other systems, and how theirs differs: {"verl": "...", "TRL": "..."}."""


def resolve(
    kind: Kind, entries: Mapping[str, CatalogueEntry], name: str, overrides: Mapping[str, Value]
) -> dict[str, Value]:
    """All hyper-parameters of `name`: those given, checked, and the defaults of the others. Raises
    ValueError."""
    entry = find(kind, entries, name)
    hyper_by_name = {hyper.name: hyper for hyper in entry.hyper}
    for key, value in overrides.items():
        if key not in hyper_by_name:
            guess = nearest(key, list(hyper_by_name))
            hint = (
                f"did you mean {guess}?"
                if guess
                else f"it has {', '.join(hyper_by_name) or 'none'}"
            )
            raise ValueError(f"{kind} {name} has no hyper-parameter {key!r}: {hint}")
        hyper_by_name[key].check(f"{kind} {name}", value)

    missing = [
        hyper for hyper in entry.hyper if hyper.default is None and hyper.name not in overrides
    ]
    if missing:
        raise ValueError(
            f"{kind} {name} needs {missing[0].name}: give {missing[0].range} ({missing[0].meaning})"
        )

    return {hyper.name: overrides.get(hyper.name, hyper.default) for hyper in entry.hyper}


def find(kind: Kind, entries: Mapping[str, CatalogueEntry], name: str) -> CatalogueEntry:
    """The entry of that name. Raises ValueError with the nearest name, or with all names."""
    if name not in entries:
        guess = nearest(name, list(entries))
        hint = f"did you mean {guess!r}?" if guess else f"choose one of {', '.join(entries)}"
        raise ValueError(f"there is no {kind} {name!r}: {hint}")
    return entries[name]


def check_function(kind: Kind, name: str, function: object) -> None:
    """Raises ValueError unless FUNCTION, and no other name, has a function."""
    if (name == FUNCTION) != (function is not None):
        has = "needs a function" if name == FUNCTION else "takes no function"
        raise ValueError(f"{kind} {name} {has}")


def by_name(entries: Sequence[CatalogueEntry]) -> dict[str, CatalogueEntry]:
    """The entries by name. Raises ValueError for a name that two entries have."""
    named = {entry.name: entry for entry in entries}
    if len(named) != len(entries):
        raise ValueError("two entries of one kind have the same name")
    return named
