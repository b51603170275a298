"""The commands that train: `train` and `sft`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentevo.cli.arguments import DryRun, Overrides, Recipe, Resume, warn_of_kept_keys
from agentevo.cli.printing import print_table
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.config import RunConfig
    from agentevo.config.sweep import Sweep


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    """Train an agent with reinforcement learning, and evaluate it before and after. A recipe with a
    `sweep` trains several runs and prints a table."""
    from agentevo.config import load_config, to_yaml
    from agentevo.config.sweep import load_sweep

    sweep = load_sweep(recipe, overrides or [])
    if sweep is not None:
        warn_of_kept_keys(recipe, overrides or [])
        if engine_overrides := _engine_overrides(
            [member.config for member in sweep.members], resume=False
        ):
            sweep = load_sweep(recipe, [*(overrides or []), *engine_overrides])
            assert sweep is not None
        _train_sweep(sweep, resume, dry_run)
        return

    config = load_config(recipe, overrides or [])
    warn_of_kept_keys(recipe, overrides or [])
    _check_folder(config, resume)
    if engine_overrides := _engine_overrides([config], resume):
        config = load_config(recipe, [*(overrides or []), *engine_overrides])
    if dry_run:
        _dry_run(config, "train", resume)
        print(to_yaml(config), end="")
        return

    from agentevo.observability import LiveView
    from agentevo.runs.orchestration.run import train as train_run

    train_run(config, resume=resume, view=LiveView(config.run.name))


def _check_folder(config: RunConfig, resume: bool = False) -> None:
    """Refuses a folder in which the run may not begin or resume, before torch is imported."""
    from agentevo.config.parallel import follows
    from agentevo.runs.folder.creation import check_folder

    if resume and config.run.overwrite:
        raise ConfigError(
            "--resume continues the run in the folder, and run.overwrite deletes it: give only "
            "one of the two options"
        )
    if not resume and not follows():
        check_folder(config)


def _engine_overrides(configs: Sequence[RunConfig], resume: bool) -> list[str]:
    """The overrides that choose an engine for runs on a GPU whose recipe names none."""
    from agentevo.inference.default_engine import engine_override
    from agentevo.runtime.console import to_stderr

    return engine_override(configs, resume=resume, note=to_stderr)


def _dry_run(config: RunConfig, command: Literal["train", "sft"], resume: bool) -> None:
    from agentevo.runs.orchestration.checks import check_dry
    from agentevo.runtime.console import to_stderr

    for line in check_dry(config, command, resume=resume):
        to_stderr(line)


def _train_sweep(sweep: Sweep, resume: bool, dry_run: bool) -> None:
    if resume and sweep.overwrite:
        raise ConfigError(
            "--resume continues the sweep in the folder, and run.overwrite deletes it: give "
            "only one of the two options"
        )

    if dry_run:
        from agentevo.runs.processes.sweep import check_sweep

        check_sweep(sweep, resume, may_fetch=False)
        print(f"{sweep.dir}: {len(sweep.members)} runs, {sweep.parallel} at once")
        print_table(
            (member.name, ", ".join(f"{key}={value}" for key, value in member.changes.items()))
            for member in sweep.members
        )
        return

    from agentevo.observability.sweep_view import SweepView
    from agentevo.runs.processes.sweep import run_sweep

    run_sweep(sweep, resume=resume, view=SweepView(sweep.name))


def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    reward_model: Annotated[
        bool,
        typer.Option(
            "--reward-model",
            help="Instead, train a reward model on preference pairs (rm.pairs), for the reward "
            "`reward_model`.",
        ),
    ] = False,
) -> None:
    """Fine-tune a model on conversations from files, from the environment's solver, or from a run's
    best attempts. With --reward-model, train a reward model."""
    if reward_model:
        if resume:
            raise ConfigError("--resume: a reward model can't be resumed: leave --resume out")
        _train_reward_model(recipe, overrides or [], dry_run)
        return

    from agentevo.config import check_sft, load_config, to_yaml

    config = load_config(recipe, overrides or [], needs_environment=False)
    check_sft(config)
    _check_folder(config, resume)
    if dry_run:
        _dry_run(config, "sft", resume)
        print(to_yaml(config), end="")
        return

    from agentevo.observability import LiveView
    from agentevo.runs.orchestration.run import train as train_run

    train_run(config, command="sft", resume=resume, view=LiveView(config.run.name))


def _train_reward_model(recipe: str, overrides: list[str], dry_run: bool) -> None:
    from agentevo.config import load_config, to_yaml
    from agentevo.config.sft import check_rm

    config = load_config(recipe, overrides, needs_environment=False)
    check_rm(config)
    _check_folder(config)
    if dry_run:
        from agentevo.runs.orchestration.reward_model import check_parts

        check_parts(config)
        print(to_yaml(config), end="")
        return

    from agentevo.runs.orchestration.reward_model import train as train_reward_model
    from agentevo.runtime.paths import short

    result = train_reward_model(config)
    print(
        f"{short(config.run_dir / 'model')}: held-out accuracy "
        f"{result['rm/eval/accuracy_before']:.1%} -> {result['rm/eval/accuracy']:.1%} of "
        f"{result['held_out_pairs']:.0f} pairs"
    )
