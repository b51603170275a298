"""Kubernetes: an Indexed Job whose pods run `agentevo launch node`, with a headless service by
which they find node 0, the launch's folder as a ConfigMap, and one volume for the run.

A pod that dies is replaced and goes on where the run stands. A wrong configuration (exit code 2)
fails the Job at once. Values have the names that Helm charts use.
"""

from __future__ import annotations

from typing import Annotated, Any

import yaml
from pydantic import Field

from agentevo.errors import ConfigError
from agentevo.launch.fleet import Fleet, written_as
from agentevo.launch.node import GRACE_S
from agentevo.launch.plan import NODES_FILE, PlannedLaunch

MANIFEST = "manifest.yaml"
LAUNCH = "/launch"
RUNS = "/runs"
USER = 1000
"""Whose group may write to the volume: the image's user."""
LARGEST_CONFIG = 1_000_000
"""Bytes; Kubernetes takes a ConfigMap of 1 MiB."""
ID_LABEL = "metadata.labels['batch.kubernetes.io/controller-uid']"


class _Blocks(yaml.SafeDumper):
    """Writes texts of several lines as they read."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def ignore_aliases(self, data: object) -> bool:
        return True


_Blocks.add_representer(str, _Blocks.represent_str)


Quantity = Annotated[
    str,
    written_as(
        r"\d+(\.\d+)?(m|k|[KMGTPE]i|[MGTPE]|[eE]\d+)?",
        "a quantity of Kubernetes, such as 4, 500m, 16Gi",
    ),
]


class KubernetesFleet(Fleet):
    """What the cluster is asked for."""

    image: str = "agentevo:latest"
    """An image with agentevo (deploy/docker)."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    namespace: str = "default"
    claim: str = ""
    """A PersistentVolumeClaim that is there, for the run's folder. Default: one is made."""
    storage: Quantity = "100Gi"
    """Size of the claim that is made."""
    storage_class: str = ""
    secret: str = "agentevo"
    """The Secret whose keys are the recipe's environment variables."""
    cpu: Quantity = "4"
    memory: Quantity = "16Gi"
    shared_memory: Quantity = "8Gi"
    """Size of /dev/shm, which ranks of one node exchange data through."""
    gpu_resource: str = "nvidia.com/gpu"
    """What the cluster calls a device: amd.com/gpu, huawei.com/Ascend910."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, str], ...] = ()
    service_account: str = ""
    restarts: int = Field(default=20, ge=0)
    """How often pods may be replaced before the Job fails."""


def manifest(launch: PlannedLaunch, fleet: KubernetesFleet, folder: str) -> dict[str, str]:
    """The manifest by its name. Raises ConfigError for files that no ConfigMap can hold."""
    files = launch.files()
    if sum(len(text.encode()) for text in files.values()) > LARGEST_CONFIG:
        raise ConfigError(
            "import: the recipe and the files that it names are over 1 MB, which a ConfigMap "
            "can't hold: put the code into the image and import it by its module's name, and rows "
            f"below {RUNS}"
        )

    meta: dict[str, Any] = {
        "name": launch.name,
        "namespace": fleet.namespace,
        "labels": {"app.kubernetes.io/name": "agentevo", "app.kubernetes.io/instance": launch.name},
    }
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": files},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": launch.name},
                "ports": [{"name": "ranks", "port": launch.plan.port}],
            },
        },
    ]
    if not fleet.claim:
        objects.append(_claim(launch, fleet, meta))

    objects.append(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": _job(launch, fleet)}
    )
    text = yaml.dump_all(objects, Dumper=_Blocks, sort_keys=False, allow_unicode=True)
    return {MANIFEST: text}


def _claim(launch: PlannedLaunch, fleet: KubernetesFleet, meta: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany" if len(launch.nodes) > 1 else "ReadWriteOnce"],
        "resources": {"requests": {"storage": fleet.storage}},
    }
    if fleet.storage_class:
        spec["storageClassName"] = fleet.storage_class

    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": meta,
        "spec": spec,
    }


def _job(launch: PlannedLaunch, fleet: KubernetesFleet) -> dict[str, Any]:
    count = len(launch.nodes)
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": launch.name,
        "securityContext": {"fsGroup": USER},
        "terminationGracePeriodSeconds": int(GRACE_S) + 60,
        "containers": [_container(launch, fleet)],
        "volumes": [
            {"name": "launch", "configMap": {"name": launch.name}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": fleet.claim or launch.name}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": fleet.shared_memory}},
        ],
    }
    if fleet.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in fleet.image_pull_secrets]
    if fleet.node_selector:
        pod["nodeSelector"] = fleet.node_selector
    if fleet.tolerations:
        pod["tolerations"] = list(fleet.tolerations)
    if fleet.service_account:
        pod["serviceAccountName"] = fleet.service_account

    wrong_configuration = {
        "action": "FailJob",
        "onExitCodes": {"containerName": "agentevo", "operator": "In", "values": [2]},
    }
    return {
        "completions": count,
        "parallelism": count,
        "completionMode": "Indexed",
        "backoffLimit": fleet.restarts,
        "podFailurePolicy": {"rules": [wrong_configuration]},
        "template": {"spec": pod},
    }


def _container(launch: PlannedLaunch, fleet: KubernetesFleet) -> dict[str, Any]:
    asked: dict[str, str] = {"cpu": fleet.cpu, "memory": fleet.memory}
    devices = {fleet.gpu_resource: str(fleet.gpus)} if fleet.gpus else {}
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": fleet.secret, "key": name}}}
        for name in launch.variables
    ]

    return {
        "name": "agentevo",
        "image": fleet.image,
        "imagePullPolicy": fleet.image_pull_policy,
        "command": ["agentevo", "launch", "node", f"{LAUNCH}/{NODES_FILE}"],
        "args": [
            "--rank=$(JOB_COMPLETION_INDEX)",
            f"--head={launch.name}-0.{launch.name}",
            "--id=$(LAUNCH_ID)",
        ],
        "env": [
            {
                "name": "JOB_COMPLETION_INDEX",
                "valueFrom": {
                    "fieldRef": {
                        "fieldPath": "metadata.annotations"
                        "['batch.kubernetes.io/job-completion-index']"
                    }
                },
            },
            {"name": "LAUNCH_ID", "valueFrom": {"fieldRef": {"fieldPath": ID_LABEL}}},
            *secrets,
        ],
        "resources": {"requests": asked, "limits": {"memory": fleet.memory, **devices}},
        "volumeMounts": [
            {"name": "launch", "mountPath": LAUNCH, "readOnly": True},
            {"name": "runs", "mountPath": RUNS},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def command(launch: PlannedLaunch, folder: str) -> list[str]:
    """What submits it."""
    return ["kubectl", "apply", "-f", f"{folder}/{MANIFEST}"]
