"""The tools that ship: what they do, what they refuse, and what an attempt is worth by their
state."""

from __future__ import annotations

import os
import sqlite3
import time

import pytest

from agentevo.agents.tool_servers.booking import BookingOffice
from agentevo.agents.tool_servers.calculator import calculator
from agentevo.agents.tool_servers.database import DatabaseTools, _like
from agentevo.agents.tool_servers.files import MAX_FILE, MAX_FILES, FileTools
from agentevo.errors import ConfigError, EnvironmentFailure, ToolError
from agentevo.types import Task


def task(**metadata):
    return Task(id="t", metadata=metadata)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(3 + 4) * 2", "14"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("2 ^ 10 % 1000", "24"),
        ("-sqrt(16) + max(1, 2, pi)", f"{-4 + 3.14159265358979:.12g}"),
        ("1e3 // 7", "142"),
        ("gcd(12, 18)", "6"),
    ],
)
def test_the_calculator_computes(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "x",
        "'a' * 3",
        "True + 1",
        "__import__('os').system('true')",
        "().__class__",
        "9 ** 9 ** 9",
        "(-8) ** 0.5",
        "1 / 0",
        "9e307 * 9",
        "exp(9999)",
        "sqrt(-1)",
        "max()",
        "round(1, 2, 3)",
        "2 ** 1999 * 2 ** 1999 * 2",
        "(" * 250 + ")" * 250,
        "-" * 499 + "1",
        "1" * 501,
        "[i for i in range(9)]",
        "1 if 1 else 2",
    ],
)
def test_the_calculator_refuses_what_is_none_of_its_business(expression):
    if expression.startswith("-"):
        assert calculator(expression) == "-1"  # deep, and right all the same
        return
    with pytest.raises(ToolError):
        calculator(expression)


GOODS = (
    "CREATE TABLE goods (name TEXT, price INT); INSERT INTO goods VALUES ('pear', 7), ('fig', 2);"
)


def database(**metadata):
    return DatabaseTools(task(setup=GOODS, **metadata))


def test_a_database_is_read_and_changed_and_judged_by_its_rows():
    world = database(solved_by="UPDATE goods SET price = 7 WHERE name = 'fig'")
    assert world.schema() == "CREATE TABLE goods (name TEXT, price INT)"

    query = "SELECT name, price FROM goods WHERE name LIKE 'P%'"
    assert world.query(query) == "name | price\npear | 7"
    assert world.outcome() == 0.0

    world = database(solved_by="UPDATE goods SET price = 7 WHERE name = 'fig'")
    assert world.execute("DELETE FROM goods WHERE name = 'fig'") == "Done: 1 row changed."
    assert world.execute("INSERT INTO goods VALUES ('fig', 7)") == "Done: 1 row changed."
    assert world.query("SELECT 1 WHERE 0") == "No rows."
    assert world.outcome() == 1.0

    world.close()
    world = database(solved_by="UPDATE goods SET price = 7 WHERE name = 'fig'")
    world.execute("UPDATE goods SET price = 7")
    world.execute("INSERT INTO goods VALUES ('plum', 7)")

    assert world.outcome() == 0.0, "what nobody asked for is no solution"
    assert database().outcome() is None


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE goods SET price = 0",
        "INSERT INTO goods VALUES ('x', 1) RETURNING name",
        "CREATE TABLE x (y)",
        "PRAGMA page_count",
        "ATTACH 'x.db' AS x",
        "SELECT load_extension('x')",
        "SELECT 1; SELECT 2",
        "SELEKT",
        "",
        "\0",
        "SELECT 'a' GLOB '*a*a'",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT sum(x) FROM c",
        "SELECT length(randomblob(1000000000))",
        "SELECT '" + "x" * 20_000 + "'",
    ],
)
def test_a_query_changes_nothing_and_takes_little(sql):
    world = DatabaseTools(task(setup=GOODS, solved_by="SELECT 1"), statement_timeout_s=0.2)
    if sql:
        with pytest.raises(ToolError):
            world.query(sql)
    else:
        assert world.query(sql) == "No rows."
    assert world.outcome() == 1.0


@pytest.mark.parametrize(
    "sql",
    [
        "ATTACH DATABASE '{path}' AS other",
        "VACUUM INTO '{path}'",
        "PRAGMA journal_mode=DELETE",
        "CREATE VIRTUAL TABLE v USING fts5(x)",
        "BEGIN",
        "SAVEPOINT s",
        "DETACH main",
    ],
)
def test_no_statement_leaves_the_database(sql, tmp_path):
    path = tmp_path / "escaped.db"
    with pytest.raises(ToolError):
        database().execute(sql.format(path=path))
    assert not path.exists()


