"""Slurm: one batch script; a step runs `agentevo launch node` on each node.

The script stops the trainer before the time limit, so that it ends after its step, and puts the job
into the queue again where the recipe is not done. `scancel` and a preemption go the same way. A
node that fails ends the job, and Slurm puts it into the queue again (`--requeue`).
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated

from pydantic import Field

from agentevo.errors import ConfigError
from agentevo.launch.fleet import Fleet, written_as
from agentevo.launch.node import GRACE_S, STOPPED
from agentevo.launch.plan import NODES_FILE, PlannedLaunch

SCRIPT = "job.sbatch"


class SlurmFleet(Fleet):
    """What sbatch is asked for."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    time: Annotated[
        str,
        written_as(
            r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE",
            "minutes, [hours:]minutes:seconds or days-hours[:minutes[:seconds]]",
        ),
    ] = "24:00:00"
    """Time limit of one job, as `--time` takes it."""
    cpus_per_node: int = Field(default=0, ge=0)
    """0: what the partition gives."""
    memory: Annotated[str, written_as(r"\d+[KMGTkmgt]?", "a number of MB, or one with G or T")] = ""
    """Memory of each node, as `--mem` takes it."""
    gres: str = ""
    """How the cluster names devices, such as gpu:h100:8. Default: `--gpus-per-node` of gpus."""
    requeue: bool = True
    """Go on in a further job where the time limit ended this one."""
    setup: str = ""
    """Shell lines before anything else: `module load cuda`, `source .venv/bin/activate`."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, such as --exclusive."""


def script(launch: PlannedLaunch, fleet: SlurmFleet, folder: str) -> dict[str, str]:
    """The batch script by its name. `folder`: that of the launch, as the nodes see it.

    Raises ConfigError for a folder that no line of sbatch can name."""
    if re.search(r"[\s%]", folder):
        raise ConfigError(f"--out {folder!r}: sbatch's own lines take no blank and no %")

    options = {
        "job-name": launch.name,
        "nodes": str(len(launch.nodes)),
        "ntasks-per-node": "1",
        "time": fleet.time,
        "output": f"{folder}/%j.log",
        "open-mode": "append",
        "signal": f"B:TERM@{int(GRACE_S) + 60}",
        "partition": fleet.partition,
        "account": fleet.account,
        "qos": fleet.qos,
        "constraint": fleet.constraint,
        "cpus-per-task": str(fleet.cpus_per_node or ""),
        "mem": fleet.memory,
        "gres": fleet.gres,
        "gpus-per-node": str(fleet.gpus) if fleet.gpus and not fleet.gres else "",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
    lines += ["#SBATCH --requeue"] if fleet.requeue else ["#SBATCH --no-requeue"]
    lines += [f"#SBATCH {option}" for option in fleet.sbatch]
    checks = [f': "${{{name}:?set it where you call sbatch}}"' for name in launch.variables]
    nodes = shlex.quote(f"{folder}/{NODES_FILE}")
    again = (
        f'[ "$code" = {STOPPED} ] && [ -n "$asked" ] && scontrol requeue "$SLURM_JOB_ID"\n'
        if fleet.requeue
        else ""
    )

    # since Slurm 22.05 srun does not take over what sbatch was told
    cpus = [f"export SRUN_CPUS_PER_TASK={fleet.cpus_per_node}"] if fleet.cpus_per_node else []
    text = "\n".join(["#!/bin/bash", *lines, fleet.setup, "set -uo pipefail", *checks, *cpus])
    return {
        SCRIPT: f"""{text}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
asked=
srun --kill-on-bad-exit=1 bash -c 'exec agentevo launch node "$0" --rank "$SLURM_PROCID" \\
    --head "$1" --id "$2"' {nodes} "$head" "$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" &
step=$!
trap 'asked=1; scancel --signal=TERM "$SLURM_JOB_ID.0"' TERM
wait "$step"; code=$?
while kill -0 "$step" 2> /dev/null; do wait "$step"; code=$?; done
{again}exit "$code"
"""
    }


def command(launch: PlannedLaunch, folder: str) -> list[str]:
    """What submits it."""
    return ["sbatch", f"{folder}/{SCRIPT}"]
