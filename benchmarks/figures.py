"""What a benchmark yields: a ratio against a peer (higher is better for us) or a share (lower is
better), with its raw numbers."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import agentevo
from machine import Rate, measured_limits, short_name

RESULTS = Path(__file__).resolve().parent / "results"


class NotComparableError(Exception):
    """Two sides did not compute the same: a ratio between them would say nothing."""


def check_equal(what: str, ours: float, theirs: float, tolerance: float) -> None:
    """Raises NotComparableError where two numbers differ by more than `tolerance`, relative to the
    larger one."""
    difference = abs(ours - theirs) / max(abs(ours), abs(theirs), 1e-12)
    print(
        f"    {what}: ours {ours:.7g}, theirs {theirs:.7g}, relative difference {difference:.1e}",
        file=sys.stderr,
        flush=True,
    )
    if not difference <= tolerance:
        raise NotComparableError(
            f"{what} differs by {difference:.1e} ({ours:.7g} and {theirs:.7g}), more than "
            f"{tolerance:g}"
        )


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of the table: `value` is ours over the best peer's, or a part over its whole, from
    medians of `raw`."""

    name: str
    value: float
    meaning: str
    raw: dict[str, Any]
    rate: Rate | None = None
    """What our side asked of the machine per second, where that is known by arithmetic."""

    @property
    def text(self) -> str:
        """Three decimals, or three digits where that would leave less than one."""
        return f"{self.value:.3f}" if self.value >= 0.1 else f"{self.value:.3g}"

    def line(self) -> str:
        return f"ratio {self.name} {self.text}"

    def shares(self) -> dict[str, float]:
        """How much of the machine's measured limits our side reached."""
        return {} if self.rate is None else self.rate.shares(measured_limits())

    def details(self) -> str:
        """For people who watch: medians, and how much of the machine they are."""
        shares = [f"{share:.0%} {name.replace('_', ' ')}" for name, share in self.shares().items()]
        medians = f"{json.dumps(self.raw['medians'])} {self.raw['unit']}"
        return f"    {self.meaning}: {', '.join([medians, *shares])}"

    def json(self) -> dict[str, Any]:
        content = {"name": self.name, "value": self.value, "meaning": self.meaning, "raw": self.raw}
        if self.rate is not None:
            content |= {"rate": self.rate._asdict(), "share_of_limits": self.shares()}
        return content


PATHS = re.compile(
    r"""
    (?: (?P<option> (?<![^\s'"`=,;(\[{]) --?[A-Za-z]+ )     # a compiler's, as in -I/usr/include
      | (?<![^\s'"`=:,;(\[{<>@|&+!]) | (?<=://) )
    (?: ~[A-Za-z_][\w-]* | ~ | [A-Za-z]: | [\\/](?<!:/)(?=[\\/]\w) )?
    [/\\](?![/\\])
    [^\s'"`:,;)\]}<>|&]+
    """,
    re.VERBOSE,
)
"""Absolute paths within a text, those of file and database addresses too, and of compilers' flags
that stand right before them."""


def without_paths(value: Any) -> Any:
    """The value with every absolute path in its texts, keys included, cut down to its last part."""
    if isinstance(value, str):
        return PATHS.sub(_last_part, value)
    if isinstance(value, dict):
        return {without_paths(key): without_paths(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(part) for part in value]
    return value


def _last_part(path: re.Match[str]) -> str:
    return (path["option"] or "") + re.split(r"[/\\]", path.group().rstrip("/\\"))[-1]


def write_results(
    figures: list[Figure],
    failures: dict[str, str],
    peers: dict[str, Any],
    before: dict[str, Any],
    part: str = "",
) -> Path:
    """Writes results/<date>-<cores>x-<vectors>.json, or -<part>.json of a run of some figures, and
    returns its path. `before`: `describe_machine()` when the run began."""
    now = datetime.datetime.now(datetime.UTC)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{now:%Y-%m-%d}-{short_name(before)}{part and '-' + part}.json"
    content = {
        "time": now.isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "machine": {**before, "load_average_after": os.getloadavg()},
        "ours": {
            "agentevo": agentevo.__version__,
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "peers": peers,
        "ratios": {figure.name: float(f"{figure.value:.5g}") for figure in figures},
        "failures": failures,
        "figures": [figure.json() for figure in figures],
    }
    path.write_text(json.dumps(without_paths(content), indent=1) + "\n")

    return path
