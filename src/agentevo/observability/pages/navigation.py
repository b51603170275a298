"""The pages of a run, in the order of its tabs."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote


class Tab(NamedTuple):
    """One page of a run, below `/runs/{run}`."""

    name: str
    title: str
    path: str


TABS: tuple[Tab, ...] = (
    Tab("now", "Now", ""),
    Tab("metrics", "Metrics", "/metrics"),
    Tab("attempts", "Attempts", "/attempts"),
    Tab("evaluation", "Evaluation", "/evaluation"),
    Tab("data", "Data", "/data"),
    Tab("processes", "Processes", "/processes"),
    Tab("try", "Try it", "/try"),
    Tab("config", "Configuration", "/config"),
    Tab("control", "Control", "/control"),
)


def run_url(key: str, *parts: object) -> str:
    """The URL of a run's page: `run_url("coins", "steps", 3)` is `/runs/coins/steps/3`."""
    return "/".join(
        ["/runs", quote(key, safe="~+=,@"), *(quote(str(part), safe="") for part in parts)]
    )
