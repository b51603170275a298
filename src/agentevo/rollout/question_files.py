"""Open questions over passages: Natural Questions and HotpotQA in their published forms, as tasks.
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

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentevo.data import RowError, RowReport, read_rows
from agentevo.data.task_forms import AGENT_NAME
from agentevo.rollout.task_files import write_rows
from agentevo.types import Task

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
