"""Tasks for tools that answer SQL: what they ask is what SQLite says, in words that tell enough."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from contextlib import closing

import pytest

import agentevo
from agentevo.agents.tools.state_checks import SOLVED_BY_CALLS
from agentevo.config.tools import FunctionToolSection
from agentevo.errors import AgentEvoError, ConfigError
from agentevo_evolve.task_making import databases
from agentevo_evolve.task_making.calls import ToolWorld, call_tool
from agentevo_evolve.task_making.demonstrations import demonstration
from agentevo_evolve.task_making.exploration import explore_server
from agentevo_evolve.task_making.questions import DatabaseQuestion, Link, QueryCondition
from agentevo_evolve.task_making.scenario import steps_of
from agentevo_evolve.task_making.server_tasks import WantedTasks, make_tasks

WANTED = WantedTasks(train=40, held_out=10)
SHOP = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, "home city" TEXT, age INT);
CREATE TABLE "order" (number INTEGER PRIMARY KEY, who INTEGER REFERENCES customers(id),
                      item TEXT UNIQUE, price REAL);
CREATE TABLE nobody (one TEXT);
"""
PEOPLE = [(n, f"Name{n}", ("Oslo", "Rome", "St. John's")[n % 3], 20 + 3 * n) for n in range(1, 16)]
ORDERS = [(n, n % 12 + 1, f"item {n}", round(n * 1.37, 2)) for n in range(1, 41)]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A database's file."""
    file = tmp_path_factory.mktemp("shop") / "shop.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(SHOP)
        connection.executemany("INSERT INTO customers VALUES (?, ?, ?, ?)", PEOPLE)
        connection.executemany('INSERT INTO "order" VALUES (?, ?, ?, ?)', ORDERS)
        connection.commit()
    return file


def made_for(sections, wanted=WANTED, **more):
    return asyncio.run(make_tasks(sections, wanted, **more))


def sections(file):
    return [FunctionToolSection(name="database", options={"file": str(file)}, include=("query",))]


@pytest.fixture(scope="module")
def made(shop):
    return made_for(sections(shop))


@pytest.mark.slow
def test_answers_are_what_the_database_says_and_stand_in_the_results(made, shop):
    rows = [*made.train, *made.held_out]
    with closing(sqlite3.connect(shop)) as connection:
        for row in rows:
            (step,) = steps_of(row)
            ((value,),) = connection.execute(step.arguments["sql"])
            assert str(value) == row["answer"] and row["answer"] in step.result
            assert step.question is not None and step.arguments["sql"] == step.question.sql
            for told in step.question.required_values.values():
                assert str(told) in row["query"]
            assert "SELECT" not in row["query"] and "query" not in row["query"]

    said = Counter(step.question.what for row in rows for step in steps_of(row))
    assert {"count", "total", "average", "largest", "smallest", "value"} <= set(said)
    assert {row["difficulty"] for row in rows} >= {1, 2, 3}

    sql = " ".join(row[SOLVED_BY_CALLS][0]["arguments"]["sql"] for row in rows)
    assert " IN (SELECT id FROM customers" in sql and "'St. John''s'" in sql
    assert 'FROM "order"' in sql and '"home city"' in sql and "nobody" not in sql


@pytest.mark.slow
def test_the_same_seed_gives_the_same_tasks_and_no_content_is_on_both_sides(made, shop):
    assert made_for(sections(shop)).train == made.train
    contents = [{row["content"] for row in side} for side in (made.train, made.held_out)]
    assert not contents[0] & contents[1]


@pytest.mark.slow
def test_demonstrations_call_the_tool_and_say_the_value(made):
    for row in made.train[:5]:
        *_, call, result, said = demonstration(row, made.survey.specs)["messages"]
        arguments = json.loads(call["tool_calls"][0]["function"]["arguments"])
        assert arguments == row[SOLVED_BY_CALLS][0]["arguments"]
        assert said["content"] == row["answer"] and row["answer"] in result["content"]


@pytest.mark.slow
def test_harder_variants_have_a_further_condition(made, shop):
    easy = [row for row in made.train if row["difficulty"] == 1][:12]
    wanted = WantedTasks(train=8, held_out=0)
    harder = made_for(sections(shop), wanted, harder_than=easy)
    by_id = {row["id"]: steps_of(row)[-1].question for row in easy}
    for row in harder.train:
        question = steps_of(row)[-1].question
        before = by_id[row["variant_of"]]
        assert question.conditions[: len(before.conditions)] == before.conditions
        assert question.clauses > before.clauses
        assert (question.what, question.column) == (before.what, before.column)


def surveyed(monkeypatch, *known):
    """What is known of a database, and how many questions that took."""
    answers = []

    async def counted(*arguments):
        answers.append(await call_tool(*arguments))
        return answers[-1]

    async def work():
        world = ToolWorld(known)
        try:
            return (await explore_server(world, {}, seed=0)).databases
        finally:
            await world.close()

    with monkeypatch.context() as patched:
        patched.setattr(databases, "call_tool", counted)
        return asyncio.run(work()), len(answers)


