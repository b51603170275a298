"""`agentevo tasks`: tasks made for a server of tools, and how hard they are for an agent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentevo.cli.arguments import Overrides, path_word, plain_options
from agentevo.cli.documents import (
    After,
    HeldOut,
    Out,
    Seed,
    Train,
    Writer,
    WriterKey,
    WriterModel,
    from_documents,
    open_writer,
)
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.config.tools import ToolSection
    from agentevo.remote_models.model import RemoteModel
    from agentevo.task_making.making import MadeTasks, WantedTasks

tasks = typer.Typer(no_args_is_help=True, help="Make tasks for tool servers and documents.")

Value = Annotated[
    list[str] | None,
    typer.Option(
        "--value",
        metavar="NAME=VALUES",
        help="Values of a parameter, such as city=Rome or 'city=[Rome, Oslo]'.",
    ),
]
Include = Annotated[
    list[str] | None, typer.Option(metavar="TOOL", help="Use only tools with this name or pattern.")
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="TOOL", help="Do not use tools with this name or pattern."),
]


Server = Annotated[
    list[str],
    typer.Argument(
        metavar="SERVER...",
        help="A URL, a command with its arguments, a file such as mcp_config.json, or a recipe "
        "with agent.tools.",
    ),
]
Worlds = Annotated[
    int,
    typer.Option(
        min=1,
        max=1_000_000,
        help="For a server that builds its state from the task's `world`: the number of worlds.",
    ),
]
MaxCalls = Annotated[int, typer.Option(min=1, max=12, help="The most calls that a task needs.")]
Difficulty = Annotated[
    str, typer.Option(metavar="1-5", help="The difficulties to make, from the easiest.")
]
Kind = Annotated[
    list[str] | None,
    typer.Option(
        help="The kind of task: state (checks the final state), answer, or open (a judge "
        "decides). Repeatable."
    ),
]
Language = Annotated[list[str] | None, typer.Option(help="en, de or zh. Repeatable.")]
Persona = Annotated[
    list[str] | None,
    typer.Option(help="The user's style: hurried, polite or newcomer. Repeatable."),
]
Demonstrations = Annotated[
    int,
    typer.Option(
        min=0, max=100_000, help="The number of conversations that solve tasks of train.jsonl."
    ),
]
System = Annotated[
    str, typer.Option(metavar="TEXT", help="The system message of the demonstrations.")
]
HarderThan = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="Make harder variants of these existing tasks."),
]


@tasks.callback()
def _group() -> None: ...


tasks.command("from-documents")(from_documents)


@tasks.command("make", context_settings={"ignore_unknown_options": True})
def make(
    server: Server,
    out: Out,
    train: Train = 200,
    held_out: HeldOut = 50,
    seed: Seed = 0,
    worlds: Worlds = 1,
    max_calls: MaxCalls = 4,
    difficulty: Difficulty = "1-5",
    kind: Kind = None,
    language: Language = None,
    persona: Persona = None,
    value: Value = None,
    include: Include = None,
    exclude: Exclude = None,
    demonstrations: Demonstrations = 0,
    system: System = "",
    harder_than: HarderThan = None,
    after: After = None,
    writer: Writer = None,
    writer_model: WriterModel = "default",
    writer_key: WriterKey = None,
) -> None:
    """Make training and held-out tasks for a tool server by calling its tools and recording the
    results. The calls are real: use --exclude for tools that must not be called."""
    from agentevo.cli.server_words import tool_sections
    from agentevo.task_making.files import check_new
    from agentevo.task_making.making import WantedTasks, check_wanted

    check_new(out)
    least, most = _difficulties(difficulty)
    wanted_tasks = WantedTasks(
        train=train,
        held_out=held_out,
        seed=seed,
        worlds=worlds,
        max_calls=max_calls,
        languages=tuple(language or ("en",)),
        personas=tuple(persona or ("",)),
        kinds=tuple(kind or ("state", "answer")),
        min_difficulty=least,
        max_difficulty=most,
        values=_values(value or []),
    )
    check_wanted(wanted_tasks)

    model = open_writer(writer, writer_model, writer_key, after)
    chosen = {"include": include or (), "exclude": exclude or ()}
    parents, kept_rows = _earlier_rows(harder_than or [], after)
    sections = tool_sections(server, choose=chosen, tells_world=worlds > 1)
    made_tasks = _make_tasks(sections, wanted_tasks, parents, kept_rows)
    if after is not None:  # what the variants are of is played no more
        from agentevo.task_making.afterwards import without_parent

        made_tasks.train = [*kept_rows, *map(without_parent, made_tasks.train)]

    _write(out, made_tasks, wanted_tasks, model, demonstrations, system)


def _earlier_rows(
    harder_than: list[str], after: Path | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The tasks that harder variants are made of, and those that are kept with them."""
    from agentevo.task_making.afterwards import remaining_rows
    from agentevo.task_making.files import made_rows

    if after is None:
        return made_rows(harder_than), []
    if harder_than:
        raise ConfigError("--after and --harder-than both name tasks to start from: give one")
    return remaining_rows(after)


