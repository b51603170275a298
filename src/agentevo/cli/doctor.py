"""`agentevo doctor`."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import Overrides, warn_of_kept_keys
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.runs.doctor.checks import Check


def doctor(
    target: Annotated[
        str,
        typer.Argument(
            metavar="[RECIPE|RUN_DIR]",
            help="The recipe to try with one group. Without it, check the installation.",
        ),
    ] = "",
    overrides: Overrides = None,
    devices: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Instead, estimate the memory of training on N devices, in the recipe's "
            "trainer.parallel or in those that fit, and print the command.",
        ),
    ] = None,
    device_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="With --devices: memory of each device. Default: this machine's first device.",
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Instead, measure the memory of one training step of N processes on this machine, "
            "in the recipe's trainer.parallel.",
        ),
    ] = None,
) -> None:
    """Check a recipe, or the installation, and say what to change."""
    if devices is not None or device_memory is not None or world_size is not None:
        checks = _check_meshes(target, overrides or [], devices, device_memory, world_size)
    else:
        checks = _check(target, overrides or []) if target else _check_installation()

    for check in checks:
        print(check)

    if any(check.status == "wrong" for check in checks):
        raise typer.Exit(1)


def _check(target: str, overrides: list[str]) -> list[Check]:
    from agentevo.config import load_config
    from agentevo.runs.folder.run_folder import is_run_folder, run_config

    if is_run_folder(Path(target)):
        from agentevo.api.run import Run
        from agentevo.runs.doctor.diagnostics import check_recipe

        config = run_config(Path(target), overrides)
        return check_recipe(config, Run(config).checkpoint_path("last"))

    warn_of_kept_keys(target, overrides)
    config = load_config(target, overrides, needs_environment=False)
    if config.data.taught:
        from agentevo.runs.doctor.diagnostics import check_sft_recipe

        return check_sft_recipe(config)

    from agentevo.runs.doctor.diagnostics import check_recipe

    return check_recipe(load_config(target, overrides))


def _check_meshes(
    target: str,
    overrides: list[str],
    devices: int | None,
    device_memory: float | None,
    world_size: int | None,
) -> list[Check]:
    from agentevo.config import load_config

    if not target:
        raise ConfigError("--devices and --world-size are for a recipe: name it")
    if devices is None and device_memory is not None:
        raise ConfigError("--device-memory needs --devices, the number of devices")
    if device_memory is not None and not 0 < device_memory < math.inf:
        raise ConfigError(f"--device-memory {device_memory:g}: GiB of each device, above 0")

    config = load_config(target, overrides, needs_environment=False)
    if not config.data.taught:
        config = load_config(target, overrides)

    words = [target, *overrides]
    checks = []
    if devices is not None:
        from agentevo.runs.doctor.mesh_estimate import check_meshes

        checks.append(check_meshes(config, devices, device_memory, shlex.join(words)))

    if world_size is not None:
        from agentevo.runs.doctor.mesh_step import check_mesh_step

        checks.append(check_mesh_step(config, world_size, words))

    return checks


def _check_installation() -> list[Check]:
    from agentevo.runs.doctor.installation import check_installation

    return check_installation()
