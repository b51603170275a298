"""What a benchmark yields: a ratio against a peer (higher is better for us) or a share (lower is
better), with its raw numbers."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shlex
import socket
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import agentevo

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

    @property
    def text(self) -> str:
        """Three decimals, or three digits where that would leave less than one."""
        return f"{self.value:.3f}" if self.value >= 0.1 else f"{self.value:.3g}"

    def line(self) -> str:
        return f"ratio {self.name} {self.text}"


def machine() -> dict[str, Any]:
    """The machine, and the load from others at this moment."""
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        if cpuinfo.exists()
        else []
    )
    return {
        "host": socket.gethostname(),
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "load_average": os.getloadavg(),
    }


def write_results(
    figures: list[Figure],
    failures: dict[str, str],
    peers: dict[str, Any],
    before: dict[str, Any],
    part: str = "",
) -> Path:
    """Writes results/<date>-<host>.json, or -<part>.json of a run of some figures, and returns its
    path."""
    now = datetime.datetime.now(datetime.UTC)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{now:%Y-%m-%d}-{socket.gethostname()}{part and '-' + part}.json"
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
        "figures": [dataclasses.asdict(figure) for figure in figures],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
