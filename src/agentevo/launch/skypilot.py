"""SkyPilot: one task whose nodes run `agentevo launch node`.

The launch's folder is copied to every node. With several nodes the run's folder is on a volume that
all of them mount.
"""

from __future__ import annotations

from typing import Annotated, Any

import yaml
from pydantic import Field

from agentevo.errors import ConfigError
from agentevo.launch.fleet import Fleet, written_as
from agentevo.launch.plan import NODES_FILE, PlannedLaunch

TASK = "task.sky.yaml"
RUNS = "/runs"
RUN = f"""head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
exec agentevo launch node ~/launch/{NODES_FILE} --rank "$SKYPILOT_NODE_RANK" \\
    --head "$head" --id "$SKYPILOT_TASK_ID"
"""


AtLeast = Annotated[
    str, written_as(r"\d+(\.\d+)?\+?", "a number, such as 16, or 16+ for at least as many")
]


class SkyPilotFleet(Fleet):
    """What SkyPilot is asked for."""

    infra: str = ""
    """Where, such as aws, gcp/us-central1, k8s. Default: wherever it is cheapest."""
    accelerator: Annotated[str, written_as(r"[\w.-]+", "a kind of device alone, such as H100")] = ""
    """The kind of device, such as H100; needed where gpus is above 0."""
    cpus: AtLeast = "4+"
    memory: AtLeast = "16+"
    """In GB."""
    disk_size: int = Field(default=256, ge=1)
    """In GB."""
    use_spot: bool = False
    image_id: str = ""
    """An image, such as docker:agentevo:latest."""
    volume: str = ""
    """The SkyPilot volume that holds the run's folder; needed with several nodes."""
    setup: str = "pip install 'agentevo[train,serve,postgresql]'"
    """Shell lines on each new node."""


def task(launch: PlannedLaunch, fleet: SkyPilotFleet, folder: str) -> dict[str, str]:
    """The task by its file's name. Raises ConfigError for what SkyPilot can't be asked."""
    if fleet.gpus and not fleet.accelerator:
        raise ConfigError("accelerator: say which device, such as --set accelerator=H100")

    if len(launch.nodes) > 1 and not fleet.volume:
        raise ConfigError(
            f"volume: {len(launch.nodes)} nodes share the run's folder: make a volume that several "
            "nodes mount (`sky volumes apply`), and name it with --set volume=NAME"
        )

    resources: dict[str, Any] = {
        "cpus": fleet.cpus,
        "memory": fleet.memory,
        "disk_size": fleet.disk_size,
    }
    if fleet.infra:
        resources["infra"] = fleet.infra
    if fleet.gpus:
        resources["accelerators"] = f"{fleet.accelerator}:{fleet.gpus}"
    if fleet.use_spot:
        resources["use_spot"] = True
    if fleet.image_id:
        resources["image_id"] = fleet.image_id

    tree: dict[str, Any] = {
        "name": launch.name,
        "num_nodes": len(launch.nodes),
        "resources": resources,
        "file_mounts": {"~/launch": folder},
    }
    if fleet.volume:
        tree["volumes"] = {RUNS: fleet.volume}
    if launch.variables:
        tree["secrets"] = dict.fromkeys(launch.variables)

    return {TASK: yaml.safe_dump({**tree, "setup": fleet.setup, "run": RUN}, sort_keys=False)}


def command(launch: PlannedLaunch, folder: str) -> list[str]:
    """What submits it."""
    secrets = [word for name in launch.variables for word in ("--secret", name)]
    return ["sky", "launch", "--yes", "--cluster", launch.name, *secrets, f"{folder}/{TASK}"]
