"""Questions to a database in SQL and in words: counts, sums, averages, extremes and single values
of the rows that meet conditions. A condition can apply to the row that a foreign key refers to.

A question is data, from which its SQL and its words are made. A harder question has further
conditions.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

What = Literal["count", "total", "average", "largest", "smallest", "value"]
Sign = Literal["=", ">", "<"]
_FUNCTIONS = {
    "total": "sum({})",
    "average": "round(avg({}), 2)",
    "largest": "max({})",
    "smallest": "min({})",
    "value": "{}",
}
_SIGNS = {"=": "", ">": "over ", "<": "under "}


class Link(msgspec.Struct, frozen=True):
    """A foreign key of a table."""

    column: str
    table: str
    """The table that the key refers to."""
    key: str
    """The column of that table."""


class QueryCondition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition on the rows."""

    column: str
    sign: Sign = "="
    value: str | int | float
    link: Link | None = None
    """If set, the column belongs to the row that this foreign key refers to."""

    @property
    def sql(self) -> str:
        """The condition, for a WHERE clause."""
        condition = f"{quote_identifier(self.column)} {self.sign} {literal(self.value)}"
        if self.link is None:
            return condition
        key = quote_identifier(self.link.key)
        table = quote_identifier(self.link.table)
        subquery = f"SELECT {key} FROM {table} WHERE {condition}"
        return f"{quote_identifier(self.link.column)} IN ({subquery})"

    @property
    def words(self) -> str:
        """After "with": "city Oslo", "amount over 5", "customers of city Oslo"."""
        text = f"{plain(self.column)} {_SIGNS[self.sign]}{self.value}"
        return text if self.link is None else f"{plain(self.link.table)} of {text}"


class DatabaseQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A question about one table."""

    table: str
    what: What = "count"
    column: str = ""
    """The column whose value, sum, average or extreme the question asks for. Empty for a count."""
    conditions: tuple[QueryCondition, ...] = ()
    most: str = ""
    """For `value`: the question is about the row with the largest value in this column."""

    @property
    def sql(self) -> str:
        """A SELECT statement that returns a single value."""
        selection = _FUNCTIONS.get(self.what, "count(*)").format(quote_identifier(self.column))
        last = f" ORDER BY {quote_identifier(self.most)} DESC LIMIT 1" if self.most else ""
        return f"SELECT {selection} {self._rows}{last}"

    @property
    def meant_sql(self) -> str | None:
        """For `value`: a SELECT statement that counts the rows that the question can mean. None for
        other questions, which mean all rows that meet the conditions."""
        if self.what != "value":
            return None
        if not self.most:
            return f"SELECT count(*) {self._rows}"
        most = quote_identifier(self.most)
        joined = "AND" if self.conditions else "WHERE"
        return f"SELECT count(*) {self._rows} {joined} {most} = (SELECT max({most}) {self._rows})"

    @property
    def _rows(self) -> str:
        where = " AND ".join(condition.sql for condition in self.conditions)
        return f"FROM {quote_identifier(self.table)}{f' WHERE {where}' if where else ''}"

    @property
    def words(self) -> str:
        """The question as an instruction in words."""
        table = plain(self.table)
        kind = "" if self.what == "value" else f"{self.what} "
        doing = (
            f"counting the {table}"
            if self.what == "count"
            else f"finding the {kind}{plain(self.column)} of the {table}"
        )
        condition_words = [condition.words for condition in self.conditions]
        condition_words += [f"the largest {plain(self.most)}"] if self.most else []
        return f"{doing} with {' and '.join(condition_words)}" if condition_words else doing

    @property
    def required_values(self) -> dict[str, Any]:
        """The values that the words must contain."""
        return {
            f"{condition.column} {condition.sign}": condition.value for condition in self.conditions
        }

    @property
    def clauses(self) -> int:
        """The number of clauses beyond the first. Each makes the question harder."""
        linked = sum(condition.link is not None for condition in self.conditions)
        return max(0, len(self.conditions) + linked + bool(self.most) - 1)


def quote_identifier(name: str) -> str:
    """The name of a table or column, quoted if SQL requires it."""
    plain_name = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and name.lower() not in _KEYWORDS
    return name if plain_name else '"' + name.replace('"', '""') + '"'


def literal(value: str | int | float) -> str:
    """A value as an SQL literal."""
    return str(value) if not isinstance(value, str) else "'" + value.replace("'", "''") + "'"


def plain(name: str) -> str:
    """A name with spaces between its words."""
    return name.replace("_", " ")


_KEYWORDS = frozenset([
    "all", "and", "as", "between", "by", "case", "check", "column", "commit", "create",
    "default", "delete", "desc", "distinct", "drop", "else", "end", "escape", "except",
    "exists", "for", "foreign", "from", "group", "having", "in", "index", "insert", "into",
    "is", "isnull", "join", "key", "like", "limit", "not", "null", "offset", "on", "or",
    "order", "primary", "references", "select", "set", "table", "then", "to", "transaction",
    "union", "unique", "update", "using", "values", "when", "where", "with",
])  # fmt: skip
"""Keywords of SQL. A name that is a keyword needs quotes."""
