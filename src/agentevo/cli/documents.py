"""`agentevo tasks from-documents`, and who writes tasks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentevo.cli.arguments import path_word
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.remote_models.model import RemoteModel
    from agentevo.task_making.documents import ReadDocuments
    from agentevo.tools.corpus import Passage

Out = Annotated[
    Path,
    typer.Option("--out", parser=path_word, metavar="FOLDER", help="A new folder for the tasks."),
]
Train = Annotated[int, typer.Option(min=1, max=100_000, help="The number of training tasks.")]
HeldOut = Annotated[int, typer.Option(min=0, max=100_000, help="The number of held-out tasks.")]
Seed = Annotated[int, typer.Option(min=0, help="The random seed.")]
After = Annotated[
    Path | None,
    typer.Option(
        parser=path_word,
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
WriterKey = Annotated[
    str | None,
    typer.Option(metavar="${env:NAME}", help="The environment variable with the writer's API key."),
]


def open_writer(
    word: str | None, name: str, key: str | None, after: Path | None
) -> RemoteModel | None:
    """Raises ConfigError."""
    if word is None:
        return None

    from agentevo.remote_models.model import RemoteModel
    from agentevo.runs.folder import UNSCORED, check_run_folder, run_config
    from agentevo.task_making.writer_model import writer_section

    remote_models = (
        {} if after is None else run_config(check_run_folder(after), UNSCORED).remote_models
    )
    try:
        return RemoteModel(
            "writer", writer_section(word, name=name, key=key, known_models=remote_models)
        )
    except ConfigError as error:
        raise ConfigError(f"--writer: {error}") from error


def from_documents(
    files: Annotated[
        list[Path],
        typer.Argument(
            parser=path_word,
            metavar="FILE|FOLDER...",
            help="Text files, corpora (.jsonl, one passage per line), or folders of them.",
        ),
    ],
    out: Out,
    train: Train = 200,
    held_out: HeldOut = 50,
    seed: Seed = 0,
    per_passage: Annotated[
        int, typer.Option(min=1, max=100, help="The number of tasks per passage.")
    ] = 2,
    language: Annotated[str, typer.Option(help="The language of the writer's questions.")] = "en",
    after: After = None,
    writer: Writer = None,
    writer_model: WriterModel = "default",
    writer_key: WriterKey = None,
) -> None:
    """Make training and held-out tasks from documents: cloze sentences, or, with --writer, a
    model's questions. Also writes the passages as a corpus for the tool `search`."""
    from agentevo.task_making.afterwards import remaining_questions
    from agentevo.task_making.document_files import read_documents
    from agentevo.task_making.documents import check_made
    from agentevo.task_making.files import check_new, write_made

    check_new(out)
    if after is not None and held_out:
        raise ConfigError("--after makes tasks to train on: give --held-out 0")

    remaining = None if after is None else remaining_questions(after)
    model = open_writer(writer, writer_model, writer_key, after)

    documents = read_documents(files)
    if note := documents.note():
        _note(note)

    passages = documents.passages
    task_options: dict[str, Any] = {"train": train, "held_out": held_out}
    task_options |= {"per_passage": per_passage, "seed": seed}
    made_tasks = _make_tasks(
        passages,
        model,
        task_options,
        language,
        () if remaining is None else remaining.asked_questions,
    )
    num_new = len(made_tasks.train) + len(made_tasks.held_out)

    if remaining is None:
        check_made(made_tasks, held_out)
    else:  # where the documents have no more, what was solved is all that there is
        made_tasks.train = [*remaining.unsolved, *made_tasks.train] or remaining.solved

    corpus = [
        {"id": passage.id, "title": passage.title, "text": passage.text} for passage in passages
    ]
    account = {
        "train": len(made_tasks.train),
        "held_out": len(made_tasks.held_out),
        "passages": len(passages),
    }
    write_made(
        out,
        train=made_tasks.train,
        held_out=made_tasks.held_out,
        corpus=corpus if remaining is None else [],  # that of the first tasks stays the agent's
        account={**account, "writer": made_tasks.reasons, "seed": seed},
    )
    print(f"tasks        {account['train']} to train on, {account['held_out']} held out")
    where = f", in {out / 'corpus.jsonl'}" if remaining is None else ""
    print(f"passages     {len(passages)}{where}")

    if missing := train + held_out - num_new:
        why = "; ".join(f"{reason}: {count}" for reason, count in made_tasks.reasons.items())
        _note(f"{missing} fewer than requested ({why or 'the documents have no more'})")


def _make_tasks(
    passages: list[Passage],
    model: RemoteModel | None,
    task_options: dict[str, Any],
    language: str,
    asked_questions: set[str] | tuple[()],
) -> ReadDocuments:
    from agentevo.event_loop import run_coroutine
    from agentevo.progress import bar
    from agentevo.task_making.documents import tasks_from_gaps, tasks_from_model

    with bar("making tasks", task_options["train"] + task_options["held_out"], "tasks") as so_far:
        task_options = {**task_options, "earlier_questions": asked_questions, "progress": so_far.to}
        if model is None:
            return tasks_from_gaps(passages, **task_options)
        try:
            return run_coroutine(
                tasks_from_model(passages, model, language=language, **task_options)
            )
        finally:
            model.close()


def _note(line: str) -> None:
    print(line, file=sys.stderr)
