"""The state of a database that an attempt leaves, judged in a sandbox."""

from __future__ import annotations

import sqlite3

import pytest

from agentevo.rewards.sqlite_state import SqliteStateConfig
from agentevo.rollout.scoring import Scoring
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task, Trajectory

STATE = {
    "tables": {"orders": [[2, "milk"], [1, "tea"]]},
    "queries": [{"sql": "SELECT count(*), sum(price) FROM prices", "rows": [[2, 0.3]]}],
}


@pytest.fixture
def database(tmp_path):
    def made(*statements: str) -> bytes:
        path = tmp_path / "made.db"
        path.unlink(missing_ok=True)
        with sqlite3.connect(path) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()
        return path.read_bytes()

    return made


ORDERS = (
    "CREATE TABLE orders (id INTEGER, what TEXT)",
    "INSERT INTO orders VALUES (1, 'tea'), (2, 'milk')",
)
PRICES = ("CREATE TABLE prices (price REAL)", "INSERT INTO prices VALUES (0.1), (0.2)")


def judged(files, state=STATE, num_left_out=0, **options):
    scoring = Scoring([SqliteStateConfig(name="sqlite_state", **options)])
    metadata = {} if state is None else {"expected_state": state}
    metrics = {"num_files_left_out": float(num_left_out)}
    attempt = Trajectory(id="t#0", task_id="t", group_id="t", files=files, metrics=metrics)
    task = Task(id="t", metadata=metadata)
    (found,) = run_coroutine(scoring.score([attempt], [True], {}, task=task))
    return found


def test_all_that_is_expected_has_to_be_so(database):
    whole = judged({"shop/x.db": database(*ORDERS, *PRICES)})
    assert (whole.status, whole.reward, whole.success) == ("completed", 1.0, True)
    half = {"x.db": database(*ORDERS)}
    assert judged(half).reward == 0.0
    assert judged(half, partial=True).reward == 0.5
    assert judged({"x.db": database(*PRICES)}, {**STATE, "file": "y.db"}).reward == 0.0
    assert judged({}).reward == 0.0, "an attempt that leaves no database"


def test_a_database_that_may_have_been_left_out_is_a_failed_score(database):
    whole = {"x.db": database(*ORDERS, *PRICES)}
    assert judged(whole, num_left_out=1).reward == 1.0, "another file was"
    wal = {"x.db": database("PRAGMA journal_mode=WAL", *ORDERS)}
    for files in ({}, {"a.txt": b""}, wal):
        found = judged(files, num_left_out=2)
        assert found.status == "failed" and "agent.keep_files_kib" in found.error


def test_the_order_of_rows_counts_where_it_is_asked_for(database):
    file = {"x.sqlite": database(*ORDERS)}
    query = {"sql": "SELECT id FROM orders ORDER BY id", "rows": [[2], [1]]}
    assert judged(file, {"queries": [query]}).reward == 1.0
    assert judged(file, {"queries": [{**query, "ordered": True}]}).reward == 0.0


@pytest.mark.slow
def test_what_is_no_database_or_a_hostile_one_is_wrong_and_nothing_else(database):
    endless = database(
        "CREATE VIEW orders AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) "
        "SELECT count(*), '' FROM n"
    )
    for content in (b"", b"nonsense" * 1000, endless):
        found = judged({"x.db": content}, queries_timeout_s=2.0)
        assert (found.status, found.reward) == ("completed", 0.0), found.error


@pytest.mark.parametrize(
    "state", [None, {}, {"tables": {"a": 1}}, {"queries": ["SELECT 1"]}, {"tables": [1]}]
)
def test_a_task_that_expects_nothing_is_a_failed_score(state):
    found = judged({"x.db": b""}, state)
    assert found.status == "failed" and "expected_state" in found.error
