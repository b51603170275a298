"""`agentevo pipeline`: several runs as one, and the progress of a pipeline's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.printing import print_table
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo_evolve.pipeline import Pipeline, StageState

Word = Annotated[
    str,
    typer.Argument(
        metavar="FILE|NAME|FOLDER",
        help="A .yaml file or the name of a packaged pipeline (`agentevo list pipelines`) to run, "
        "or the folder of a pipeline to see its progress.",
    ),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[stage.key=value]...",
        help="Changes, such as seed=3, rl.trainer.steps=10 or spin.repeat=5.",
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Resume: finished and unchanged stages do not run again.")
]
Only = Annotated[
    list[str] | None, typer.Option(metavar="STAGE", help="Run only this stage. Repeatable.")
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="STAGE", help="Run this stage and all that depend on it again."),
]
Skip = Annotated[
    list[str] | None, typer.Option(metavar="STAGE", help="Skip this stage. Repeatable.")
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check everything and list the stages, without creating anything."
    ),
]


def pipeline(
    word: Word,
    words: Words = None,
    resume: Resume = False,
    only: Only = None,
    start: From = None,
    skip: Skip = None,
    dry_run: DryRun = False,
) -> None:
    """Run a pipeline of training stages, and measure what each stage gains on fixed held-out tasks
    (docs/pipelines.md)."""
    from agentevo_evolve.pipeline import packaged_pipelines

    if os.path.isdir(word) and word not in packaged_pipelines():
        if resume or only or start or skip or dry_run or words:
            raise ConfigError(
                f"{word} is a folder, whose progress is shown without further words: to run its "
                "pipeline, give the pipeline's file or name"
            )
        _show(Path(word))
        return

    from agentevo_evolve.pipeline import StageChoice, load_pipeline, run_pipeline

    loaded = load_pipeline(word, words or [])
    if dry_run:
        _list(loaded)
        return

    from agentevo.observability.sweep_view import SweepView

    choice = StageChoice(tuple(only or ()), start, tuple(skip or ()))
    run_pipeline(loaded, resume=resume, choice=choice, view=SweepView(loaded.config.name))


def _list(loaded: Pipeline) -> None:
    from agentevo.runtime.paths import short

    seeds = loaded.config.seeds or (loaded.config.seed,)
    print(
        f"{short(loaded.dir)}: {len(loaded.plan.instances)} stages and measurements, seeds "
        f"{', '.join(map(str, seeds))}, {loaded.config.parallel} at once"
    )
    print_table(
        (
            instance.id,
            ("measures" if instance.measures is not None else instance.stage.kind)
            + (f", after {', '.join(instance.needs)}" if instance.needs else ""),
        )
        for instance in loaded.plan.instances
    )


def _show(folder: Path) -> None:
    from agentevo.runtime.console import format_duration
    from agentevo_evolve.pipeline.state import STATE, is_pipeline_folder, read_state

    if not is_pipeline_folder(folder):
        raise ConfigError(f"{folder}: is not the folder of a pipeline (it has no {STATE})")

    state_paths = [folder] if (folder / STATE).is_file() else sorted(folder.glob(f"seed-*/{STATE}"))
    for path in state_paths:
        state = read_state(path if path.is_dir() else path.parent)
        print(
            f"{state.name}, seed {state.seed}: {state.status}, {format_duration(state.wall_s)}, "
            f"{state.tokens:,} tokens"
        )
        print_table((name, _words(stage)) for name, stage in state.stages.items())


def _words(stage: StageState) -> str:
    from agentevo.runtime.console import format_duration
    from agentevo_evolve.pipeline.results import points, success

    words: list[str] = [stage.status]
    if "success" in stage.numbers:
        words.append(success(stage.numbers))
    if "gain" in stage.numbers:
        words.append(points(stage.numbers))
    if stage.wall_s:
        words.append(format_duration(stage.wall_s))

    return ", ".join([*words, *([stage.why[:200]] if stage.why else [])])
