"""The kinds of clusters: the keys of each kind, the file that the cluster's tool reads, and the
command that submits it.

The file is `templates/FILE` of this package, and `writer.py` fills it. Keys of Kubernetes have the
same names as in Helm charts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import Field

from agentevo.config.field_words import entry_problem
from agentevo.errors import ConfigError
from agentevo.runs.launch.fleet import Fleet
from agentevo.runs.launch.plan import NODES_FILE, PlannedLaunch

MAX_CONFIG_BYTES = 1_000_000
"""In bytes. Kubernetes' limit of a ConfigMap is 1 MiB."""


def _written_as(pattern: str, how: str) -> pydantic.AfterValidator:
    """A validator for a text that a cluster reads. The cluster would refuse an invalid text at
    submission, or would create a job that never starts. `how`: the accepted form."""

    def check(text: str) -> str:
        if text and re.fullmatch(pattern, text) is None:
            raise ValueError(f"it must be {how}")
        return text

    return pydantic.AfterValidator(check)


class Cluster(Fleet):
    """The keys and methods that all kinds of clusters have."""

    file: ClassVar[str]
    """The file in the launch's folder that the cluster's tool reads."""
    runs_mount: ClassVar[str] = ""
    """The folder of runs in the cluster's containers. Empty if nodes see this machine's folders."""

    def check(self, launch: PlannedLaunch, folder: str) -> None:
        """Raises ConfigError for a launch that this cluster can't run. `folder`: the path of the
        launch's folder, as the nodes see it."""

    def submit_command(self, launch: PlannedLaunch, folder: str) -> list[str]:
        """The command that submits the launch."""
        raise NotImplementedError


class SlurmCluster(Cluster):
    """A batch script, whose step runs `agentevo launch-node` on each node.

    Before the time limit, the script stops the trainer, which ends after its step. If the recipe is
    not finished, the script requeues the job. `scancel` and a preemption work the same way. A node
    that fails ends the job, and Slurm requeues it (`--requeue`).
    """

    file = "job.sbatch"

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    time: Annotated[
        str,
        _written_as(
            r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE",
            "minutes, [hours:]minutes:seconds or days-hours[:minutes[:seconds]]",
        ),
    ] = "24:00:00"
    """Time limit of one job, in the form of `--time`."""
    cpus_per_node: int = Field(default=0, ge=0)
    """0: the partition's default."""
    memory: Annotated[str, _written_as(r"\d+[KMGTkmgt]?", "a number of MB, or one with G or T")] = (
        ""
    )
    """Memory of each node, in the form of `--mem`."""
    gres: str = ""
    """The devices in the cluster's own terms, such as gpu:h100:8. Default: `--gpus-per-node` with
    the value of gpus."""
    requeue: bool = True
    """Continue in a further job if the time limit ended this one."""
    setup: str = ""
    """Shell lines that run first: `module load cuda`, `source .venv/bin/activate`."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, such as --exclusive."""

    def check(self, launch: PlannedLaunch, folder: str) -> None:
        if re.search(r"[\s%]", folder):
            raise ConfigError(
                f"--out {folder!r}: sbatch's lines can't contain a blank or a %: choose another "
                "folder"
            )

    def submit_command(self, launch: PlannedLaunch, folder: str) -> list[str]:
        return ["sbatch", f"{folder}/{self.file}"]


Quantity = Annotated[
    str,
    _written_as(
        r"\d+(\.\d+)?(m|k|[KMGTPE]i|[MGTPE]|[eE]\d+)?",
        "a quantity of Kubernetes, such as 4, 500m, 16Gi",
    ),
]