@pytest.mark.slow
def test_a_database_does_not_grow_without_bound():
    world = DatabaseTools(task(setup="CREATE TABLE t (x)"), statement_timeout_s=20)
    rows = "WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < 900) "
    with pytest.raises(ToolError, match="full"):
        world.execute(f"INSERT INTO t {rows} SELECT randomblob(90000) FROM c")
    assert world.query("SELECT count(*) FROM t").endswith("0")


def test_many_rows_are_cut_and_bytes_are_named():
    world = DatabaseTools(
        task(setup="CREATE TABLE t (x); INSERT INTO t VALUES (x'00ff'), (NULL), (3);")
    )
    assert world.query("SELECT x FROM t") == "x\n[2 bytes]\nNULL\n3"
    world = DatabaseTools(task(setup=GOODS), max_rows=1)
    assert world.query("SELECT name FROM goods").endswith("pear\n(only the first 1 rows are shown)")


def test_a_schema_says_how_many_tables_it_leaves_out():
    many = ";".join(f"CREATE TABLE t{number} (x)" for number in range(60))
    lines = DatabaseTools(task(setup=many)).schema().splitlines()
    assert lines[-1] == "(the first 50 of 60: query sqlite_schema for the others)"
    assert len(lines) == 51 and lines[49] == "CREATE TABLE t49 (x)"
    assert len(DatabaseTools(task(setup=many), max_rows=60).schema().splitlines()) == 60


def test_a_file_is_copied_for_each_attempt(tmp_path):
    import sqlite3

    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as made:
        made.executescript(GOODS)

    made.close()
    first, second = (DatabaseTools(task(), file=str(path)) for _ in range(2))
    first.execute("DELETE FROM goods")
    assert second.query("SELECT count(*) AS n FROM goods") == "n\n2"

    with pytest.raises(ConfigError, match="can't be read"):
        DatabaseTools(task(), file=str(tmp_path / "none.db"))

    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("metadata", [{"setup": "SELEKT"}, {"setup": 3}, {"solved_by": "x"}])
def test_a_task_whose_sql_does_not_run_fails_its_attempt(metadata):
    with pytest.raises(EnvironmentFailure, match="the SQL of metadata"):
        DatabaseTools(task(**metadata))


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("a%", "Abc", True),
        ("%c", "abc", True),
        ("a_c", "abc", True),
        ("a_c", "ac", False),
        ("%", "", True),
        ("", "", True),
        ("a%b%c", "axxbxxd", False),
        (None, "a", None),
    ],
)
def test_like_is_that_of_sql(pattern, text, matches):
    assert _like(pattern, text) is matches
    assert _like("10\\%", "10%", "\\") is True and _like("10\\%", "100", "\\") is False


def test_like_takes_no_time_for_many_stars():
    started = time.process_time()
    assert _like("%a" * 30 + "b", "a" * 10_000) is False
    assert time.process_time() - started < 10


@pytest.mark.slow
def test_like_ends_with_the_statement():
    world = DatabaseTools(task(setup=GOODS), statement_timeout_s=0.2)
    long = "replace(hex(zeroblob({})), '0', 'a')".format
    started = time.process_time()
    with pytest.raises(ToolError, match=r"longer than 0\.2 s"):
        world.query(f"SELECT {long(4000)} LIKE '%' || {long(2000)} || 'b'")
    assert time.process_time() - started < 5


def test_no_statement_gives_much_or_fills_a_disk():
    world = database()
    columns = ", ".join(["hex(zeroblob(400))"] * 50)
    rows = "WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < 40) "
    with pytest.raises(ToolError, match="more than 1,048,576 characters"):
        world.query(f"{rows} SELECT {columns} FROM c")
    assert world.query("SELECT count(*) AS n FROM goods") == "n\n2"

    for what in (
        "TABLE x (y)",
        "VIEW x AS SELECT 1",
        "TRIGGER x INSERT ON goods BEGIN SELECT 1; END",
    ):
        with pytest.raises(ToolError, match="not authorized"):
            world.execute(f"CREATE TEMP {what}")


def test_a_task_opens_no_other_file(tmp_path):
    path = tmp_path / "other.db"
    with pytest.raises(EnvironmentFailure, match="attached"):
        DatabaseTools(task(setup=f"ATTACH '{path}' AS x; CREATE TABLE x.t (a)"))
    assert not path.exists()


