"""Ray: a placement group with one bundle per node, in each of which `agentevo launch own` keeps
`agentevo launch node`. Ray owns processes; data and weights never go through it."""

from __future__ import annotations

from pydantic import Field

from agentevo.launch.fleet import Fleet
from agentevo.launch.plan import NODES_FILE, PlannedLaunch
from agentevo.parsing import dump_yaml

SETTINGS = "ray.yaml"


class RayFleet(Fleet):
    """What Ray is asked for."""

    cpus_per_node: int = Field(default=1, ge=1)
    """Of each bundle."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Further resources of each bundle, by their names in the cluster."""
    spread: bool = True
    """A node of Ray's for each bundle; false packs them, for a cluster of few large nodes."""
    placed_s: float = Field(default=600.0, gt=0)
    """How long the placement group is waited for, in seconds: the cluster may have to grow."""
    restarts: int = Field(default=3, ge=0)
    """How often the launch is begun again after its trainer was lost."""


def settings(launch: PlannedLaunch, fleet: RayFleet, folder: str) -> dict[str, str]:
    """The file that `agentevo launch own` reads beside nodes.yaml, by its name."""
    keys = {"cpus_per_node", "gpus", "resources", "spread", "placed_s", "restarts"}
    return {SETTINGS: dump_yaml(fleet.model_dump(include=keys))}


def command(launch: PlannedLaunch, folder: str) -> list[str]:
    """What submits it, as a job of the cluster that RAY_ADDRESS names."""
    own = ["agentevo", "launch", "own", f"{folder}/{NODES_FILE}"]
    return ["ray", "job", "submit", "--no-wait", "--", *own]
