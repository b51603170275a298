"""Tasks that `agentevo data make` makes from documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentevo.cli.printing import print_note
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.agents.tools.corpus import Passage
    from agentevo.inference.remote_models.model import RemoteModel
    from agentevo_evolve.task_making.documents import ReadDocuments


def make_from_documents(
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
    from agentevo_evolve.task_making.curriculum_tasks import remaining_questions
    from agentevo_evolve.task_making.document_files import read_documents
    from agentevo_evolve.task_making.documents import check_made
    from agentevo_evolve.task_making.files import write_made

    held_out = task_options["held_out"]
    if after is not None and held_out:
        raise ConfigError("--after makes tasks to train on: give --held-out 0")

    remaining = None if after is None else remaining_questions(after)
    documents = read_documents(files)
    if note := documents.note():
        print_note(note)

    passages = documents.passages
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
        account={**account, "writer": made_tasks.reasons, "seed": task_options["seed"]},
    )
    print(f"tasks        {account['train']} to train on, {account['held_out']} held out")
    where = f", in {out / 'corpus.jsonl'}" if remaining is None else ""
    print(f"passages     {len(passages)}{where}")

    if missing := task_options["train"] + held_out - num_new:
        why = "; ".join(f"{reason}: {count}" for reason, count in made_tasks.reasons.items())
        print_note(f"{missing} fewer than requested ({why or 'the documents have no more'})")


def _make_tasks(
    passages: list[Passage],
    model: RemoteModel | None,
    task_options: dict[str, Any],
    language: str,
    asked_questions: set[str] | tuple[()],
) -> ReadDocuments:
    from agentevo.runtime.event_loop import run_coroutine
    from agentevo.runtime.progress import bar
    from agentevo_evolve.task_making.documents import tasks_from_gaps, tasks_from_model

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
