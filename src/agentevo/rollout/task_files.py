"""Makes task files from other data: rows in another system's form, GSM8K, and reasoning-gym's
datasets. A file is written whole or not at all, and each row that can't be converted is reported.

Open questions over passages: Natural Questions and HotpotQA in their published forms, as tasks.
If the rows have passages, these become a corpus for the tool `search`.

| rows | of |
|---|---|
| `question`, `answer` (texts) | NQ-open |
| `question`, `golden_answers` | FlashRAG's and Search-R1's copies of both |
| `question`, `answers`, `positive_ctxs`, `negative_ctxs`, `hard_negative_ctxs` | DPR's NQ |
| `question_text`, `document_text`, `annotations` | NQ, simplified: the short answers |
| `question`, `answer`, `context`, `supporting_facts` | HotpotQA, its JSON and the hub's columns |
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentevo.config.tasks import TaskFields
from agentevo.data import RowError, RowReport, read_rows
from agentevo.data.task_forms import AGENT_NAME, row_of
from agentevo.errors import ConfigError
from agentevo.rewards.numerals import last_numeral
from agentevo.rollout.given_tasks import task_of
from agentevo.runtime.extras import load_extra
from agentevo.runtime.files import write_atomic
from agentevo.runtime.registry import nearest
from agentevo.store.export import atomic_file
from agentevo.types import Task

TRAIN = "train.jsonl"
HELD_OUT = "eval.jsonl"
DEMONSTRATIONS = "demonstrations.jsonl"
RENAME = "rename the column that has it to {}"
"""The remedy for a row without a required field."""
GSM8K_SCORER = "numeric"
"""The reward of GSM8K's rows."""


def convert_rows(source: str, read_form: str, form: str, report: RowReport) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    taken: dict[str, str] = {}
    for row in read_rows(source):
        report.rows += 1
        try:
            task = task_of(row.value, TaskFields(), read_form, RENAME)
            if task.id in taken:
                raise RowError(
                    "duplicate_task",
                    f"{task.id!r} is already the id of the task of {taken[task.id]}",
                )
            rows.append(row_of(task, form))
        except RowError as error:
            report.add(row.where, error)
            continue

        taken[task.id] = row.where

    return rows


def gsm8k_tasks(source: str, agent: str | None, report: RowReport) -> list[Task]:
    """GSM8K's rows, {"question", "answer": "... #### 18"}, as tasks with the number as answer. The
    worked solution becomes metadata."""
    tasks = []
    for number, row in enumerate(read_rows(source)):
        report.rows += 1
        try:
            tasks.append(_gsm8k_task(row.value, number, agent))
        except RowError as error:
            report.add(row.where, error)

    return tasks


def _gsm8k_task(row: Any, number: int, agent: str | None) -> Task:
    if isinstance(row, RowError):
        raise row

    texts: list[Any] = []
    if isinstance(row, dict):
        texts = [row.get("question"), row.get("answer")]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise RowError("unknown_form", "a row of GSM8K has question and answer, both texts")

    question, solution = texts
    work, mark, stated = solution.rpartition("####")
    numeral = last_numeral(stated) if mark else None
    if numeral is None:
        raise RowError("unknown_form", "the answer of GSM8K ends with #### and a number")

    metadata = {"solution": work.strip(), "data_source": "openai/gsm8k"}
    if agent is not None:
        metadata[AGENT_NAME] = agent

    written, value = numeral
    answer = written
    if not written.endswith("%"):
        answer = str(int(value)) if value.is_integer() else repr(value)

    name = f"gsm8k-{number}"
    return Task(id=name, query=question, answer=answer, scorer=GSM8K_SCORER, metadata=metadata)


