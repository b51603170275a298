"""A launch as a folder that every machine sees: the resolved recipe, and the processes of each
node.

    recipe.yaml  nodes.yaml  *.py (files that the recipe imports)  and what the cluster's tool reads

Each machine runs `agentevo launch-node nodes.yaml`. Paths in nodes.yaml are relative to it, so the
folder can be mounted anywhere.

Python files that the recipe imports are copied with it. For machines that see this machine's
folders (Slurm, Ray), every other path becomes absolute. Containers have their own disks. For them,
files of rows that are small enough are also copied with the recipe, and any other path is refused.
Paths that belong to an image (`/usr` and similar) are not changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from agentevo.config import RunConfig, load_config, to_yaml
from agentevo.errors import ConfigError
from agentevo.runs.launch.fleet import Fleet, FleetNode
from agentevo.runtime.credentials import REFERENCE
from agentevo.runtime.parsing import ParseError, dump_yaml, parse_yaml, read_text

NODES_FILE = "nodes.yaml"
RECIPE_FILE = "recipe.yaml"
MAX_NAME = 50
"""The maximum length of a job's name, in characters. With Kubernetes' suffix, it must fit into a
DNS label of 63 characters."""
COPIED_KEYS = ("tasks.train", "tasks.eval", "data.train", "data.eval", "data.pairs")
"""Keys whose files are copied with the recipe. Their paths become relative to the recipe."""
MAX_COPIED_BYTES = 16 * 2**20
"""The maximum size of a copied file, in bytes."""
_LAUNCH_KEYS = ("run.", "store.", "import.")
"""Keys that the launch sets itself."""
_IMAGE_PATHS = ("/bin/", "/dev/", "/etc/", "/lib", "/opt/", "/proc/", "/sys/", "/usr/")
M = TypeVar("M", bound=pydantic.BaseModel)


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


def read_file(path: Path, model: type[M]) -> M:
    """A file of the launch's folder. Raises ConfigError for an invalid one."""
    text = read_text(path)
    try:
        return model.model_validate(parse_yaml(text))
    except (ParseError, pydantic.ValidationError) as error:
        raise ConfigError(
            f"{path}: this is not a {path.name} of `agentevo launch` "
            f"({str(error).splitlines()[0]}): write the folder again"
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


def copy_imports(tree: dict[str, Any], files: dict[str, str]) -> None:
    """Adds the Python files that a resolved recipe imports to `files` (contents by name). Changes
    the recipe in place, so that its paths are relative to itself. Raises ConfigError for a folder,
    for two files with the same name, and for an unreadable file."""
    for index, entry in enumerate(tree["import"]):
        path = Path(entry)
        if not path.is_absolute():
            continue  # a module, which the machines have installed

        if path.is_dir():
            raise ConfigError(
                f"import: {path.name} is a folder: install it as a package on the machines, and "
                "import it by its name"
            )

        tree["import"][index] = _add_file("import", path, read_text(path), files)


def make_paths_absolute(tree: dict[str, Any]) -> dict[str, str]:
    """Makes the paths of this machine in a resolved recipe absolute, in place. Returns the paths by
    their keys."""
    paths = {}
    for key, place, index in _local_paths(tree):
        place[index] = paths[key] = os.path.abspath(os.path.expanduser(place[index]))
    return paths


def copy_rows(tree: dict[str, Any], runs: str, files: dict[str, str]) -> None:
    """Adds the files of rows that a resolved recipe names to `files` (contents by name). Changes
    the recipe in place, so that its paths are relative to itself. `runs`: the folder of this
    machine that the other machines see. Raises ConfigError for a path that can't be copied."""
    problems = []
    for key, place, index in list(_local_paths(tree)):
        path = os.path.realpath(os.path.expanduser(place[index]))
        if path.startswith(f"{runs}/"):
            continue

        is_rows = any(key == name or key.startswith(f"{name}.") for name in COPIED_KEYS)
        if not is_rows or not os.path.isfile(path):
            problems.append(
                f"{key}: {place[index]} is a path on this machine, which the machines of the "
                f"launch do not see: give a name that they can fetch, or a path below {runs}"
            )
            continue

        try:
            text = read_text(Path(path), at_most=MAX_COPIED_BYTES)
        except ConfigError as error:
            problems.append(
                f"{key}: it can't be copied with the recipe: {error}, or a path below {runs}, "
                "which the machines see"
            )
        else:
            place[index] = _add_file(key, Path(path), text, files)

    if problems:
        raise ConfigError("\n".join(problems))


def _add_file(key: str, path: Path, text: str, files: dict[str, str]) -> str:
    """The file's path relative to the recipe. Raises ConfigError if another file has the same
    name."""
    if files.setdefault(path.name, text) != text:
        raise ConfigError(
            f"{key}: two files are called {path.name}: rename one of them, since they are copied "
            "into one folder"
        )

    return f"./{path.name}"


def _local_paths(
    tree: dict[str, Any] | list[Any], above: str = ""
) -> Iterator[tuple[str, Any, str | int]]:
    """Yields (key, container, index in the container) for every text that is a path of this
    machine."""
    items: Any = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for index, value in items:
        key = f"{above}{index}"
        if isinstance(value, (dict, list)):
            yield from _local_paths(value, f"{key}.")
        elif isinstance(value, str) and not key.startswith(_LAUNCH_KEYS) and _is_local(value):
            yield key, tree, index


def _is_local(text: str) -> bool:
    """Whether a value is written as a path that exists."""
    if not text.startswith(("~", ".")) and "/" not in text:
        return False
    if "\0" in text or "\n" in text or "://" in text:
        return False
    path = os.path.expanduser(text)
    return not path.startswith(_IMAGE_PATHS) and os.path.lexists(path)