@pytest.mark.parametrize(
    "sql",
    [
        "PRAGMA hard_heap_limit=1000",
        "PRAGMA main.SOFT_HEAP_LIMIT = 1000",
        "SELECT 1 FROM pragma_soft_heap_limit(1000)",
        "PRAGMA temp_store_directory='/tmp'",
        "PRAGMA max_page_count=1000000000",
        "PRAGMA page_size=65536",
        "PRAGMA writable_schema=1",
        "SELECT fts3_tokenizer('x')",
    ],
)
def test_a_task_sets_no_limit_of_the_process_or_of_what_a_database_takes(sql):
    asked = "PRAGMA hard_heap_limit"
    before = sqlite3.connect(":memory:").execute(asked).fetchone()
    with pytest.raises(EnvironmentFailure, match=r"is not allowed in|no such|too many arg"):
        DatabaseTools(task(setup=f"CREATE TABLE t (x); {sql};"))
    assert sqlite3.connect(":memory:").execute(asked).fetchone() == before
    dump = "PRAGMA foreign_keys=OFF; BEGIN TRANSACTION; CREATE TABLE t (x); COMMIT;"
    assert "CREATE TABLE t" in DatabaseTools(task(setup=dump)).schema()


def test_a_state_that_can_not_be_read_is_worth_nothing():
    world = database(solved_by="UPDATE goods SET price = 3")
    world.execute("CREATE TABLE sqlites (a, b AS (abs(a)))")
    world.execute("UPDATE goods SET price = 3")
    assert world.outcome() == 0.0, "a table that nobody asked for"
    world = database(solved_by="UPDATE goods SET price = 3")
    world.execute("INSERT INTO goods VALUES (CAST(x'ff' AS TEXT), 3)")
    assert world.outcome() == 0.0


TEXTS = {"notes/a.txt": "one\ntwo\n", "b.txt": "two"}


@pytest.fixture
def folder():
    """Makes the files of an attempt."""
    made = []

    def make(**metadata):
        made.append(FileTools(task(files=TEXTS, **metadata)))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert not os.path.exists(one._temporary_folder)


def test_files_are_read_written_found_and_judged(folder):
    files = folder(expected={"c/d.txt": "two", "b.txt": None})
    assert files.list_files() == "b.txt\nnotes/\nnotes/a.txt"
    assert files.list_files("notes") == "a.txt"
    assert files.read_file("./notes//a.txt") == "one\ntwo\n"
    assert files.search_files("two") == "b.txt:1: two\nnotes/a.txt:2: two"
    assert files.search_files("three") == "Nothing was found."
    assert files.write_file("c/d.txt", "two") == "Wrote 3 bytes to c/d.txt."
    assert files.outcome() == 0.0
    assert files.delete_file("b.txt") == "Deleted b.txt."
    assert files.outcome() == 1.0

    files.write_file("notes/a.txt", "spoiled")
    assert files.outcome() == 0.0
    assert folder().outcome() is None