class KubernetesCluster(Cluster):
    """An Indexed Job whose pods run `agentevo launch-node`. A headless service lets them find node
    0, a ConfigMap has the launch's folder, and a volume has the run.

    A pod that dies is replaced and resumes the run. A wrong configuration (exit code 2) fails the
    Job at once.
    """

    file = "manifest.yaml"
    runs_mount = "/runs"

    image: str = "agentevo:latest"
    """An image with agentevo (deploy/docker)."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    namespace: str = "default"
    claim: str = ""
    """An existing PersistentVolumeClaim for the run's folder. Default: a new one."""
    storage: Quantity = "100Gi"
    """Size of the new claim."""
    storage_class: str = ""
    secret: str = "agentevo"
    """The Secret that holds the recipe's environment variables."""
    cpu: Quantity = "4"
    memory: Quantity = "16Gi"
    shared_memory: Quantity = "8Gi"
    """Size of /dev/shm, through which the ranks of one node exchange data."""
    gpu_resource: str = "nvidia.com/gpu"
    """The cluster's name for a device, such as amd.com/gpu or huawei.com/Ascend910."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, str], ...] = ()
    service_account: str = ""
    restarts: int = Field(default=20, ge=0)
    """Number of pod replacements before the Job fails."""

    def check(self, launch: PlannedLaunch, folder: str) -> None:
        if sum(len(text.encode()) for text in launch.files.values()) > MAX_CONFIG_BYTES:
            raise ConfigError(
                "import: the recipe and the files that it names have more than 1 MB, the limit of "
                "a ConfigMap: put the code into the image and import it by its module's name, and "
                f"put rows below {self.runs_mount}"
            )

    def submit_command(self, launch: PlannedLaunch, folder: str) -> list[str]:
        return ["kubectl", "apply", "-f", f"{folder}/{self.file}"]


AtLeast = Annotated[
    str, _written_as(r"\d+(\.\d+)?\+?", "a number, such as 16, or 16+ for at least as many")
]


class SkyPilotCluster(Cluster):
    """A task whose nodes run `agentevo launch-node`. The launch's folder is copied to every node.
    With several nodes, the run's folder is on a volume that all of them mount."""

    file = "task.sky.yaml"
    runs_mount = "/runs"

    infra: str = ""
    """The cloud or cluster, such as aws, gcp/us-central1, k8s. Default: the cheapest."""
    accelerator: Annotated[str, _written_as(r"[\w.-]+", "a kind of device alone, such as H100")] = (
        ""
    )
    """The kind of device, such as H100; needed if gpus is above 0."""
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

    def check(self, launch: PlannedLaunch, folder: str) -> None:
        if self.gpus and not self.accelerator:
            raise ConfigError(
                "accelerator: gpus is above 0, but no device is named: set it, such as "
                "--set accelerator=H100"
            )

        if len(launch.nodes) > 1 and not self.volume:
            raise ConfigError(
                f"volume: {len(launch.nodes)} nodes share the run's folder: make a volume that "
                "several nodes mount (`sky volumes apply`), and name it with --set volume=NAME"
            )

    def submit_command(self, launch: PlannedLaunch, folder: str) -> list[str]:
        secrets = [word for name in launch.variables for word in ("--secret", name)]
        return [
            "sky",
            "launch",
            "--yes",
            "--cluster",
            launch.name,
            *secrets,
            f"{folder}/{self.file}",
        ]


class RayCluster(Cluster):
    """A placement group with one bundle per node. In each bundle, `agentevo launch-own` runs
    `agentevo launch-node` (ray_owner.py). Ray only owns processes. Data and weights never go
    through it."""

    file = "ray.yaml"

    cpus_per_node: int = Field(default=1, ge=1)
    """CPUs of each bundle."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Further resources of each bundle, by their names in the cluster."""
    spread: bool = True
    """Place each bundle on a different Ray node. With false, pack the bundles, for a cluster of few
    large nodes."""
    placed_s: float = Field(default=600.0, gt=0)
    """The maximum wait for the placement group in seconds, because the cluster may have to grow."""
    restarts: int = Field(default=3, ge=0)
    """Number of restarts of the launch after its trainer was lost."""

    def submit_command(self, launch: PlannedLaunch, folder: str) -> list[str]:
        """Submits a job to the cluster that RAY_ADDRESS names."""
        owner = ["agentevo", "launch-own", f"{folder}/{NODES_FILE}"]
        return ["ray", "job", "submit", "--no-wait", "--", *owner]


class ComposeCluster(Cluster):
    """Docker on one machine: the run and the dashboard."""

    file = "compose.yaml"
    runs_mount = "/runs"

    image: str = "agentevo:latest"
    """An image with agentevo (deploy/docker)."""
    shared_memory: Annotated[
        str, _written_as(r"(?i)\d+(\.\d+)?([kmg]b?|b)?", "a size that docker reads, such as 8gb")
    ] = "8gb"
    """Size of /dev/shm, through which ranks exchange data."""
    runs: str = "../runs"
    """The folder of this machine with the runs, relative to the launch's folder."""
    ui_port: int = 8765
    """The dashboard's port on this machine's loopback address."""

    def check(self, launch: PlannedLaunch, folder: str) -> None:
        if len(launch.nodes) > 1:
            raise ConfigError(
                f"the launch has {len(launch.nodes)} nodes, and compose runs on one machine: use "
                "slurm, kubernetes or skypilot"
            )

    def submit_command(self, launch: PlannedLaunch, folder: str) -> list[str]:
        return ["docker", "compose", "--file", f"{folder}/{self.file}", "up", "--detach"]


TARGETS: Mapping[str, type[Cluster]] = {
    "slurm": SlurmCluster,
    "kubernetes": KubernetesCluster,
    "skypilot": SkyPilotCluster,
    "ray": RayCluster,
    "compose": ComposeCluster,
}


def read_cluster(target: str, values: Mapping[str, Any]) -> Cluster:
    """Raises ConfigError for unknown keys and values that don't fit."""
    model = TARGETS[target]
    try:
        return model.model_validate(dict(values))
    except pydantic.ValidationError as error:
        lines = [entry_problem(target, model, problem) for problem in error.errors()]
        raise ConfigError("\n".join(lines)) from error
