"""A launch as a folder that every machine sees: the resolved recipe, and which processes are on
which node.

    recipe.yaml  nodes.yaml  *.py (files that the recipe imports)  and what the cluster's tool reads

`agentevo launch node nodes.yaml` is what each machine runs. Paths in nodes.yaml are relative to it,
so the folder may be mounted anywhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import pydantic

from agentevo.config import RunConfig, load_config, to_yaml
from agentevo.credentials import REFERENCE
from agentevo.errors import ConfigError
from agentevo.launch.fleet import Fleet, FleetNode
from agentevo.launch.local_paths import carry, with_absolute_paths
from agentevo.parsing import ParseError, dump_yaml, parse_yaml, read_text

NODES_FILE = "nodes.yaml"
RECIPE_FILE = "recipe.yaml"
LONGEST_NAME = 50
"""Characters of a job's name: what Kubernetes adds to it must fit into a DNS label of 63."""


class LaunchPlan(pydantic.BaseModel, extra="forbid", frozen=True):
    """Contents of nodes.yaml."""

    name: str
    recipe: str
    """The recipe, from the folder of nodes.yaml."""
    overrides: tuple[str, ...] = ()
    port: int = pydantic.Field(default=29400, ge=1024, le=65535)
    """Where rank 0 of the trainer listens for the others."""
    nodes: tuple[FleetNode, ...] = pydantic.Field(min_length=1)

    @property
    def ranks(self) -> int:
        return sum(node.trainer for node in self.nodes)

    @property
    def trainer_nodes(self) -> int:
        return sum(node.trainer > 0 for node in self.nodes)

    @property
    def is_apart(self) -> bool:
        """Whether the trainer samples through other processes."""
        return any(node.engines or node.samplers for node in self.nodes)

    def to_yaml(self) -> str:
        return dump_yaml(self.model_dump(mode="json"))


class PlannedLaunch:
    """What a kind of cluster is told: the plan, and the files of its folder."""

    def __init__(self, recipe: str, overrides: list[str], fleet: Fleet, runs: str = "") -> None:
        """`runs`: the folder of the machines in which the run's folder lies, if not as the recipe
        says.
        Raises ConfigError for a recipe that can't run on these nodes."""
        self.config = load_config(recipe, overrides)
        self.nodes = fleet.place()
        self.gpus = fleet.gpus
        self.name = _job_name(self.config.run.name)
        _check(self.config, fleet, self.nodes)
        own = self.config.run_dir
        place = f"run.dir={f'{runs}/{own.name}' if runs else own}"
        self.plan = LaunchPlan(
            name=self.name, recipe=RECIPE_FILE, overrides=(place,), nodes=self.nodes
        )
        self.runs = runs
        self.shared_paths: dict[str, str] = {}
        """Key -> the path of this machine that the nodes read, as `files` has found them."""

    @property
    def variables(self) -> list[str]:
        """Environment variables that hold the recipe's secrets, sorted."""
        return sorted(set(REFERENCE.findall(to_yaml(self.config))))

    @property
    def warnings(self) -> list[str]:
        """What these nodes would pay for and not use, with what to set."""
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
                f"{num_devices} devices are idle meanwhile, often for most of a step: give engines "
                f"devices of their own, such as --set engines={half} --set samplers=1 "
                "rollout.staleness=1 rollout.policy=mask (docs/first_job.md)"
            )
        if num_used < num_devices:
            lines.append(
                f"{num_devices - num_used} of {num_devices} devices have no process: raise engines "
                "or trainer_gpus, or lower gpus"
            )

        return lines

    def files(self) -> dict[str, str]:
        """Contents of the folder by name: the recipe with the files that it imports beside it, and
        nodes.yaml; see `local_paths` for other files. Raises ConfigError for two files of one name,
        for what can't be read, and for paths that the nodes do not have."""
        found = {}
        tree = parse_yaml(to_yaml(self.config))

        imports = []
        for entry in self.config.imports:
            path = Path(entry)
            if not path.is_absolute():
                imports.append(entry)  # a module, which the machines have installed
                continue

            if path.is_dir():
                raise ConfigError(
                    f"import: {path.name} is a folder: install it as a package on the machines, "
                    "and import it by its name"
                )

            if path.name in found:
                raise ConfigError(
                    f"import: two files are called {path.name}: rename one of them, they go into "
                    "one folder"
                )

            found[path.name] = read_text(path)
            imports.append(f"./{path.name}")

        tree["import"] = imports
        carried = carry(tree, self.runs) if self.runs else {}
        if not self.runs:
            self.shared_paths = with_absolute_paths(tree)

        recipe = dump_yaml(tree)
        return {RECIPE_FILE: recipe, NODES_FILE: self.plan.to_yaml(), **found, **carried}


def read_plan(path: Path) -> LaunchPlan:
    """Raises ConfigError for what is no plan."""
    text = read_text(path)
    try:
        return LaunchPlan.model_validate(parse_yaml(text))
    except (ParseError, pydantic.ValidationError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"{path}: this is no nodes.yaml of `agentevo launch` ({first}): write the folder again"
        ) from error


def _job_name(name: str) -> str:
    """As Kubernetes, the strictest, wants names."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:LONGEST_NAME].strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}".strip("-")


def _check(config: RunConfig, fleet: Fleet, nodes: tuple[FleetNode, ...]) -> None:
    from agentevo.orchestration.checks import check_processes

    check_processes(config, world=sum(node.trainer for node in nodes))
    if config.run.overwrite:
        raise ConfigError(
            "run.overwrite deletes the run's folder whenever a job starts again: leave it out"
        )

    if config.rollout.samplers:
        raise ConfigError(
            f"rollout.samplers={config.rollout.samplers}: who launches says how many samplers "
            "there are: leave it out, and use --set samplers=... engines=..."
        )

    if fleet.is_apart and config.rollout.staleness == 0 and config.rollout.policy != "wait":
        raise ConfigError(
            "rollout.staleness=0 with engines and samplers of their own: set rollout.staleness=1 "
            "or more, or rollout.policy=wait"
        )

    users = sum(bool(node.samplers) or n == 0 for n, node in enumerate(nodes))
    url = config.store.url or "sqlite:"
    if users > 1 and url.startswith("sqlite:"):
        raise ConfigError(
            f"store.url: samplers on {users} machines need a database that all of them reach: set "
            "store.url=postgresql://... or mongodb://..., or put everything on one node"
        )