def _make_tasks(
    sections: Sequence[ToolSection],
    wanted_tasks: WantedTasks,
    parents: list[dict[str, Any]],
    kept_rows: list[dict[str, Any]],
) -> MadeTasks:
    from agentevo.event_loop import run_coroutine
    from agentevo.progress import bar
    from agentevo.task_making.making import make_tasks

    with bar("making tasks", wanted_tasks.train + wanted_tasks.held_out, "tasks") as so_far:
        work = make_tasks(
            sections,
            wanted_tasks,
            taken=frozenset(str(row["content"]) for row in [*parents, *kept_rows]),
            harder_than=parents,
            on_note=_note,
            progress=so_far.to,
        )
        return run_coroutine(work)


def _write(
    out: Path,
    made_tasks: MadeTasks,
    wanted_tasks: WantedTasks,
    model: RemoteModel | None,
    num_shown: int,
    system: str,
) -> None:
    import random

    from agentevo.event_loop import run_coroutine
    from agentevo.task_making.demonstrations import demonstration
    from agentevo.task_making.files import write_made
    from agentevo.task_making.writer import reword_tasks

    account = {**made_tasks.account, "seed": wanted_tasks.seed}
    if model is not None:
        try:
            written = [*made_tasks.train, *made_tasks.held_out]
            work = reword_tasks(written, model, made_tasks.survey.names, seed=wanted_tasks.seed)
            rows, account["writer"] = run_coroutine(work)
        finally:
            model.close()
        made_tasks.train, made_tasks.held_out = (
            rows[: len(made_tasks.train)],
            rows[len(made_tasks.train) :],
        )

    draw = random.Random(f"demonstrations-{wanted_tasks.seed}")
    shown = [
        demonstration(draw.choice(made_tasks.train), made_tasks.survey.specs, system)
        for _ in range(num_shown)
    ]
    write_made(
        out,
        train=made_tasks.train,
        held_out=made_tasks.held_out,
        demonstrations=shown,
        account=account,
    )

    for line in _lines(account):
        print(line)

    missing = (
        wanted_tasks.train
        + wanted_tasks.held_out
        - len(made_tasks.train)
        - len(made_tasks.held_out)
    )
    if missing > 0:
        why = "; ".join(
            f"{reason}: {count}" for reason, count in list(made_tasks.reasons.items())[:4]
        )
        _note(f"{missing} fewer than requested: further walks gave nothing new ({why})")


def _lines(account: dict[str, Any]) -> list[str]:
    grades = ", ".join(f"{count} of {grade}" for grade, count in account["difficulty"].items())
    used = [f"{name} {count}" for name, count in account["tools"].items()]
    return [
        f"tasks        {account['train']} to train on, {account['held_out']} held out",
        f"difficulty   {grades}",
        f"tools        {', '.join(used)}",
        f"pairs        {', '.join(account['pairs']) or 'none'}",
    ]


@tasks.command("grade")
def grade(
    folder: Annotated[
        Path,
        typer.Argument(
            parser=path_word, metavar="FOLDER", help="The folder of `agentevo tasks make`."
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The recipe or run that plays.")],
    out: Out,
    overrides: Overrides = None,
    attempts: Annotated[int, typer.Option(min=2, max=1024, help="Attempts at each task.")] = 4,
) -> None:
    """Play every training task and write a new folder with each task's `success_rate`. Tasks that
    all or none of the attempts solve go to reserve.jsonl."""
    from agentevo.task_making.files import check_new
    from agentevo.task_making.solvability import graded_folder

    check_new(out)
    report_lines = graded_folder(
        folder, target, out, overrides or [], attempts=attempts, note=_note
    )
    for line in report_lines:
        print(line)


def _note(line: str) -> None:
    import sys

    print(line, file=sys.stderr)


def _difficulties(word: str) -> tuple[int, int]:
    first, _, last = word.partition("-")
    if not (first.isdecimal() and first.isascii() and (last or first).isdecimal()):
        raise ConfigError(f"--difficulty {word[:20]}: write 1-5, or one number")
    return int(first[:9]), int((last or first)[:9])


def _values(words: list[str]) -> dict[str, list[Any]]:
    options = plain_options(words, "city=[Rome, Oslo]")
    for name, option in options.items():
        listed = option if isinstance(option, list) else [option]
        if not listed or not all(isinstance(value, (str, int, float)) for value in listed):
            raise ConfigError(f"--value {name}: give a value, or a list such as [Rome, Oslo]")
        options[name] = listed
    return options
