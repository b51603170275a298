"""The commands that make data to train on: of tools and documents, of what others have recorded,
of tasks in other forms, of known data sets, and of an environment's solver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from agentevo.cli.arguments import Overrides
from agentevo.cli.printing import tell_of_rows
from agentevo.errors import ConfigError

data = typer.Typer(
    no_args_is_help=True, help="Make, convert and prepare tasks and conversations for training."
)
Out = Annotated[
    Path,
    typer.Argument(metavar="OUT", help="The file to write: .jsonl[.gz] or .parquet."),
]
CONVERSATIONS = "conversations"
"""What logs and traces are converted into."""


@data.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="The tasks, or logs and traces: a file, a folder of files, or a Hub dataset.",
        ),
    ],
    out: Out,
    read_form: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="FORM",
            help="Of tasks: agentrl, verl, art or agentevo. Of logs and traces: openai (chat "
            "completions, responses, batches), anthropic (messages), opentelemetry (generative AI "
            "spans and events). auto decides for each row.",
        ),
    ] = "auto",
    form: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORM",
            help="Of tasks: agentevo, agentrl or verl. conversations: logs and traces as "
            "conversations for `agentevo sft` (a .jsonl file).",
        ),
    ] = "agentevo",
) -> None:
    """Convert tasks into another framework's format, or API logs and OpenTelemetry traces into
    conversations. Reports each skipped row with its line and the reason."""
    from agentevo.data.rows import check_not_a_source, check_source
    from agentevo.data.task_forms import FORMS, READ_FORMS
    from agentevo.data.traces import FORMS as TRACE_FORMS

    read_forms = TRACE_FORMS if form == CONVERSATIONS else ("auto", *READ_FORMS)
    for option, chosen_form, known_forms in (
        ("--to", form, (*FORMS, CONVERSATIONS)),
        ("--from", read_form, read_forms),
    ):
        if chosen_form not in known_forms:
            to = f" with --to {form}" if option == "--from" else ""
            raise ConfigError(f"{option} {chosen_form}{to}: there are {', '.join(known_forms)}")

    check_source(source, "data convert")
    check_not_a_source(out, source, "data convert")
    if form == CONVERSATIONS:
        _convert_traces(source, out, read_form)
    else:
        _convert_tasks(source, out, read_form, form)


def _convert_tasks(source: str, out: Path, read_form: str, form: str) -> None:
    from agentevo.data import RowReport
    from agentevo.rollout.task_files import convert_rows, write_rows

    report = RowReport("tasks")
    rows = convert_rows(source, read_form, form, report)
    if not rows:
        raise ConfigError("\n".join(["nothing was written:", *report.lines()]))

    write_rows(rows, out)
    tell_of_rows(report, out, "tasks")


def _convert_traces(source: str, out: Path, read_form: str) -> None:
    from agentevo.data.traces import import_traces
    from agentevo.runtime.console import to_stderr

    imported = import_traces([source], read_form)
    if imported.num_other_spans:
        to_stderr(f"{imported.num_other_spans} spans are not model calls")
    if not imported.rows:
        raise ConfigError("\n".join(["nothing was written:", *imported.report.lines()]))

    _write_conversations(imported.rows, out)
    tell_of_rows(imported.report, out)


def _write_conversations(rows: Iterable[Mapping[str, Any]], out: Path) -> None:
    import json

    from agentevo.store.export import atomic_file

    with atomic_file(out) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


Prepared = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="gsm8k, nq, hotpotqa, reasoning_gym/DATASET such as reasoning_gym/chain_sum, "
        "lesson/TOOL for the tool booking, calculator, database, files or search, or a recipe "
        "whose environment has a solver.",
    ),
]
PreparedFolder = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="The folder for the files."),
]
LESSON_DEMONSTRATIONS = 500
Shown = Annotated[
    int | None,
    typer.Option(
        "--demonstrations",
        min=0,
        max=100_000,
        help="For lessons: the number of conversations that solve other tasks, for `agentevo sft` "
        f"(default: {LESSON_DEMONSTRATIONS}). For a recipe: the number of episodes to play "
        "(default: its cold_start.episodes).",
    ),
]


@data.command()
def prepare(
    name: Prepared,
    folder: PreparedFolder,
    overrides: Overrides = None,
    *,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="For gsm8k, nq, hotpotqa: the published rows, as a file or a dataset such as "
            "openai/gsm8k:train.",
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The agent for the tasks (agent_name)."),
    ] = None,
    count: Annotated[
        int, typer.Option(min=2, max=100_000, help="The number of tasks, if they are generated.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="The seed of generated tasks.")] = 0,
    shown: Shown = None,
    eval_share: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="The share of held-out tasks.")
    ] = 0.1,
) -> None:
    """Write the files of a known dataset: train.jsonl, eval.jsonl, and, where it has them,
    demonstrations.jsonl and corpus.jsonl. Of a recipe: the solved episodes of its environment's
    solver as demonstrations.jsonl, on seeds that training and evaluation do not use."""
    from agentevo.config.sources import recipe_names

    is_recipe = name.endswith((".yaml", ".yml")) or name in recipe_names()
    if overrides and not is_recipe:
        raise ConfigError(f"{overrides[0]}: data prepare {name} reads no recipe: leave it out")

    kind, _, tool = name.partition("/")
    is_lesson = kind == "lesson"
    if (is_recipe or is_lesson) and (source is not None or agent is not None):
        activity = "plays episodes" if is_recipe else "makes its tasks"
        raise ConfigError(f"data prepare {name} {activity}: leave out --from and --agent")

    if is_recipe:
        _prepare_demonstrations(name, overrides or [], folder, shown)
    elif is_lesson:
        num_shown = LESSON_DEMONSTRATIONS if shown is None else shown
        _prepare_lesson(tool, folder, count, eval_share, num_shown, seed)
    else:
        _prepare_tasks(name, folder, source, agent, count, seed, eval_share)


def _prepare_tasks(
    name: str,
    folder: Path,
    source: str | None,
    agent: str | None,
    count: int,
    seed: int,
    eval_share: float,
) -> None:
    """Writes published rows or generated tasks. Raises ConfigError."""
    from agentevo.agents.task_agent import check_known_name
    from agentevo.data import RowReport
    from agentevo.data.rows import check_not_a_source, check_source
    from agentevo.rollout.task_files import (
        CORPUS,
        HELD_OUT,
        QUESTION_SETS,
        TRAIN,
        Passages,
        gsm8k_tasks,
        question_tasks,
        reasoning_gym_tasks,
        write_split,
    )
    from agentevo.runtime.console import to_stderr

    kind, _, dataset = name.partition("/")
    is_read = name in ("gsm8k", *QUESTION_SETS)
    if not (is_read or (kind == "reasoning_gym" and dataset)):
        raise ConfigError(
            f"data prepare {name}: there are gsm8k, {', '.join(QUESTION_SETS)}, "
            "reasoning_gym/DATASET, lesson/TOOL, and recipes"
        )

    if agent is not None:
        check_known_name(agent)

    if (source is not None) != is_read:
        problem = "needs --from SOURCE" if source is None else "makes its tasks: leave out --from"
        raise ConfigError(f"data prepare {name} {problem}")

    report = RowReport("tasks")
    passages = Passages()
    if source is not None:
        check_source(source, "data prepare")
        for out in (TRAIN, HELD_OUT, CORPUS):
            check_not_a_source(folder / out, source, "data prepare")
        tasks = (
            gsm8k_tasks(source, agent, report)
            if name == "gsm8k"
            else question_tasks(name, source, agent, report, passages)
        )
    else:
        tasks = reasoning_gym_tasks(dataset, count, seed, agent)
        report.rows = len(tasks)

    if len(tasks) < 2:
        raise ConfigError("\n".join(["nothing was written: too few tasks", *report.lines()]))

    num_held_out = write_split(tasks, eval_share, folder)
    if name in QUESTION_SETS and (num_passages := passages.write(folder)):
        to_stderr(f"{num_passages} passages written to {folder / CORPUS}")
    tell_of_rows(report, folder / TRAIN, f"tasks ({num_held_out} of them held out, {HELD_OUT})")


def _prepare_lesson(
    tool: str, folder: Path, count: int, eval_share: float, shown: int, seed: int
) -> None:
    """Raises ConfigError."""
    from agentevo.agents.tool_servers.lessons import LESSONS
    from agentevo.agents.tool_servers.lessons.writing import write_lesson
    from agentevo.runtime.console import to_stderr
    from agentevo.runtime.paths import check_new_folder

    if tool not in LESSONS:
        raise ConfigError(f"data prepare lesson/{tool}: there are {', '.join(sorted(LESSONS))}")

    held_out = min(max(1, round(count * eval_share)), count - 1)
    check_new_folder(folder, "FOLDER")
    write_lesson(tool, folder, count=count - held_out, held_out=held_out, shown=shown, seed=seed)
    trained = count - held_out
    to_stderr(
        f"{trained} task{'s' * (trained != 1)}, {held_out} held out, and {shown} demonstrations "
        f"written to {folder}"
    )


def _prepare_demonstrations(
    recipe: str, overrides: list[str], folder: Path, num_episodes: int | None
) -> None:
    """Without `num_episodes`, plays as many as the recipe's cold start. Raises ConfigError."""
    from agentevo.config import load_config
    from agentevo.rollout.task_files import DEMONSTRATIONS
    from agentevo.runs.orchestration.players import demonstration_rows
    from agentevo.runtime.console import to_stderr
    from agentevo.runtime.paths import check_new_folder

    config = load_config(recipe, overrides)
    if config.environment is None:
        raise ConfigError(f"data prepare {recipe}: the recipe has no environment to play")

    check_new_folder(folder, "FOLDER")
    if num_episodes is None:
        num_episodes = config.cold_start.episodes
    if num_episodes == 0:
        raise ConfigError(
            f"data prepare {recipe}: there are 0 episodes to play: say how many, such as "
            "--demonstrations 200 (default: the recipe's cold_start.episodes)"
        )

    rows = list(demonstration_rows(config, num_episodes, to_stderr))
    if not rows:
        raise ConfigError(
            f"data prepare {recipe}: none of {num_episodes} episodes was solved: play more with "
            "--demonstrations N"
        )

    folder.mkdir(parents=True, exist_ok=True)
    out = folder / DEMONSTRATIONS
    _write_conversations(rows, out)
    print(f"{len(rows)} conversations written to {out}")
