"""Docker compose: a run on one machine, with its database, and the dashboard beside it."""

from __future__ import annotations

from typing import Annotated, Any

import yaml

from agentevo.errors import ConfigError
from agentevo.launch.fleet import Fleet, written_as
from agentevo.launch.node import GRACE_S
from agentevo.launch.plan import NODES_FILE, PlannedLaunch

FILE = "compose.yaml"
LAUNCH = "/launch"
RUNS = "/runs"


class ComposeFleet(Fleet):
    """What the machine's docker is asked for."""

    image: str = "agentevo:latest"
    """An image with agentevo (deploy/docker)."""
    shared_memory: Annotated[
        str, written_as(r"(?i)\d+(\.\d+)?([kmg]b?|b)?", "a size that docker reads, such as 8gb")
    ] = "8gb"
    """Size of /dev/shm, which ranks exchange data through."""
    runs: str = "../runs"
    """The folder of this machine that holds the runs, from the launch's folder."""
    ui_port: int = 8765
    """The port of this machine, on loopback, on which the dashboard is."""


def compose(launch: PlannedLaunch, fleet: ComposeFleet, folder: str) -> dict[str, str]:
    """The compose file by its name. Raises ConfigError for more than one node."""
    if len(launch.nodes) > 1:
        raise ConfigError(
            f"that is {len(launch.nodes)} nodes, and compose runs on one machine: use slurm, "
            "kubernetes or skypilot"
        )

    mounts = [f"{fleet.runs}:{RUNS}", f".:{LAUNCH}:ro"]
    run: dict[str, Any] = {
        "image": fleet.image,
        "command": ["agentevo", "launch", "node", f"{LAUNCH}/{NODES_FILE}", "--rank", "0"],
        "volumes": mounts,
        "network_mode": "host",
        "shm_size": fleet.shared_memory,
        "stop_grace_period": f"{int(GRACE_S) + 60}s",
        "restart": "on-failure:3",
    }
    if launch.variables:
        run["environment"] = {
            name: f"${{{name}:?set it where you call docker compose}}" for name in launch.variables
        }

    if fleet.gpus:
        devices = {"driver": "nvidia", "count": fleet.gpus, "capabilities": ["gpu"]}
        run["deploy"] = {"resources": {"reservations": {"devices": [devices]}}}

    ui = {
        "image": fleet.image,
        "command": ["agentevo", "ui", RUNS, "--port", str(fleet.ui_port)],
        "volumes": [f"{fleet.runs}:{RUNS}:ro"],
        "network_mode": "host",
        "restart": "unless-stopped",
    }
    # without a name all launches whose folders are called alike were one project
    project = {"name": f"agentevo-{launch.name}", "services": {"run": run, "ui": ui}}
    return {FILE: yaml.safe_dump(project, sort_keys=False)}


def command(launch: PlannedLaunch, folder: str) -> list[str]:
    """What submits it."""
    return ["docker", "compose", "--file", f"{folder}/{FILE}", "up", "--detach"]
