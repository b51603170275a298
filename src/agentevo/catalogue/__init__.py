"""What the maths can be asked for, by name: formula, defaults, valid ranges, source, and what verl and TRL call it.

No torch here: the configuration and `agentevo config explain` read it. Defaults stand here and nowhere else; the functions get every
hyper-parameter from `resolve`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentevo.registry import nearest

Kind = Literal["advantage", "policy loss", "kl", "aggregation", "value loss", "preference loss"]
Value = float | int | bool | str | None


@dataclass(frozen=True)
class Hyper:
    """One hyper-parameter. Its type is that of `default`; None as a default means that it must be given."""

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
        """In words: what a valid value is."""
        if isinstance(self.default, bool):
            return "true or false"
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        kind = "a whole number" if isinstance(self.default, int) else "a number"
        parts = [f"{'at least' if self.low_allowed else 'above'} {self.low:g}"] if self.low > -math.inf else []
        parts += [f"at most {self.high:g}"] if self.high < math.inf else []
        return " ".join([kind, " and ".join(parts)]).strip()

    def check(self, piece: str, value: object) -> None:
        """Raises ValueError with the valid range."""
        if isinstance(self.default, bool):
            good = isinstance(value, bool)
        elif self.choices:
            good = value in self.choices
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(self.default, int) and value != int(value)):
            good = False
        else:
            good = self.low <= value <= self.high and (self.low_allowed or value > self.low)
        if not good:
            raise ValueError(f"{piece}: {self.name}={value!r} is not possible: give {self.range}")


@dataclass(frozen=True)
class Piece:
    """One named piece of an algorithm."""

    name: str
    meaning: str
    """One line for lists."""
    formula: str
    source: str
    """Paper with arXiv number and equation."""
    hyper: tuple[Hyper, ...] = ()
    needs: tuple[str, ...] = ()
    """Inputs that it can't do without, beyond those that every piece of its kind gets."""
    within_group: bool = False
    """An advantage that compares a trajectory with others of its group, and is 0 without them."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """What others call it, and where theirs differs: {"verl": "...", "TRL": "..."}."""


def resolve(kind: Kind, pieces: Mapping[str, Piece], name: str, given: Mapping[str, Value]) -> dict[str, Value]:
    """All hyper-parameters of `name`: those given, checked, and the defaults of the others. Raises ValueError."""
    piece = find(kind, pieces, name)
    known = {hyper.name: hyper for hyper in piece.hyper}
    for key, value in given.items():
        if key not in known:
            guess = nearest(key, list(known))
            hint = f"did you mean {guess}?" if guess else f"it has {', '.join(known) or 'none'}"
            raise ValueError(f"{kind} {name} has no hyper-parameter {key!r}: {hint}")
        known[key].check(f"{kind} {name}", value)
    missing = [hyper for hyper in piece.hyper if hyper.default is None and hyper.name not in given]
    if missing:
        raise ValueError(f"{kind} {name} needs {missing[0].name}: give {missing[0].range} ({missing[0].meaning})")
    return {hyper.name: given.get(hyper.name, hyper.default) for hyper in piece.hyper}


def find(kind: Kind, pieces: Mapping[str, Piece], name: str) -> Piece:
    """Raises ValueError with the nearest name, or all of them."""
    if name not in pieces:
        guess = nearest(name, list(pieces))
        hint = f"did you mean {guess!r}?" if guess else f"choose one of {', '.join(pieces)}"
        raise ValueError(f"there is no {kind} {name!r}: {hint}")
    return pieces[name]


def is_trainable(piece: Piece) -> bool:
    """Whether the trainer has all that the piece needs: it has no critic and no second set of log-probs."""
    return set(piece.needs) <= {"turn_ids", "baseline_rewards", "reward_parts"}


def by_name(pieces: Sequence[Piece]) -> dict[str, Piece]:
    """Raises ValueError if a name is there twice."""
    found = {piece.name: piece for piece in pieces}
    if len(found) != len(pieces):
        raise ValueError("two pieces of one kind have the same name")
    return found
