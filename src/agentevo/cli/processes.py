"""The commands that run the parts of a run as processes of their own, and what other machines
reach: `learn`, `sample` and `serve`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import (
    DryRun,
    Host,
    Overrides,
    Port,
    Recipe,
    Tls,
)
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.config import RunConfig

Engines = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help=(
            "The URL of an engine, as `serve` prints it. Repeatable. Default: the engines in "
            "RUN/engines/."
        ),
    ),
]
Parent = Annotated[
    int, typer.Option(hidden=True, help="End when the parent is no longer this process.")
]


def _load_part(recipe: str, overrides: list[str] | None) -> RunConfig:
    """The configuration of a run of several processes, which all have the same engine."""
    from agentevo.config import load_config
    from agentevo.inference.default_engine import load_with_engine
    from agentevo.runtime.console import to_stderr

    return load_with_engine(
        lambda extra_overrides: load_config(recipe, [*(overrides or []), *extra_overrides]),
        note=to_stderr,
        is_separate=True,
    )


def learn(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option(
            help="Resume with a recipe that differs from the run's, such as one with more "
            "trainer.steps. An unchanged recipe resumes without it."
        ),
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Run only the trainer of a recipe. It uses the attempts of `agentevo sample` and resumes where
    it stopped."""
    from agentevo.config import to_yaml
    from agentevo.observability import LiveView
    from agentevo.runs.processes.learn import check_dry_learn
    from agentevo.runs.processes.learn import learn as run_learner
    from agentevo.runtime.console import to_stderr

    config = _load_part(recipe, overrides)
    if dry_run:
        for line in check_dry_learn(config):
            to_stderr(line)
        print(to_yaml(config), end="")
        return

    run_learner(config, resume=resume, view=LiveView(config.run.name))


def sample(
    recipe: Recipe,
    overrides: Overrides = None,
    name: Annotated[
        str,
        typer.Option(help="The sampler's name in the store. Default: from machine and process."),
    ] = "",
    engine: Engines = None,
    parent: Parent = 0,
) -> None:
    """Run only a sampler of a recipe. It plays tasks for `agentevo learn` with the engines of
    `agentevo serve`."""
    config = _load_part(recipe, overrides)
    from agentevo.runs.processes.sample import sample as run_sampler

    run_sampler(config, name=name or None, engines=engine or (), parent=parent or None)


def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN_DIR|FOLDER",
            help="The recipe of a run. With --openai: a run's folder, RUN@STEP, or a .yaml file "
            "whose model to serve. With --training: the folder of the models, one subfolder each.",
        ),
    ],
    overrides: Overrides = None,
    openai: Annotated[
        bool,
        typer.Option(
            "--openai",
            help="Serve a trained model through OpenAI's and Anthropic's APIs.",
        ),
    ] = False,
    gateway: Annotated[
        bool,
        typer.Option(
            "--gateway",
            help="Serve a recipe's engines to agents that run elsewhere: they open sessions and "
            "report rewards, and `agentevo learn` trains on them.",
        ),
    ] = False,
    training: Annotated[
        bool,
        typer.Option(
            "--training",
            help="Serve training to programs on other machines that run their own loop with "
            "agentevo.Client (docs/loop.md).",
        ),
    ] = False,
    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="best|last|STEP|PATH",
            help="With --openai: the checkpoint. Default: the best one, or the .yaml file's model.",
        ),
    ] = "",
    host: Host = "127.0.0.1",
    port: Port = 0,
    tls: Tls = None,
    name: Annotated[
        str,
        typer.Option(
            help="The engine's name in RUN/engines/, or the model's name with --openai. Default: "
            "from machine and process, or the run's folder."
        ),
    ] = "",
    engine: Engines = None,
    max_models: Annotated[
        int,
        typer.Option(
            min=1, help="With --training: the most models that can be open at the same time."
        ),
    ] = 1,
    parent: Parent = 0,
) -> None:
    """Serve a trained model through OpenAI's and Anthropic's APIs (--openai), a run's engines to
    agents elsewhere (--gateway) or training to programs elsewhere (--training). Without these, run
    only an engine of a recipe for `agentevo sample`."""
    if openai + gateway + training > 1:
        raise ConfigError("--openai, --gateway and --training: give one of them")
    if checkpoint and not openai:
        raise ConfigError(
            f"--checkpoint {checkpoint}: an engine of a run has the weights of its trainer: add "
            "--openai to serve a checkpoint"
        )
    if overrides and training:
        raise ConfigError(f"{overrides[0]}: changes are for a recipe, and --training reads none")

    _refuse_idle(
        {
            "--engine": bool(engine) and not gateway,
            "--max-models": max_models > 1 and not training,
            "--name": bool(name) and (gateway or training),
        }
    )
    if openai:
        _serve_trained(target, overrides or [], checkpoint, host, port, tls, name)
        return

    if training:
        from agentevo.api.loop.server import serve_loops

        serve_loops(Path(target), host=host, port=port, tls=tls, max_models=max_models)
        return

    config = _load_part(target, overrides)
    if gateway:
        from agentevo.runs.processes.gateway import run_gateway

        run_gateway(config, host=host, port=port, tls=tls, engines=engine or ())
        return

    from agentevo.runs.processes.serve import serve as run_engine

    run_engine(config, host=host, port=port, tls=tls, name=name or None, parent=parent or None)


def _refuse_idle(options: Mapping[str, bool]) -> None:
    """`options`: option of `serve` -> whether it has no effect. Raises ConfigError for one."""
    for option, is_idle in options.items():
        if is_idle:
            raise ConfigError(f"{option} has no effect here: leave it out (agentevo serve --help)")


def _serve_trained(
    target: str,
    overrides: list[str],
    checkpoint: str,
    host: str,
    port: int,
    tls: bool | None,
    name: str,
) -> None:
    from agentevo.config import load_config
    from agentevo.inference.default_engine import load_with_engine
    from agentevo.runs.evaluation.contestants import checkpoint_of, run_of
    from agentevo.runs.folder.run_folder import UNSCORED, run_config
    from agentevo.runtime.console import to_stderr

    overrides = [*UNSCORED, *overrides]
    path: Path | None = None
    if target.endswith((".yaml", ".yml")):
        trained = load_with_engine(
            lambda extra_overrides: load_config(
                target, [*overrides, *extra_overrides], needs_environment=False
            ),
            note=to_stderr,
            is_separate=True,
        )
        if checkpoint:
            path = checkpoint_of(trained.run_dir, trained, checkpoint)
    else:
        run, named = run_of(target)
        if checkpoint and named not in ("", "best"):
            raise ConfigError(f"--checkpoint {checkpoint}: {target} names one already: give one")

        trained = run_config(run or Path(target), overrides)
        path = checkpoint_of(trained.run_dir, trained, checkpoint or named)

    from agentevo.runs.processes.serve_model import serve_model

    which = None if path is None else str(path)
    serve_model(trained, checkpoint=which, host=host, port=port, tls=tls, name=name or None)
