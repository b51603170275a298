"""The command that measures a recipe's judge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import Overrides, Recipe
from agentevo.cli.printing import print_note
from agentevo.errors import AgentEvoError, ConfigError

if TYPE_CHECKING:
    from agentevo.config import RunConfig
    from agentevo.rewards.judging import JudgeOptions
    from agentevo.runs.evaluation.judge_data import KnownGroup

Rows = Annotated[
    Path | None,
    typer.Option(
        "--rows",
        metavar="FILE.jsonl",
        help="Attempts with known results: rows with messages, truth (or label) and task_id. "
        "`agentevo trajectories export RUN FILE --annotations judge` writes such rows.",
    ),
]
Run = Annotated[
    Path | None,
    typer.Option("--run", metavar="RUN_DIR", help="A run whose rewards are the truth."),
]
Truth = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=(
            "With --run: reward, success, a metric such as own_reward, or the name of a "
            "reward part."
        ),
    ),
]


def judge(
    recipe: Recipe,
    overrides: Overrides = None,
    rows: Rows = None,
    run: Run = None,
    truth: Truth = "reward",
    groups: Annotated[
        int,
        typer.Option("--groups", min=2, max=10_000, help="With --run: maximum number of groups."),
    ] = 40,
    name: Annotated[
        str, typer.Option("--judge", metavar="NAME", help="The recipe's judge to measure.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.json", help="The report file."),
    ] = None,
) -> None:
    """Measure how often a recipe's judge agrees with the truth, and its bias for position, length
    and injected instructions. Exit code 1 if the judge misses a threshold of the recipe."""
    import json

    from agentevo.config import load_config
    from agentevo.inference.remote_models.model import check_keys
    from agentevo.runs.evaluation.judge_calibration import calibrate, lines_of
    from agentevo.runtime.files import must_write, write_atomic

    if (rows is None) == (run is None):
        raise ConfigError("judge: give either --rows FILE or --run RUN_DIR")
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}: make it first")

    config = load_config(recipe, overrides or [], needs_environment=False)
    chosen_judge = _find_judge(config, name)
    check_keys(config.remote_models)
    judged_groups = _read_groups(rows, run, truth, groups, chosen_judge.images > 0)
    calibration = calibrate(
        chosen_judge,
        config.remote_models,
        judged_groups,
        progress=print_note,
    )
    report = calibration.as_json()
    print("\n".join(lines_of(report)))

    if out is not None:
        with must_write(out, "give another --out"):
            write_atomic(out, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        print(f"written to {out}: name it in the recipe, calibration: {out}")

    if report["below"]:
        raise AgentEvoError(f"judge {chosen_judge.title}: {'; '.join(report['below'])}")


def _find_judge(config: RunConfig, name: str) -> JudgeOptions:
    from agentevo.rewards.judging import JudgeOptions

    judges = [reward for reward in config.rewards if isinstance(reward, JudgeOptions)]
    named = [judge for judge in judges if judge.title == name] if name else judges
    if len(named) != 1:
        judge_names = ", ".join(judge.title for judge in judges) or "none"
        what = f"--judge {name}" if name else "judge"
        raise ConfigError(
            f"{what}: the recipe's rewards have {judge_names} as judges: "
            + ("name one by --judge" if judges else "add one, such as rewards=[ruler]")
        )

    missing = [model for model in named[0].models if model not in config.remote_models]
    if missing:
        raise ConfigError(
            f"rewards: {named[0].title} asks the remote model {missing[0]!r}, which the recipe "
            f"does not have: add remote_models.{missing[0]} (docs/remote_models.md)"
        )

    return named[0]


def _read_groups(
    rows: Path | None, run: Path | None, truth: str, limit: int, with_images: bool
) -> list[KnownGroup]:
    from agentevo.runs.evaluation.judge_data import groups_of_store, read_rows

    if rows is not None:
        return read_rows(rows)

    from agentevo.runs.folder.run_folder import check_run_folder, read_store

    assert run is not None

    folder = check_run_folder(run)
    return read_store(
        folder, lambda store: groups_of_store(store, truth, limit, with_images=with_images)
    )
