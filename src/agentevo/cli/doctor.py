"""`agentevo doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import Overrides, warn_of_kept_keys

if TYPE_CHECKING:
    from agentevo.doctor.checks import Check


def doctor(
    target: Annotated[
        str,
        typer.Argument(
            metavar="[RECIPE|RUN_DIR]",
            help="What to try with one group of attempts. Without it, the installation.",
        ),
    ] = "",
    overrides: Overrides = None,
) -> None:
    """Say in plain words whether a recipe (or the installation) is in order, and what to change if
    not."""
    checks = _check(target, overrides or []) if target else _check_installation()
    for check in checks:
        print(check)
    if any(check.status == "wrong" for check in checks):
        raise typer.Exit(1)


def _check(target: str, overrides: list[str]) -> list[Check]:
    from agentevo.config import load_config
    from agentevo.runs.folder import is_run_folder, run_config

    if is_run_folder(Path(target)):
        from agentevo.api.run import Run
        from agentevo.doctor.diagnostics import check_recipe

        config = run_config(Path(target), overrides)
        return check_recipe(config, Run(config).checkpoint_path("last"))
    warn_of_kept_keys(target, overrides)
    config = load_config(target, overrides, needs_environment=False)
    if config.data.taught:
        from agentevo.doctor.sft_diagnostics import check_sft_recipe

        return check_sft_recipe(config)
    from agentevo.doctor.diagnostics import check_recipe

    return check_recipe(load_config(target, overrides))


def _check_installation() -> list[Check]:
    from agentevo.doctor.installation import check_installation

    return check_installation()
