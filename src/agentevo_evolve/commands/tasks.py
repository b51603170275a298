"""`agentevo data make` makes tasks for a server of tools, or from documents; `agentevo data grade`
grades them by difficulty."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentevo.cli.arguments import Overrides, plain_options, refuse_options
from agentevo.cli.printing import print_note
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.config.tools import ToolSection
    from agentevo.inference.remote_models.model import RemoteModel
    from agentevo_evolve.task_making.server_tasks import MadeTasks, WantedTasks

SERVER_OPTIONS = (
    "worlds",
    "max_calls",
    "difficulty",
    "kind",
    "persona",
    "value",
    "include",
    "exclude",
    "demonstrations",
    "system",
    "harder_than",
    "write_scenarios",
)
"""Parameters that have no effect for documents."""

Out = Annotated[
    Path,
    typer.Option("--out", metavar="FOLDER", help="A new folder for the tasks."),
]
Train = Annotated[int, typer.Option(min=1, max=100_000, help="The number of training tasks.")]
HeldOut = Annotated[int, typer.Option(min=0, max=100_000, help="The number of held-out tasks.")]
Seed = Annotated[int, typer.Option(min=0, help="The random seed.")]
After = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_DIR",
        help="Continue from a run with tasks.curriculum: keep its unsolved tasks, and add "
        "harder variants of the solved ones, or, for documents, further questions.",
    ),
]
Writer = Annotated[
    str | None,
    typer.Option(
        metavar="URL|MODEL",
        help="The model that writes the queries: the URL of an OpenAI-compatible API; a "
        "folder, a run or a known model to run here; or, with --after, a name of that "
        "run's remote_models.",
    ),
]
WriterModel = Annotated[
    str, typer.Option(metavar="NAME", help="The writer's model name at the URL.")
]
WriteScenarios = Annotated[
    bool,
    typer.Option(
        "--write-scenarios",
        help="The writer also proposes tasks for a server, with the calls that solve them. Each is "
        "tried, and what is missing is made without it.",
    ),
]
WriterKey = Annotated[
    str | None,
    typer.Option(metavar="${env:NAME}", help="The environment variable with the writer's API key."),
]


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


Source = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="A tool server (a URL, a command with its arguments, a file such as "
        "mcp_config.json), a recipe with agent.tools, or documents: text files, corpora (.jsonl, "
        "one passage per line), or folders of them.",
    ),
]
PerPassage = Annotated[
    int, typer.Option(min=1, max=100, help="For documents: the number of tasks per passage.")
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
Language = Annotated[
    list[str] | None,
    typer.Option(
        help="en, de or zh. Repeatable. For documents: the language of the writer's questions."
    ),
]
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

MadeFolder = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="The folder of tasks of `agentevo data make`."),
]
Target = Annotated[
    str, typer.Argument(metavar="RECIPE|RUN_DIR", help="The agent and the model that play them.")
]
GradedAttempts = Annotated[
    int, typer.Option("--attempts", min=2, max=1024, help="The number of attempts per task.")
]


def grade(
    folder: MadeFolder,
    target: Target,
    out: Out,
    overrides: Overrides = None,
    attempts: GradedAttempts = 4,
) -> None:
    """Grade tasks by difficulty: play them, and write them with their success rates into a new
    folder. Training tasks that all or none of the attempts solve go to reserve.jsonl there."""
    from agentevo_evolve.task_making.files import check_new
    from agentevo_evolve.task_making.solvability import graded_folder

    check_new(out)
    for line in graded_folder(
        folder, target, out, overrides or [], attempts=attempts, note=print_note
    ):
        print(line)


def make(
    context: typer.Context,
    source: Source,
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
    per_passage: PerPassage = 2,
    after: After = None,
    writer: Writer = None,
    writer_model: WriterModel = "default",
    writer_key: WriterKey = None,
    write_scenarios: WriteScenarios = False,
) -> None:
    """Make training and held-out tasks for a tool server or from documents. A server's tools are
    called, and the results recorded: the calls are real, so use --exclude for tools that must not
    be called. Documents give cloze sentences, or, with --writer, a model's questions, and a corpus
    for the tool `search`."""
    from agentevo_evolve.task_making.document_files import is_document
    from agentevo_evolve.task_making.files import check_new

    check_new(out)
    if all(map(is_document, source)):
        refuse_options(context, "is for tool servers: leave it out for documents", SERVER_OPTIONS)
        if len(language or ()) > 1:
            raise ConfigError("--language: documents have questions in one language: give one")

        counts = {"train": train, "held_out": held_out, "per_passage": per_passage, "seed": seed}
        _make_from_documents(
            [Path(word) for word in source],
            out,
            counts,
            language=(language or ["en"])[0],
            after=after,
            model=_open_writer(writer, writer_model, writer_key, after),
        )
        return

    refuse_options(context, "is for documents: leave it out for servers", ("per_passage",))

    from agentevo.cli.server_words import tool_sections
    from agentevo_evolve.task_making.server_tasks import WantedTasks, check_wanted

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

    if write_scenarios and writer is None:
        raise ConfigError("--write-scenarios needs a model that writes: give --writer")
    if write_scenarios and (harder_than or after is not None):
        raise ConfigError(
            "--write-scenarios makes new tasks, and only walks make harder variants of others: "
            "leave it out, or --harder-than and --after"
        )

    model = _open_writer(writer, writer_model, writer_key, after)
    chosen = {"include": include or (), "exclude": exclude or ()}
    parents, kept_rows = _earlier_rows(harder_than or [], after)
    sections = tool_sections(source, choose=chosen, tells_world=worlds > 1)
    made_tasks = _make_tasks(
        sections, wanted_tasks, parents, kept_rows, model if write_scenarios else None
    )
    if after is not None:  # what the variants are of is played no more
        from agentevo_evolve.task_making.curriculum_tasks import without_parent

        made_tasks.train = [*kept_rows, *map(without_parent, made_tasks.train)]

    _write(out, made_tasks, wanted_tasks, model, demonstrations, system)


def _make_from_documents(
    files: Sequence[Path],
    out: Path,
    task_options: dict[str, Any],
    *,
    language: str,
    after: Path | None,
    model: RemoteModel | None,
) -> None:
    """Makes cloze sentences, or a model's questions. Also writes the passages as a corpus for the
    tool `search`. `task_options`: train, held_out, per_passage and seed. Raises ConfigError."""
    from agentevo.runtime.progress import bar
    from agentevo_evolve.task_making.curriculum_tasks import remaining_questions
    from agentevo_evolve.task_making.document_files import read_documents
    from agentevo_evolve.task_making.documents import check_made, make_read_tasks, passage_row
    from agentevo_evolve.task_making.files import write_made

    held_out = task_options["held_out"]
    if after is not None and held_out:
        raise ConfigError("--after makes tasks to train on: give --held-out 0")

    remaining = None if after is None else remaining_questions(after)
    documents = read_documents(files)
    if note := documents.note():
        print_note(note)

    passages = documents.passages
    with bar("making tasks", task_options["train"] + held_out, "tasks") as so_far:
        made_tasks = make_read_tasks(
            passages,
            model,
            language=language,
            earlier_questions=() if remaining is None else remaining.asked_questions,
            progress=so_far.to,
            **task_options,
        )

    num_new = len(made_tasks.train) + len(made_tasks.held_out)

    if remaining is None:
        check_made(made_tasks, held_out)
    else:  # where the documents have no more, what was solved is all that there is
        made_tasks.train = [*remaining.unsolved, *made_tasks.train] or remaining.solved

    # With --after, the corpus of the first tasks stays the agent's.
    corpus = list(map(passage_row, passages)) if remaining is None else []
    account = {
        "train": len(made_tasks.train),
        "held_out": len(made_tasks.held_out),
        "passages": len(passages),
    }
    write_made(
        out,
        train=made_tasks.train,
        held_out=made_tasks.held_out,
        corpus=corpus,
        account={**account, "writer": made_tasks.reasons, "seed": task_options["seed"]},
    )
    print(f"tasks        {account['train']} to train on, {account['held_out']} held out")
    where = f", in {out / 'corpus.jsonl'}" if remaining is None else ""
    print(f"passages     {len(passages)}{where}")

    if missing := task_options["train"] + held_out - num_new:
        why = "; ".join(f"{reason}: {count}" for reason, count in made_tasks.reasons.items())
        print_note(f"{missing} fewer than requested ({why or 'the documents have no more'})")


def _open_writer(
    word: str | None, name: str, key: str | None, after: Path | None
) -> RemoteModel | None:
    """Raises ConfigError."""
    if word is None:
        return None

    from agentevo.inference.remote_models.model import RemoteModel
    from agentevo.runs.folder.run_folder import UNSCORED, check_run_folder, run_config
    from agentevo_evolve.task_making.writer import writer_section

    remote_models = (
        {} if after is None else run_config(check_run_folder(after), UNSCORED).remote_models
    )
    try:
        return RemoteModel(
            "writer", writer_section(word, name=name, key=key, known_models=remote_models)
        )
    except ConfigError as error:
        raise ConfigError(f"--writer: {error}") from error


def _earlier_rows(
    harder_than: list[str], after: Path | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The tasks that harder variants are made of, and those that are kept with them."""
    from agentevo_evolve.task_making.curriculum_tasks import remaining_rows
    from agentevo_evolve.task_making.files import made_rows

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
    writer: RemoteModel | None,
) -> MadeTasks:
    from agentevo.runtime.event_loop import run_coroutine
    from agentevo.runtime.progress import bar
    from agentevo_evolve.task_making.server_tasks import make_tasks

    with bar("making tasks", wanted_tasks.train + wanted_tasks.held_out, "tasks") as so_far:
        work = make_tasks(
            sections,
            wanted_tasks,
            taken=frozenset(str(row["content"]) for row in [*parents, *kept_rows]),
            harder_than=parents,
            writer=writer,
            on_note=print_note,
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
    from agentevo_evolve.task_making.demonstrations import finish_tasks
    from agentevo_evolve.task_making.files import write_made

    account, shown = finish_tasks(
        made_tasks, model, seed=wanted_tasks.seed, num_shown=num_shown, system=system
    )
    write_made(
        out,
        train=made_tasks.train,
        held_out=made_tasks.held_out,
        demonstrations=shown,
        account=account,
    )

    for line in _lines(account):
        print(line)

    if wanted_tasks.held_out and made_tasks.shortage:
        print_note(made_tasks.shortage)
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
        print_note(f"{missing} fewer than requested: further walks gave nothing new ({why})")


def _lines(account: dict[str, Any]) -> list[str]:
    grades = ", ".join(f"{count} of {grade}" for grade, count in account["difficulty"].items())
    used = [f"{name} {count}" for name, count in account["tools"].items()]
    written = account.get("written")
    origin = [] if written is None else [_origin_line(written, account)]
    return [
        f"tasks        {account['train']} to train on, {account['held_out']} held out",
        *origin,
        f"difficulty   {grades}",
        f"tools        {', '.join(used)}",
        f"pairs        {', '.join(account['pairs']) or 'none'}",
    ]


def _origin_line(written: dict[str, Any], account: dict[str, Any]) -> str:
    """How many tasks the writer proposed, and why others of its proposals are no tasks."""
    num_walks = account["train"] + account["held_out"] - written["tasks"]
    reasons = list(written["reasons"].items())[:4]
    why = "; ".join(f"{reason}: {count}" for reason, count in reasons)
    return (
        f"origin       {written['tasks']} by the writer ({written['prompts']} prompts"
        f"{f'; refused: {why}' if why else ''}), {num_walks} from walks"
    )


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
