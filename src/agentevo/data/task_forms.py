"""Reads rows of tasks in the forms of other systems, and writes tasks as such rows.

    verl      {"data_source", "prompt": [message, ...], "ability",
               "reward_model": {"style", "ground_truth"}, "extra_info", "agent_name"}
    agentrl   {"id", "query", "answer", "scorer", "answer_schema"}
    art       {"task", "difficulty"}
    agentevo  {"id", "query", "answer", "scorer", ...}, a query being a text or chat messages

A value without a column in a form gets an additional column under its own name. So a task that is
written in any form and read again is the same task. A task that the form can't express raises
RowError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from agentevo.data.row_report import RowError
from agentevo.types import QUERY_MESSAGES, Task

FORMS = ("agentevo", "agentrl", "verl")
"""The forms that can be written. `art` can only be read."""
READ_FORMS = (*FORMS, "art")
QUERY_KEYS = ("query", "question", "prompt", "problem", "instruction")
ANSWER_KEYS = ("answer", "solution", "target", "ground_truth")
OWN_KEYS = ("query", "id", "answer", "scorer")
"""The columns that AgentEvo writes."""
AGENT_NAME = "agent_name"
"""The key in a task's metadata with the name of its agent, as in verl."""
AGENTRL_SCORER = "agentcpm"
"""AgentRL's default scorer."""
AGENTRL_SCHEMA = "answer"
"""AgentRL's default answer schema."""


class PlainRow(NamedTuple):
    """A row's columns, and the possible columns of the query and of the answer. The first column
    that exists counts."""

    columns: dict[str, Any]
    query_keys: tuple[str, ...] = QUERY_KEYS
    answer_keys: tuple[str, ...] = ANSWER_KEYS


def plain_row(row: Mapping[str, Any], form: str = "auto") -> PlainRow:
    """The row in plain columns. `auto` detects the form by the columns, and adds none. Raises
    RowError for a row without the columns of its form."""
    columns = dict(row)
    if form == "auto":
        form = _form_of(columns)

    needed = {"verl": "prompt", "agentrl": "query", "art": "task"}.get(form)
    if needed is None:
        return PlainRow(columns)

    if needed not in columns:
        raise RowError(
            "unknown_form",
            f"no {needed}, which every row in the form of {form} has: it has "
            f"{', '.join(map(str, columns)) or 'no key'}",
        )

    if form == "agentrl":
        columns = {"scorer": AGENTRL_SCORER, "answer_schema": AGENTRL_SCHEMA} | columns

    return _of_verl(columns) if form == "verl" else PlainRow(columns, (needed,))


def _form_of(row: Mapping[str, Any]) -> str:
    if isinstance(row.get("reward_model"), Mapping) and "prompt" in row:
        return "verl"
    return "art" if "task" in row and not row.keys() & set(QUERY_KEYS) else "agentevo"


def _of_verl(columns: dict[str, Any]) -> PlainRow:
    """The prompt is the query, even if there is a column `question`, as in Search-R1's rows."""
    judged = columns.get("reward_model")
    if not isinstance(judged, Mapping):
        raise RowError(
            "unknown_form", "no reward_model with a ground_truth, which verl's rows have"
        )

    rest = dict(judged)
    truth = rest.pop("ground_truth", None)
    if isinstance(truth, Mapping) and truth.keys() == {"target"}:  # Search-R1
        truth = truth["target"]

    columns["reward_model"] = rest
    if truth is None:
        return PlainRow(columns, ("prompt",))

    return PlainRow(columns | {"ground_truth": truth}, ("prompt",), ("ground_truth",))


def row_of(task: Task, form: str) -> dict[str, Any]:
    """A task as a row. Raises RowError for a task that the form can't express."""
    fields: dict[str, Any] = {"id": task.id, "answer": task.answer, "scorer": task.scorer}
    set_fields = {name: value for name, value in fields.items() if value is not None}
    rest = {
        name: value
        for name, value in task.metadata.items()
        if name != QUERY_MESSAGES and not (value is None and name in OWN_KEYS)
    }
    chat: list[Any] | None = task.metadata.get(QUERY_MESSAGES)

    taken = [name for name in (("prompt",) if form == "verl" else OWN_KEYS) if name in rest]
    if taken:
        raise RowError(
            "unknown_form",
            f"the task {task.id!r} has the key {taken[0]} in its metadata, and the form {form} "
            "has a column of that name: rename it in the source",
        )

    if form == "verl":
        return _as_verl(task, set_fields, rest, chat)
    if form == "agentrl":
        return {
            "query": _check_single_question(task, chat),
            **_check_single_answer(task, set_fields),
            **rest,
        }

    asks_once = chat is None or chat == [{"role": "user", "content": task.query}]
    return {"query": task.query if asks_once else chat, **set_fields, **rest}


def _check_single_question(task: Task, chat: list[Any] | None) -> str | None:
    if chat is not None and len(chat) > 1:
        raise RowError(
            "unknown_form",
            f"the task {task.id!r} is a chat of {len(chat)} messages, and AgentRL's query is "
            "one text: give the task one question",
        )
    return task.query


def _check_single_answer(task: Task, set_fields: dict[str, Any]) -> dict[str, Any]:
    if isinstance(task.answer, list):
        raise RowError(
            "unknown_form",
            f"the task {task.id!r} has a list of {len(task.answer)} right answers, and AgentRL's "
            "answer is one text: give the task one",
        )
    return set_fields if task.answer is None else set_fields | {"answer": _text(task.answer)}


def _as_verl(
    task: Task, set_fields: dict[str, Any], rest: dict[str, Any], chat: list[Any] | None
) -> dict[str, Any]:
    answer = set_fields.pop("answer", None)
    judged = {"style": "rule"} | rest.get("reward_model", {})
    if answer is not None:
        truth = {"target": answer} if isinstance(answer, list) else _text(answer)
        judged["ground_truth"] = truth

    return {
        "data_source": task.scorer or "agentevo",
        "prompt": chat or [{"role": "user", "content": task.query}],
        "ability": "",
        "extra_info": {"index": task.id},
        **set_fields,
        **rest,
        "reward_model": judged,
    }


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