def test_a_table_is_asked_for_its_values_once_as_long_as_they_fit_into_a_result(shop, monkeypatch):
    (section,) = sections(shop)
    found, asked_for = surveyed(monkeypatch, section)
    (tables,) = (one.tables for one in found.values())

    assert asked_for == 3 + 2 * 3, "a number, the tables, a first count; of each, SQL and values"
    assert {column.name: len(column.values) for column in tables[0].columns} == {
        "id": 15, "name": 15, "home city": 3, "age": 15,
    }  # fmt: skip

    short = section.model_copy(update={"max_result_chars": 700})
    in_parts, asked_in_parts = surveyed(monkeypatch, short)
    assert in_parts == found and asked_in_parts > asked_for


def test_a_column_that_can_not_be_asked_for_costs_its_own_values_alone(tmp_path, monkeypatch):
    with closing(sqlite3.connect(tmp_path / "x.db")) as connection:
        connection.execute("CREATE TABLE t (a TEXT, b BLOB, c INT)")
        connection.execute("INSERT INTO t VALUES ('x', x'00ff', 7)")
        connection.commit()
    found, _ = surveyed(monkeypatch, *sections(tmp_path / "x.db"))
    (table,) = (table for one in found.values() for table in one.tables)
    assert [column.values for column in table.columns] == [("x",), (), (7,)]


@pytest.mark.slow
def test_many_tables_with_long_statements_and_short_names(tmp_path):
    """A result holds `max_result_chars` at most, which all statements together pass."""
    file = tmp_path / "many.db"
    with closing(sqlite3.connect(file)) as connection:
        for number in range(20):
            comment = f"/* {'what this is for ' * 30} */"
            connection.execute(f"CREATE TABLE t{number} (E TEXT, S INTEGER {comment})")
            rows = [(f"w{one}", 7 * one + number) for one in range(12)]
            connection.executemany(f"INSERT INTO t{number} VALUES (?, ?)", rows)
        connection.commit()

    made = made_for(sections(file), WantedTasks(train=20, held_out=5))
    asked = [steps_of(row)[-1].question for row in made.train]
    assert len(made.survey.databases["query"].tables) == 20
    assert {("value", "E"), ("value", "S")} <= {(one.what, one.column) for one in asked}


@pytest.mark.slow
def test_a_question_of_another_database_has_no_harder_variant(made, shop, tmp_path):
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE birds (name TEXT)")
        connection.execute("INSERT INTO birds VALUES ('crow')")
        connection.commit()
    with pytest.raises(AgentEvoError, match="no call of the server could become a task"):
        made_for(sections(other), WantedTasks(train=1, held_out=0), harder_than=made.train[:2])


def test_questions_say_in_sql_what_they_say_in_words():
    link = Link(column="who", table="customers", key="id")
    question = DatabaseQuestion(
        table="order",
        what="value",
        column="item",
        conditions=(QueryCondition(column="home city", value="St. John's", link=link),),
        most="price",
    )
    assert question.sql == (
        'SELECT item FROM "order" WHERE who IN (SELECT id FROM customers WHERE '
        "\"home city\" = 'St. John''s') ORDER BY price DESC LIMIT 1"
    )
    assert question.words == (
        "finding the item of the order with customers of home city St. John's and the largest price"
    )
    assert question.clauses == 2


@agentevo.tool("claims_sql")
class Liar:
    """Says that it answers SQL."""

    def query(self, sql: str) -> str:
        """Asks.

        Args:
            sql: Anything.
        """
        if "17 * 3" in sql:
            return "made:3531:made"
        endless = "CREATE TABLE t AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) "
        shown = [f"{endless} SELECT x FROM c", "DROP TABLE t", 7, 'CREATE TABLE "a""b" (x)']
        return f"made:{json.dumps(shown).encode().hex()}:made"


@agentevo.tool("repeats_sql")
def parrot(sql: str) -> str:
    """Repeats.

    Args:
        sql: Anything.
    """
    return sql


@agentevo.tool("fails_sql")
def failing(query: str) -> str:
    """Fails, and calls that a result.

    Args:
        query: Anything.
    """
    return f"Database error: near {query!r}"


@pytest.mark.slow
def test_servers_that_lie_about_databases_are_no_databases():
    """What one says its tables are is read without running anything of it."""
    with pytest.raises(AgentEvoError):
        made_for([FunctionToolSection(name="claims_sql")], WantedTasks(train=2, held_out=0))
    with pytest.raises(AgentEvoError, match="repeats the call"):  # it is a tool, and no database
        made_for([FunctionToolSection(name="repeats_sql")], WantedTasks(train=2, held_out=0))


def test_an_error_that_is_called_a_result_is_an_error():
    with pytest.raises(ConfigError, match="Database error: near"):
        made_for([FunctionToolSection(name="fails_sql")], WantedTasks(train=2, held_out=0))
