"""`agentevo launch`, and the hidden commands that its scripts run: `launch-node`, `launch-own`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from agentevo.cli.arguments import Overrides, Recipe, plain_options
from agentevo.errors import ConfigError, UnknownNameError

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A resource setting: trainer_nodes, gpus, engines, samplers, or a setting of this "
        "kind of cluster (docs/launch.md). Repeatable.",
    ),
]
Values = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The same settings as a YAML file; --set overrides them.",
    ),
]
Out = Annotated[
    Path,
    typer.Option(metavar="FOLDER", help="The folder for the files."),
]
Submit = Annotated[bool, typer.Option("--submit", help="Submit the job immediately.")]


On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="KIND",
        help="slurm: a batch script for sbatch, whose relative paths start at the folder of the "
        "call. kubernetes: a manifest for kubectl, a Job with its volume and configuration. "
        "skypilot: a task for SkyPilot. ray: a launch for `ray job submit`. compose: a docker "
        "compose file for one machine, with the run and the dashboard.",
    ),
]


def launch(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    on: On,
    set_: Set = None,
    values: Values = None,
    out: Out = Path("launch"),
    submit: Submit = False,
) -> None:
    """Run a recipe on Slurm, Kubernetes, SkyPilot, Ray or docker. Writes the files of the job, and
    submits it with --submit."""
    from agentevo.runs.launch.targets import TARGETS, read_cluster
    from agentevo.runs.launch.writer import submit as submit_launch
    from agentevo.runs.launch.writer import write_launch
    from agentevo.runtime.console import to_stderr

    if on not in TARGETS:
        raise UnknownNameError(f"--on {on}: there are {', '.join(TARGETS)}")

    keys = _read_values(values) if values is not None else {}
    keys |= plain_options(set_ or [], "gpus=8")
    written = write_launch(recipe, overrides or [], read_cluster(on, keys), out)
    for line in written.notes:
        to_stderr(line)
    if submit:
        print(submit_launch(written))
    else:
        print(f"{written.folder}/ is ready; submit it with: {' '.join(written.command)}")


def node(
    nodes: Annotated[
        Path,
        typer.Argument(metavar="NODES_YAML", help="The nodes.yaml of a launch's folder."),
    ],
    rank: Annotated[int, typer.Option(help="The number of this machine's node, from 0.")],
    head: Annotated[
        str, typer.Option(metavar="HOST", help="The address at which the other nodes reach node 0.")
    ] = "127.0.0.1",
    id: Annotated[
        str, typer.Option(help="The id of this start of the launch, the same on all nodes.")
    ] = "0",
    parent: Annotated[
        int, typer.Option(hidden=True, help="End when the parent is no longer this process.")
    ] = 0,
) -> None:
    """Run this machine's processes of a launch: trainer ranks, engines, samplers."""
    from agentevo.runs.launch.node import run_node

    code = run_node(nodes, rank=rank, head=head, id=id, parent=parent or None)
    if code:
        raise typer.Exit(code)


def own(
    nodes: Annotated[
        Path,
        typer.Argument(
            metavar="NODES_YAML",
            help="The nodes.yaml in the folder of `launch --on ray`.",
        ),
    ],
    address: Annotated[
        str,
        typer.Option(
            help="The address of the Ray cluster. Default: RAY_ADDRESS, or this machine's."
        ),
    ] = "",
    id: Annotated[
        str, typer.Option(help="The id of this start of the launch. Default: the current time.")
    ] = "",
) -> None:
    """Run a launch on a Ray cluster: place its nodes and restart lost ones."""
    from agentevo.runs.launch.ray_owner import run_owner as run_owner

    code = run_owner(nodes, address=address or None, id=id)
    if code:
        raise typer.Exit(code)


def _read_values(path: Path) -> dict[str, Any]:
    from agentevo.runtime.parsing import ParseError, parse_yaml, read_text

    try:
        values = parse_yaml(read_text(path))
    except (ConfigError, ParseError) as error:
        raise ConfigError(f"--values {path}: {error}: give a file of YAML") from error

    if not isinstance(values, dict):
        raise ConfigError(f"--values {path}: this is no mapping of keys to values")

    return values