def test_no_path_leads_out_of_the_folder(folder, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    files = folder()
    os.symlink(secret, os.path.join(files._temporary_folder, "link.txt"))
    os.symlink(tmp_path, os.path.join(files._temporary_folder, "out"))
    os.mkfifo(os.path.join(files._temporary_folder, "pipe"))

    paths = [
        "../secret.txt",
        "notes/../../secret.txt",
        str(secret),
        "~/secret.txt",
        "link.txt",
        "out/secret.txt",
        "out/new.txt",
        "pipe",
        "notes",
        "",
        ".",
        "a\0b",
        "a\nb",
        "b.txt/c.txt",
        "x" * 300,
        "/".join("x" * 20),
    ]
    for path in paths:
        for call in (
            files.read_file,
            files.delete_file,
            lambda path: files.write_file(path, "mine"),
        ):
            with pytest.raises(ToolError):
                call(path)

    with pytest.raises(ToolError):
        files.list_files("out")

    assert files.search_files("secret") == "Nothing was found."
    assert "link" not in files.list_files() and "out" not in files.list_files()
    assert secret.read_text() == "secret" and os.listdir(tmp_path) == ["secret.txt"]


@pytest.mark.slow
def test_files_have_bounds(folder, tmp_path):
    files = folder()
    with pytest.raises(ToolError, match="at most"):
        files.write_file("big.txt", "x" * (MAX_FILE + 1))

    for number in range(15):
        files.write_file(f"{number}.txt", "x" * MAX_FILE)

    with pytest.raises(ToolError, match="room"):
        files.write_file("one_more.txt", "x" * MAX_FILE)

    files = folder()
    for number in range(MAX_FILES):
        os.mkdir(f"{files._temporary_folder}/{number}")

    with pytest.raises(ToolError, match="files and folders"):
        files.write_file("one/more.txt", "")

    (tmp_path / "large.txt").write_bytes(b"x" * (MAX_FILE + 1))
    files = FileTools(task(), root=str(tmp_path), read_only=True)
    with pytest.raises(ToolError, match="no more are read"):
        files.read_file("large.txt")
    with pytest.raises(ToolError, match="only be read"):
        files.write_file("large.txt", "")
    with pytest.raises(ToolError, match="only be read"):
        files.delete_file("large.txt")

    files.close()
    with pytest.raises(EnvironmentFailure, match="read_only"):
        FileTools(task(files={"large.txt": ""}), root=str(tmp_path), read_only=True)
    assert (tmp_path / "large.txt").stat().st_size

    with pytest.raises(ConfigError, match="is not a folder"):
        FileTools(task(), root=str(tmp_path / "none"))


@pytest.mark.parametrize("metadata", [{"files": {"../x": "y"}}, {"files": 3}, {"files": {"x": 1}}])
def test_a_task_whose_files_can_not_be_fails_its_attempt(metadata):
    with pytest.raises(EnvironmentFailure, match=r"metadata\.files"):
        FileTools(task(**metadata))


ROOMS = [
    {"room": 1, "city": "Rome", "kind": "double", "price": 90},
    {"room": 2, "city": "Rome", "kind": "double", "price": 80},
    {"room": 3, "city": "Rome", "kind": "double", "price": 70},
    {"room": 4, "city": "Bonn", "kind": "double", "price": 10},
]
TAKEN = [{"room": 3, "guest": "Eve", "nights": 1}]
EVES = {"guest": "Eve", "city": "Rome", "kind": "double", "nights": 1}
BOBS = {"guest": "Bob", "city": "Rome", "kind": "double", "nights": 2}


def office(wanted):
    return BookingOffice(task(rooms=ROOMS, bookings=TAKEN, wanted=wanted))


def test_rooms_are_booked_and_cancelled_and_judged():
    desk = office([EVES, BOBS])
    assert desk.find_rooms(" rome", "Double") == "room 2 for 80 a night\nroom 1 for 90 a night"
    assert desk.find_rooms("Paris", "double") == "No such room is free."
    assert desk.find_bookings("eve") == "room 3 in Rome, double, 1 nights"
    assert desk.outcome() == 0.0
    assert desk.book(2, "Bob", 2) == "Booked room 2 for Bob, 2 nights."
    assert desk.outcome() == 1.0

    for room, guest, nights in [(9, "A", 1), (2, "A", 1), (1, "A", 0), (1, " ", 1), (1, "A", 31)]:
        with pytest.raises(ToolError):
            desk.book(room, guest, nights)

    with pytest.raises(ToolError, match="not booked"):
        desk.cancel(1)

    desk.cancel(3)
    assert desk.outcome() == 0.0, "Eve did not ask for that"


@pytest.mark.parametrize(
    ("wanted", "calls", "worth"),
    [
        ([EVES, BOBS], [("book", 1, "Bob", 2)], 0.0),  # the dearer one
        ([EVES, BOBS], [("book", 2, "Bob", 3)], 0.0),
        ([EVES, BOBS], [("book", 2, "Bob", 2), ("book", 1, "Bob", 2)], 0.0),
        ([EVES, BOBS, BOBS], [("book", 2, "Bob", 2), ("book", 1, "Bob", 2)], 1.0),
        ([BOBS], [("cancel", 3), ("book", 3, "Bob", 2)], 0.0),  # it was not free
        ([], [("cancel", 3)], 1.0),
        ([BOBS], [("cancel", 3), ("book", 2, "bob", 2)], 1.0),
        ([{**BOBS, "city": "Oslo"}], [("cancel", 3)], 0.0),
    ],
)
def test_what_a_state_is_worth(wanted, calls, worth):
    desk = office(wanted)
    for name, *arguments in calls:
        getattr(desk, name)(*arguments)
    assert desk.outcome() == worth


@pytest.mark.parametrize(
    "metadata",
    [
        {"rooms": 3},
        {"rooms": ROOMS + ROOMS[:1]},
        {"bookings": TAKEN},
        {"rooms": [{"room": "x"}]},
    ],
)
def test_a_task_whose_hotel_is_none_fails_its_attempt(metadata):
    with pytest.raises(EnvironmentFailure, match="metadata"):
        BookingOffice(task(**metadata))
