"""A launch as a folder that every machine sees: the resolved recipe, and the processes of each
node.

    recipe.yaml  nodes.yaml  *.py (files that the recipe imports)  and what the cluster's tool reads

Each machine runs `agentevo launch-node nodes.yaml`. Paths in nodes.yaml are relative to it, so the
folder can be mounted anywhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import pydantic

from agentevo.config import RunConfig, load_config, to_yaml
from agentevo.errors import ConfigError
from agentevo.runs.launch.fleet import Fleet, FleetNode
from agentevo.runs.launch.local_paths import copy_imports, copy_rows, make_paths_absolute
from agentevo.runtime.credentials import REFERENCE
from agentevo.runtime.parsing import ParseError, dump_yaml, parse_yaml, read_text

NODES_FILE = "nodes.yaml"
RECIPE_FILE = "recipe.yaml"
MAX_NAME = 50
"""The maximum length of a job's name, in characters. With Kubernetes' suffix, it must fit into a
DNS label of 63 characters."""


class LaunchPlan(pydantic.BaseModel, extra="forbid", frozen=True):
    """The contents of nodes.yaml."""

    name: str
    recipe: str
    """The recipe's path, relative to the folder of nodes.yaml."""
    overrides: tuple[str, ...] = ()
    port: int = pydantic.Field(default=29400, ge=1024, le=65535)
    """The port on which rank 0 of the trainer listens for the others."""
    nodes: tuple[FleetNode, ...] = pydantic.Field(min_length=1)

    @property
    def ranks(self) -> int:
        return sum(node.trainer for node in self.nodes)

    @property
    def is_apart(self) -> bool:
        """Whether the trainer samples through other processes."""
        return any(node.engines or node.samplers for node in self.nodes)

    def to_yaml(self) -> str:
        return dump_yaml(self.model_dump(mode="json"))


class PlannedLaunch:
    """A planned launch: the processes of each node (`plan`), the environment variables, and the
    files of the launch's folder that every kind of cluster has."""

    def __init__(self, recipe: str, overrides: list[str], fleet: Fleet, runs: str = "") -> None:
        """`runs`: the nodes' folder of runs, if it is not the recipe's. Raises ConfigError for a
        recipe that can't run on these nodes, for files that can't be copied with it, and for paths
        that the nodes do not have."""
        self.config = load_config(recipe, overrides)
        self.nodes = fleet.place()
        self.gpus = fleet.gpus
        self.name = _job_name(self.config.run.name)
        run_dir = f"{runs}/{self.config.run_dir.name}" if runs else self.config.run_dir
        self.plan = LaunchPlan(
            name=self.name, recipe=RECIPE_FILE, overrides=(f"run.dir={run_dir}",), nodes=self.nodes
        )
        _check(self.config, self.plan)

        tree = parse_yaml(to_yaml(self.config))
        self.files = {RECIPE_FILE: "", NODES_FILE: self.plan.to_yaml()}
        """The contents of the files, by name."""
        self.shared_paths: dict[str, str] = {}
        """Maps a key to the path of this machine that the nodes read."""
        copy_imports(tree, self.files)
        if runs:
            copy_rows(tree, runs, self.files)
        else:
            self.shared_paths = make_paths_absolute(tree)
        self.files[RECIPE_FILE] = dump_yaml(tree)

    @property
    def variables(self) -> list[str]:
        """The environment variables with the recipe's secrets, sorted."""
        return sorted(set(REFERENCE.findall(to_yaml(self.config))))

    @property
    def warnings(self) -> list[str]:
        """The resources of these nodes that would be idle, each with a remedy."""
        ranks = self.plan.ranks
        num_devices = self.gpus * len(self.nodes)
        num_used = sum(
            len(node.trainer_devices) + sum(map(len, node.engines)) for node in self.nodes
        )
        lines = []
        if ranks > 1 and self.gpus and not self.config.data.given and not self.plan.is_apart:
            half = max(num_devices // 2, 1)
            lines.append(
                f"{ranks} devices train, but the first process alone samples: {ranks - 1} of "
                f"{num_devices} devices are idle during sampling, often for most of a step: give "
                f"engines their own devices, such as --set engines={half} --set samplers=1 "
                "rollout.staleness=1 rollout.policy=mask (docs/first_job.md)"
            )
        if num_used < num_devices:
            lines.append(
                f"{num_devices - num_used} of {num_devices} devices have no process: raise engines "
                "or trainer_gpus, or lower gpus"
            )

        return lines


def read_plan(path: Path) -> LaunchPlan:
    """Raises ConfigError for an invalid plan."""
    text = read_text(path)
    try:
        return LaunchPlan.model_validate(parse_yaml(text))
    except (ParseError, pydantic.ValidationError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"{path}: this is not a nodes.yaml of `agentevo launch` ({first}): write the folder "
            "again"
        ) from error


def _job_name(name: str) -> str:
    """A name that is valid for Kubernetes, the strictest cluster."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:MAX_NAME].strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}".strip("-")


def _check(config: RunConfig, plan: LaunchPlan) -> None:
    from agentevo.runs.orchestration.checks import check_processes

    check_processes(config, world=plan.ranks)
    if config.run.overwrite:
        raise ConfigError(
            "run.overwrite would delete the run's folder at every restart of the job: remove it"
        )

    if config.rollout.samplers:
        raise ConfigError(
            f"rollout.samplers={config.rollout.samplers}: the launch sets the number of samplers: "
            "remove it, and use --set samplers=... engines=..."
        )

    if plan.is_apart and config.rollout.staleness == 0 and config.rollout.policy != "wait":
        raise ConfigError(
            "rollout.staleness=0 with separate engines and samplers: set rollout.staleness=1 or "
            "more, or rollout.policy=wait"
        )

    users = sum(bool(node.samplers) or n == 0 for n, node in enumerate(plan.nodes))
    url = config.store.url or "sqlite:"
    if users > 1 and url.startswith("sqlite:"):
        raise ConfigError(
            f"store.url: samplers on {users} machines need a database that all of them reach: set "
            "store.url=postgresql://... or mongodb://..., or put everything on one node"
        )
