"""The keys and values of other systems and their equivalents here, for refusals.

peer_keys.md has them all, as tables for people: a section for each system, and `Values`. A row with
equal numbers of their keys and our keys pairs them in order; in any other row each of their keys is
equivalent to all of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentevo.config.field_words import as_number

PAGE = Path(__file__).with_suffix(".md")
ELSEWHERE = "Elsewhere"
"""Heading of the words that several systems use."""
VALUES = "Values"
SHOWN = 3
"""The number of systems that are named for one key."""
_CODE = re.compile(r"`([^`]+)`")
_BOUND = re.compile(r"(above|below) (-?[\d.]+)|between (-?[\d.]+) and (-?[\d.]+)")


@dataclass(frozen=True)
class PeerKey:
    """The equivalent here of a key of another system."""

    system: str
    key: str
    """A key that ends with `.*` covers all keys below it."""
    equivalent: str
    """Our keys, a command, `not needed` or `not there`."""
    remark: str

    @property
    def our_keys(self) -> tuple[str, ...]:
        return tuple(part.partition("=")[0] for part in self.equivalent.split(", "))

    @property
    def sentence(self) -> str:
        """`TRL's num_generations is trainer.group_size here`, with the remark."""
        subject = (
            f"other systems' {self.key}"
            if self.system == ELSEWHERE
            else f"{self.system}'{'s' * (not self.system.endswith('s'))} {self.key}"
        )
        answer = "has no counterpart" if self.equivalent == "not there" else f"is {self.equivalent}"
        return f"{subject} {answer} here{f': {self.remark}' if self.remark else ''}"

    def likeness(self, key: str) -> tuple[int, int]:
        """How well `key` matches this key, and on how many names. 3: `key` ends with this whole
        key. 2: `key` is the end of this key, or `key` is a single name. 1: the last names are equal
        and specific enough. 0: `key` is below this key. -1: no match. For a single name, 3 and 2
        are the same."""
        names = self.key.split(".")
        if names[-1] == "*":
            section = ".".join(names[:-1])
            is_below = f".{section}." in f".{key}."
            return (0, len(names) - 1) if is_below else (-1, 0)

        if f".{key}".endswith(f".{self.key}"):
            is_whole = len(names) > 1 or key == self.key
            return (3 if "." in key else 2, len(names)) if is_whole else (1, 0)

        if self.key.endswith(f".{key}"):
            return 2, key.count(".") + 1

        leaf = key.rpartition(".")[2]
        is_alike = leaf == names[-1] and ("_" in leaf or leaf == "lr")
        return (1, 0) if is_alike else (-1, 0)


@dataclass(frozen=True)
class PeerValue:
    """A value of one of our keys that is valid in another system, or means something else there."""

    key: str
    values: str
    """Words, separated by commas, or a bound such as `above 0.01`."""
    remark: str

    def is_meant(self, value: object) -> bool:
        bound = _BOUND.fullmatch(self.values)
        if bound is None:
            word = str(value).lower() if isinstance(value, bool) else str(value)
            return word in self.values.split(", ")

        number = as_number(value)
        if number is None:
            return False

        if bound[1] is None:
            return float(bound[3]) < number < float(bound[4])
        return number > float(bound[2]) if bound[1] == "above" else number < float(bound[2])


@cache
def peer_keys() -> tuple[PeerKey, ...]:
    """All keys of all systems, in the order of the page."""
    keys = []
    for system, their_cell, our_cell, remark in _rows():
        if system == VALUES:
            continue

        theirs = _CODE.findall(their_cell)
        equivalents = _CODE.findall(our_cell)
        if len(theirs) != len(equivalents):
            equivalents = [", ".join(equivalents) or our_cell] * len(theirs)

        keys += [
            PeerKey(system, key, equivalent, remark)
            for key, equivalent in zip(theirs, equivalents, strict=True)
        ]

    return tuple(keys)


@cache
def peer_values() -> tuple[PeerValue, ...]:
    """All values that the page lists, in its order."""
    return tuple(
        PeerValue(value_cell.strip("`"), values, remark)
        for section, value_cell, values, remark in _rows()
        if section == VALUES
    )


def translations(key: str) -> list[PeerKey]:
    """The most likely keys of other systems for `key`, in any section: at most one for each system.
    Of keys with the same equivalent here, only the first."""
    written = normal_key(key)
    ranked = [(peer.likeness(written), peer) for peer in peer_keys()]
    best = max((likeness for likeness, _ in ranked), default=(-1, 0))
    if best[0] < 0:
        return []

    likely: dict[str, PeerKey] = {}
    for likeness, peer in ranked:
        if likeness == best:
            likely.setdefault(peer.system, peer)

    distinct = {peer.our_keys: peer for peer in reversed(likely.values())}
    return [peer for peer in likely.values() if distinct[peer.our_keys] is peer][:SHOWN]


def normal_key(key: str) -> str:
    """A key in the spelling of this package: `Train-Steps` as `train_steps`."""
    return key.replace("-", "_").lower()


def in_our_words(key: str) -> str | None:
    """`TRL's num_generations is trainer.group_size here`, for a key that another system has; else
    None."""
    return "; ".join(peer.sentence for peer in translations(key)) or None


def is_whole_key(key: str, peers: Sequence[PeerKey]) -> bool:
    """Whether `key` is, or ends with, the full name that one of the systems has for it."""
    written = normal_key(key)
    return any(
        written == peer.key or ("." in peer.key and f".{written}".endswith(f".{peer.key}"))
        for peer in peers
    )


def value_in_our_words(key: str, value: object) -> str | None:
    """The remark about a value that is valid in another system or means something else there; else
    None."""
    return next(
        (
            peer_value.remark
            for peer_value in peer_values()
            if peer_value.key == key and peer_value.is_meant(value)
        ),
        None,
    )


def _rows() -> Iterator[tuple[str, str, str, str]]:
    """(section, first cell, second cell, remark without marks) of each row of the page."""
    section = ""
    is_head = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
            is_head = True
        elif line.startswith("| ") and is_head:
            is_head = False
        elif line.startswith("| "):
            first, second, remark = (cell.strip() for cell in line.strip("|").split("|"))
            yield section, first, second, remark.replace("`", "")
