"""Detects a tool that accepts SQL by a query for a number. Then reads the tables, columns, keys and
values from which questions are made (questions.py).

Servers show rows in many forms (JSON, Python's, lines, Markdown), and some return an error as a
result. So the queries return hexadecimal digits between marks, which can be read in any form. The
SQL is SQLite's. Other databases do not answer it and are ignored.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import msgspec

from agentevo.agents.tools.toolbox import AttemptTools
from agentevo_evolve.task_making.calls import CallResult, call_tool
from agentevo_evolve.task_making.questions import (
    DatabaseQuestion,
    Link,
    QueryCondition,
    Sign,
    What,
    literal,
    quote_identifier,
)
from agentevo_evolve.task_making.values import properties

MAX_TABLES = 20
MAX_COLUMNS = 30
"""The maximum number of columns of a table."""
MAX_VALUES = 30
"""The maximum number of values of a column. Conditions use these values."""
MAX_VALUE_CHARS = 40
MAX_CONDITIONS = 2
LINK_PROBABILITY = 0.3
"""The probability that a condition applies to the row that a foreign key refers to, if there is a
foreign key."""
_NAMES = re.compile(r"sql|query|statement", re.IGNORECASE)
_MARKED_VALUE = re.compile(r"made:((?:[0-9A-Fa-f]{2})*):made")
_MAKES_A_TABLE = {
    sqlite3.SQLITE_CREATE_TABLE,
    sqlite3.SQLITE_CREATE_INDEX,
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_UPDATE,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
}
_NUMBERS = ("INT", "REAL", "FLOA", "DOUB", "NUM", "DEC")


class TableColumn(NamedTuple):
    """A column of a table."""

    name: str
    is_number: bool
    is_key: bool
    """Whether it is the primary key or a foreign key."""
    values: tuple[Any, ...]


class DatabaseTable(NamedTuple):
    """A table of a database."""

    name: str
    columns: tuple[TableColumn, ...]
    links: tuple[Link, ...]


class SurveyedDatabase(NamedTuple):
    """The database behind a tool that accepts SQL."""

    parameter: str
    """The tool's parameter with the SQL."""
    tables: tuple[DatabaseTable, ...]

    def draw(self, draw: random.Random, before: DatabaseQuestion | None = None) -> DatabaseQuestion:
        """A random question. `before`: a question to extend with further conditions."""
        if before is not None:
            table = next((each for each in self.tables if each.name == before.table), None)
            if table is None:  # the question was for another database
                return before
            return _with_conditions(self, table, before, len(before.conditions) + 1, draw)

        table = draw.choice(self.tables)
        number = draw.randint(0, MAX_CONDITIONS)
        numbers = [
            column.name for column in table.columns if column.is_number and not column.is_key
        ]
        plain = [column.name for column in table.columns if not column.is_key]
        kinds: list[What] = ["count"]
        kinds += ["total", "average", "largest", "smallest"] if numbers else []
        kinds += ["value"] * 3 if plain else []
        what = draw.choice(kinds)
        if what == "count":
            return _with_conditions(
                self, table, DatabaseQuestion(table=table.name), max(1, number), draw
            )

        if what != "value":
            question = DatabaseQuestion(table=table.name, what=what, column=draw.choice(numbers))
            return _with_conditions(self, table, question, number, draw)

        column = draw.choice(plain)
        other_numbers = [name for name in numbers if name != column]
        if other_numbers and draw.random() < 0.5:
            most = draw.choice(other_numbers)
            question = DatabaseQuestion(table=table.name, what=what, column=column, most=most)
            return _with_conditions(self, table, question, min(1, number), draw)

        question = DatabaseQuestion(table=table.name, what=what, column=column)
        return _with_conditions(self, table, question, max(1, number), draw)


def _with_conditions(
    database: SurveyedDatabase,
    table: DatabaseTable,
    question: DatabaseQuestion,
    number: int,
    draw: random.Random,
) -> DatabaseQuestion:
    """The question with that many conditions, or as many as the table's columns allow."""
    named = {
        question.column,
        question.most,
        *(condition.column for condition in question.conditions),
    }
    conditions = list(question.conditions)
    tables = {linked.name: linked for linked in database.tables}
    links = [link for link in table.links if link.table in tables]
    foreign = {link.column for link in table.links}
    primary = {column.name for column in table.columns if column.is_key} - foreign
    for _ in range(number - len(conditions)):
        if any(condition.column in primary and condition.link is None for condition in conditions):
            break  # a single row is identified

        link = draw.choice(links) if links and draw.random() < LINK_PROBABILITY else None
        # A condition on a key is only an equality, because a range of keys has no meaning.
        takes_key = question.what == "value" and not question.most and not conditions
        fit = [
            column
            for column in (table if link is None else tables[link.table]).columns
            if column.values
            and column.name not in named
            and (not column.is_key or (link is None and takes_key and column.name in primary))
        ]
        if not fit:
            break

        column = draw.choice(fit)
        is_range = column.is_number and not column.is_key and question.what != "value"
        signs: tuple[Sign, ...] = (">", "<") if is_range else ("=",)
        sign = draw.choice(signs)
        conditions.append(
            QueryCondition(
                column=column.name, sign=sign, value=draw.choice(column.values), link=link
            )
        )
        named.add(column.name)

    return msgspec.structs.replace(question, conditions=tuple(conditions))


