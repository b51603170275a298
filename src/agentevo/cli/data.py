"""The commands that make data to train on: of what others have recorded, of tasks in other forms,
of known data sets, and of an environment's solver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from agentevo.cli.arguments import Overrides, Recipe, path_word
from agentevo.cli.row_account import tell_of_rows
from agentevo.errors import ConfigError

data = typer.Typer(
    no_args_is_help=True, help="Convert data into conversations and tasks for training."
)


@data.command("import")
def import_traces(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="The records: a .jsonl or .json file (also .gz), a .parquet file, or a folder of "
            "them.",
        ),
    ],
    out: Annotated[
        Path, typer.Argument(parser=path_word, metavar="OUT.jsonl[.gz]", help="The file to write.")
    ],
    form: Annotated[
        str,
        typer.Option(
            metavar="FORM",
            help="openai (chat completions, responses, batches), anthropic (messages), "
            "opentelemetry (generative AI spans and events), or auto, which decides for each "
            "row.",
        ),
    ] = "auto",
) -> None:
    """Convert API logs (OpenAI, Anthropic) or OpenTelemetry traces into conversations for `agentevo
    sft`. Reports each skipped record with the reason."""
    import json
    import sys

    from agentevo.data.rows import check_not_a_source, check_source
    from agentevo.data.traces import FORMS
    from agentevo.data.traces import import_traces as imported_of
    from agentevo.store.export import atomic_file

    if form not in FORMS:
        raise ConfigError(f"--form {form}: there are {', '.join(FORMS)}")

    check_source(source, "data import")
    check_not_a_source(out, source, "data import")

    imported = imported_of([source], form)
    if imported.num_other_spans:
        print(f"import: {imported.num_other_spans} spans are not model calls", file=sys.stderr)
    if not imported.rows:
        raise ConfigError("\n".join(["nothing was written:", *imported.report.lines()]))

    with atomic_file(out) as file:
        for row in imported.rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    tell_of_rows(imported.report, out)


Out = Annotated[
    Path,
    typer.Argument(
        parser=path_word, metavar="OUT", help="The file to write: .jsonl[.gz] or .parquet."
    ),
]


@data.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="The tasks: a file, a folder of files, or a Hub dataset."
        ),
    ],
    out: Out,
    read_form: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="FORM",
            help="agentrl, verl, art or agentevo; auto decides for each row.",
        ),
    ] = "auto",
    form: Annotated[
        str, typer.Option("--to", metavar="FORM", help="agentevo, agentrl or verl.")
    ] = "agentevo",
) -> None:
    """Convert tasks into another framework's format. Reports each skipped task with its line and
    the reason."""
    from agentevo.data import RowReport
    from agentevo.data.rows import check_not_a_source, check_source
    from agentevo.data.task_forms import FORMS, READ_FORMS
    from agentevo.rollout.task_files import convert_rows, write_rows

    for option, chosen_form, known_forms in (
        ("--from", read_form, ("auto", *READ_FORMS)),
        ("--to", form, FORMS),
    ):
        if chosen_form not in known_forms:
            raise ConfigError(f"{option} {chosen_form}: there are {', '.join(known_forms)}")

    check_source(source, "data convert")
    check_not_a_source(out, source, "data convert")

    report = RowReport("tasks")
    rows = convert_rows(source, read_form, form, report)
    if not rows:
        raise ConfigError("\n".join(["nothing was written:", *report.lines()]))

    write_rows(rows, out)
    tell_of_rows(report, out, "tasks")


Prepared = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="gsm8k, nq, hotpotqa, reasoning_gym/DATASET such as reasoning_gym/chain_sum, or "
        "lesson/TOOL for the tool booking, calculator, database, files or search.",
    ),
]
PreparedFolder = Annotated[
    Path,
    typer.Argument(
        parser=path_word, metavar="FOLDER", help="The folder for train.jsonl and eval.jsonl."
    ),
]
Shown = Annotated[
    int,
    typer.Option(
        "--demonstrations",
        min=0,
        max=100_000,
        help="For lessons: the number of conversations that solve other tasks, for `agentevo sft`.",
    ),
]


@data.command()
def prepare(
    name: Prepared,
    folder: PreparedFolder,
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
    shown: Shown = 500,
    eval_share: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="The share of held-out tasks.")
    ] = 0.1,
) -> None:
    """Write the task files of a known dataset: train.jsonl, eval.jsonl, and, where it has them,
    demonstrations.jsonl and corpus.jsonl."""
    from agentevo.agents.named_by_task import check_known_name
    from agentevo.console import to_stderr
    from agentevo.data import RowReport
    from agentevo.data.rows import check_not_a_source, check_source
    from agentevo.rollout.question_files import CORPUS, QUESTION_SETS, Passages, question_tasks
    from agentevo.rollout.task_files import HELD_OUT, TRAIN, gsm8k_tasks, reasoning_gym_tasks
    from agentevo.rollout.task_files import write_split as write

    kind, _, dataset = name.partition("/")
    if kind == "lesson":
        if source is not None or agent is not None:
            raise ConfigError(f"data prepare {name} makes its tasks: leave out --from and --agent")
        _prepare_lesson(dataset, folder, count, eval_share, shown, seed)
        return

    is_read = name in ("gsm8k", *QUESTION_SETS)
    if not (is_read or (kind == "reasoning_gym" and dataset)):
        raise ConfigError(
            f"data prepare {name}: there are gsm8k, {', '.join(QUESTION_SETS)}, "
            "reasoning_gym/DATASET and lesson/TOOL"
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

    number = write(tasks, eval_share, folder)
    if name in QUESTION_SETS and (num_passages := passages.write(folder)):
        to_stderr(f"{num_passages} passages written to {folder / CORPUS}")
    tell_of_rows(report, folder / TRAIN, f"tasks ({number} of them held out, {HELD_OUT})")


def _prepare_lesson(
    tool: str, folder: Path, count: int, eval_share: float, shown: int, seed: int
) -> None:
    """Raises ConfigError."""
    from agentevo.console import to_stderr
    from agentevo.tool_servers.lessons import LESSONS
    from agentevo.tool_servers.lessons.writing import write_lesson

    if tool not in LESSONS:
        raise ConfigError(f"data prepare lesson/{tool}: there are {', '.join(sorted(LESSONS))}")

    held_out = min(max(1, round(count * eval_share)), count - 1)
    if not os.path.isdir(folder) and any(map(os.path.exists, (folder, folder.parent))):
        above = folder if os.path.exists(folder) else folder.parent
        if not os.path.isdir(above):
            raise ConfigError(f"{above} is a file: give a folder")

    write_lesson(tool, folder, count=count - held_out, held_out=held_out, shown=shown, seed=seed)
    trained = count - held_out
    to_stderr(
        f"{trained} task{'s' * (trained != 1)}, {held_out} held out, and {shown} demonstrations "
        f"written to {folder}"
    )


@data.command("demonstrate")
def demonstrate_command(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out", parser=path_word, metavar="OUT.jsonl[.gz]", help="The file to write."
        ),
    ],
    episodes: Annotated[int, typer.Option(min=1, help="The number of episodes.")] = 500,
) -> None:
    """Write the solver's episodes of a recipe's environment as conversations for `agentevo sft`, on
    seeds that training and evaluation do not use."""
    import json

    from agentevo.config import load_config
    from agentevo.console import to_stderr
    from agentevo.orchestration.demonstrations import demonstration_rows
    from agentevo.store.export import atomic_file

    config = load_config(recipe, overrides or [])
    if config.environment is None:
        raise ConfigError("data demonstrate: the recipe has no environment to play")

    rows = list(demonstration_rows(config, episodes, to_stderr))
    if not rows:
        raise ConfigError(f"data demonstrate: none of {episodes} episodes was solved: play more")

    with atomic_file(out) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    print(f"{len(rows)} conversations written to {out}")