def reasoning_gym_tasks(name: str, count: int, seed: int, agent: str | None) -> list[Task]:
    """Tasks of a dataset of reasoning-gym. The reward `reasoning_gym` scores them with the
    dataset's own score. Raises ConfigError for an unknown dataset."""
    package = load_extra("reasoning_gym", "reasoning-gym", "data prepare reasoning_gym/NAME")
    dataset_names = sorted(
        load_extra("reasoning_gym.factory", "reasoning-gym", "data prepare").DATASETS
    )
    if name not in dataset_names:
        guess = nearest(name, dataset_names)
        hint = f": did you mean {guess!r}?" if guess else ""
        raise ConfigError(f"data prepare: reasoning-gym has no dataset {name!r}{hint}")

    tasks = []
    for number, entry in enumerate(package.create_dataset(name, size=count, seed=seed)):
        plain = json.loads(json.dumps(entry["metadata"], default=str))
        metadata: dict[str, Any] = {"entry": plain | {"source_dataset": name}}
        if agent is not None:
            metadata[AGENT_NAME] = agent

        tasks.append(
            Task(
                id=f"{name}-{seed}-{number}",
                query=entry["question"],
                answer=entry["answer"],
                scorer="reasoning_gym",
                metadata=metadata,
            )
        )

    return tasks


def write_split(tasks: Sequence[Task], share: float, folder: Path) -> int:
    """Writes FOLDER/train.jsonl. Writes the last `share` of the tasks to FOLDER/eval.jsonl. Returns
    the number of held-out tasks, which is never all of them."""
    rows = [row_of(task, "agentevo") for task in tasks]
    number = min(round(len(rows) * share), len(rows) - 1)

    # the held-out tasks of an earlier split are now in the training file
    (folder / HELD_OUT).unlink(missing_ok=True)
    write_rows(rows[: len(rows) - number], folder / TRAIN)
    if number:
        write_rows(rows[len(rows) - number :], folder / HELD_OUT)
    return number