async def find_database(
    tools: AttemptTools, name: str, schema: Mapping[str, Any]
) -> tuple[SurveyedDatabase, CallResult] | None:
    """The database of a tool, with a call that returned a result. None if the tool does not accept
    SQL."""
    needed = schema.get("required") or ()
    parameters = [parameter for parameter in properties(schema) if _NAMES.search(parameter)]
    parameter = next((candidate for candidate in parameters if set(needed) <= {candidate}), None)
    if parameter is None:
        return None

    async def ask(sql: str) -> str | None:
        return await _value(tools, name, parameter, sql)

    if await ask("17 * 3") != "51":
        return None

    listed = "FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    names = f"SELECT json_group_array(name) FROM (SELECT name {listed} LIMIT {MAX_TABLES})"
    tables = []
    for each in filter(lambda value: isinstance(value, str), _read(await ask(names))):
        # Each table has its own query, since a result has at most the section's max_result_chars.
        table = _table(await ask(f"SELECT sql {listed} AND name = {literal(each)}"))
        if table is None:
            continue
        columns = await _with_values(ask, table.name, table.columns)
        if any(column.values for column in columns):
            tables.append(table._replace(columns=columns))

    if not tables:
        return None

    first = DatabaseQuestion(table=tables[0].name).sql
    return SurveyedDatabase(parameter, tuple(tables)), await call_tool(
        tools, name, {parameter: first}
    )


async def _with_values(
    ask: Callable[[str], Awaitable[str | None]], table: str, columns: Sequence[TableColumn]
) -> tuple[TableColumn, ...]:
    """The columns of a table with some of their values. A single query reads them all. If it fails
    (the result is too long, or a column can't be read), two queries read half of the columns
    each."""
    expressions = []
    for column in columns:
        name = quote_identifier(column.name)
        is_value = f"{name} IS NOT NULL AND {name} <> '' AND length({name}) <= {MAX_VALUE_CHARS}"
        values = f"SELECT DISTINCT {name} AS one FROM {quote_identifier(table)} WHERE {is_value}"
        values += f" ORDER BY 1 LIMIT {MAX_VALUES}"
        expressions.append(f"json((SELECT json_group_array(one) FROM ({values})))")

    columns_values = _read(await ask(f"json_array({', '.join(expressions)})"))
    if len(columns_values) == len(columns):
        return tuple(
            column._replace(
                values=tuple(value for value in of if isinstance(value, (str, int, float)))
            )
            for column, of in zip(columns, columns_values, strict=True)
        )

    if len(columns) < 2:
        return tuple(columns)

    half = len(columns) // 2
    return (
        *await _with_values(ask, table, columns[:half]),
        *await _with_values(ask, table, columns[half:]),
    )


async def answer_of(
    tools: AttemptTools, tool: str, parameter: str, question: DatabaseQuestion
) -> str | None:
    """The answer to a question, as SQLite writes it. None if there is no answer, or if several rows
    match."""
    meant = question.meant_sql
    if meant is not None and await _value(tools, tool, parameter, meant) != "1":
        return None
    return await _value(tools, tool, parameter, question.sql) or None


async def _value(tools: AttemptTools, tool: str, parameter: str, sql: str) -> str | None:
    """The value of an expression, or of a statement with a single value. Empty for NULL, None if
    the result contains no value."""
    result = await call_tool(tools, tool, {parameter: f"SELECT {_mark(f'({sql})')} AS made"})
    match = _MARKED_VALUE.search(result.text)
    return bytes.fromhex(match[1]).decode("utf-8", "replace") if match else None


def _mark(expression: str) -> str:
    """The expression's text as hexadecimal digits between marks that the SQL itself does not
    contain. NULL gives NULL."""
    return f"'made' || ':' || hex(CAST({expression} AS TEXT)) || ':' || 'made'"


def _read(text: str | None) -> Sequence[Any]:
    try:
        values = json.loads(text or "[]")
    except ValueError:
        return []
    return values if isinstance(values, list) else []


def _table(sql: Any) -> DatabaseTable | None:
    """The table that a CREATE statement defines. SQLite parses the statement."""
    if not isinstance(sql, str):
        return None

    with closing(sqlite3.connect(":memory:")) as connection:
        connection.set_authorizer(_allow_only_tables)
        try:
            connection.execute(sql)
            connection.set_authorizer(None)
            ((name,),) = connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            )
            columns = connection.execute(f"PRAGMA table_info({quote_identifier(name)})").fetchall()
            links = connection.execute(
                f"PRAGMA foreign_key_list({quote_identifier(name)})"
            ).fetchall()
        except (sqlite3.Error, sqlite3.Warning, ValueError):
            return None

    keys = [str(column[1]) for column in columns if column[5]]
    foreign_links = tuple(
        Link(str(link[3]), str(link[2]), str(link[4] or "rowid")) for link in links if link[1] == 0
    )
    foreign = {link.column for link in foreign_links}

    return DatabaseTable(
        name=str(name),
        columns=tuple(
            TableColumn(
                name=str(row[1]),
                is_number=any(kind in str(row[2]).upper() for kind in _NUMBERS),
                is_key=str(row[1]) in keys or str(row[1]) in foreign,
                values=(),
            )
            for row in itertools.islice(columns, MAX_COLUMNS)
        ),
        links=foreign_links,
    )


def _allow_only_tables(action: int, *_: Any) -> int:
    return sqlite3.SQLITE_OK if action in _MAKES_A_TABLE else sqlite3.SQLITE_DENY