def write_rows(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Writes a .jsonl, .jsonl.gz or .parquet file. Raises ConfigError if a Parquet file can't
    represent the rows, or if the name has another ending."""
    if out.name.endswith(".parquet"):
        _write_parquet(rows, out)
        return

    if not out.name.endswith((".jsonl", ".jsonl.gz")):
        raise ConfigError(f"{out}: give a file named .jsonl, .jsonl.gz or .parquet")

    with atomic_file(out) as file:
        for line in _lines(rows):
            file.write(line)


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[bytes]:
    for row in rows:
        yield json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _write_parquet(rows: Sequence[dict[str, Any]], out: Path) -> None:
    arrow = load_extra("pyarrow", "data", str(out), ", or write JSONL")
    parquet = load_extra("pyarrow.parquet", "data", str(out), ", or write JSONL")
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        columns = {name: arrow.array([row.get(name) for row in rows]) for name in names}
        sink = arrow.BufferOutputStream()
        parquet.write_table(arrow.table(columns), sink)
    except (arrow.ArrowException, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{out}: a column of Parquet has values of one type, and here they differ ({reason}): "
            "write JSONL"
        ) from error

    write_atomic(out, sink.getvalue().to_pybytes())


CORPUS = "corpus.jsonl"
SCORER = "em"
"""The reward of the rows: SQuAD's exact match, with which Search-R1 trains."""
QUESTION_SETS = {"nq": "Natural Questions", "hotpotqa": "HotpotQA"}
"""Maps a name for `agentevo data prepare` to the full name."""
METADATA_COLUMNS = ("type", "level")
"""Columns that become metadata."""
_CONTEXTS = ("positive_ctxs", "negative_ctxs", "hard_negative_ctxs")


class Passages:
    """The passages of all rows, without duplicates."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, str], None] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Raises RowError for passages in an unknown form."""
        for title, text in _passages_of(row):
            if text.strip():
                self._texts[title.strip(), text.strip()] = None

    def write(self, folder: Path) -> int:
        """Writes FOLDER/corpus.jsonl if there are passages. Returns the number of passages."""
        (folder / CORPUS).unlink(missing_ok=True)  # the file belongs to other questions
        rows = [
            {"id": str(number), "title": title, "text": text}
            for number, (title, text) in enumerate(self._texts)
        ]
        if rows:
            write_rows(rows, folder / CORPUS)
        return len(rows)


def question_tasks(
    name: str, source: str, agent: str | None, report: RowReport, passages: Passages
) -> list[Task]:
    """Converts the rows of a source to tasks. Adds their passages to `passages`."""
    tasks = []
    for number, row in enumerate(read_rows(source)):
        report.rows += 1
        try:
            if isinstance(row.value, RowError):
                raise row.value
            if not isinstance(row.value, Mapping):
                raise RowError("unknown_form", f"a row of {QUESTION_SETS[name]} is an object")

            task = _task_of(name, number, row.value, agent)
            passages.add(row.value)
            tasks.append(task)
        except RowError as error:
            report.add(row.where, error)

    return tasks


def _task_of(name: str, number: int, row: Mapping[str, Any], agent: str | None) -> Task:
    question = row.get("question", row.get("question_text"))
    if not isinstance(question, str) or not question.strip():
        raise RowError("unknown_form", f"a row of {QUESTION_SETS[name]} has question, a text")

    metadata: dict[str, Any] = {"data_source": name}
    metadata |= {key: row[key] for key in METADATA_COLUMNS if isinstance(row.get(key), str)}
    if titles := _supporting_titles(row.get("supporting_facts")):
        metadata["supporting_titles"] = titles
    if agent is not None:
        metadata[AGENT_NAME] = agent

    answers = _answers_of(row)
    return Task(
        id=f"{name}-{number}",
        query=question.strip(),
        answer=answers[0] if len(answers) == 1 else answers,
        scorer=SCORER,
        metadata=metadata,
    )


def _answers_of(row: Mapping[str, Any]) -> list[str]:
    """The accepted answers of a row. Raises RowError if it has none."""
    if "annotations" in row:
        answers = list(_short_answers(row))
    else:
        names = ("golden_answers", "answers", "answer")
        value = next((row[key] for key in names if row.get(key) is not None), None)
        answers = [value] if isinstance(value, str) else value if isinstance(value, list) else []

    stated = [answer.strip() for answer in answers if isinstance(answer, str) and answer.strip()]
    if not stated:
        raise RowError(
            "no_answer", "the row has no answer (a text or a list of texts), so it can't be judged"
        )
    return list(dict.fromkeys(stated))


def _short_answers(row: Mapping[str, Any]) -> Iterator[str]:
    """The accepted short answers: spans of words of the document, or yes and no. Raises
    RowError."""
    document = row.get("document_text")
    words = document.split(" ") if isinstance(document, str) else []
    try:
        for annotation in row["annotations"]:
            stated = str(annotation.get("yes_no_answer", "NONE"))
            if stated in ("YES", "NO"):
                yield stated.lower()
            for span in annotation["short_answers"]:
                yield " ".join(words[span["start_token"] : span["end_token"]])
    except (KeyError, TypeError, AttributeError) as error:
        raise RowError(
            "unknown_form",
            "annotations of Natural Questions have short_answers with start_token and end_token",
        ) from error


def _supporting_titles(facts: Any) -> list[str]:
    """Titles of HotpotQA's JSON [[title, sentence], ...] or the hub's {title: [...], sent_id:
    [...]}."""
    if isinstance(facts, Mapping):
        titles = facts.get("title") or []
    else:
        titles = [fact[0] for fact in facts or [] if isinstance(fact, list) and fact]
    return list(dict.fromkeys(title for title in titles if isinstance(title, str)))


def _passages_of(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The (title, text) pairs of a row's passages. Raises RowError."""
    try:
        context = row.get("context")
        if isinstance(context, Mapping):
            pairs = zip(context["title"], context["sentences"], strict=True)
            yield from ((title, "".join(sentences)) for title, sentences in pairs)
        elif isinstance(context, list):
            yield from ((title, "".join(sentences)) for title, sentences in context)

        for key in _CONTEXTS:
            yield from (
                (passage.get("title", ""), passage["text"]) for passage in row.get(key) or []
            )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RowError(
            "unknown_form",
            "passages are [title, [sentence, ...]] in context, or {title, text} in positive_ctxs",
        ) from error
