"""Every row comes with its place, and a broken one costs only itself."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from agentevo.data import RowError, check_source, read_rows
from agentevo.errors import ConfigError, MissingExtraError


def told(source: Path | str) -> list[tuple[str, object]]:
    """(what follows the path, value or reason) of every row."""
    found = []
    for row in read_rows(str(source)):
        place = row.where.removeprefix(str(source)).lstrip(":")
        found.append((place, row.value.reason if isinstance(row.value, RowError) else row.value))
    return found


def test_lines_with_their_numbers_and_broken_ones_between_good_ones(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\n{"n": 2\n\n{"n": "\xff"}\n{"n": "\xc3\xa9"}')
    assert told(path) == [
        ("1", {"n": 1}),
        ("2", "not_json"),
        ("3", "empty"),
        ("4", "not_utf8"),
        ("5", {"n": "é"}),
    ]

    path.write_text('{"n": 1\n{"n": x}\n')
    cut, wrong = (str(row.value) for row in read_rows(str(path)))
    assert cut.startswith("the line breaks off after 7 characters") and "line 2" not in cut
    assert wrong.startswith("Expecting value at character 7 of the line")


def test_a_line_of_endless_brackets_is_a_bad_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("[" * 200_000 + "\n{}\n")
    assert told(path) == [("1", "not_json"), ("2", {})]


def test_gzip_and_a_torn_one(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"n": %d}\n' % n for n in range(2000))))
    assert [value for _, value in told(path)] == [{"n": n} for n in range(2000)]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz can't be read"):
        list(read_rows(str(path)))


def test_an_array_gives_the_line_on_which_each_row_begins(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"n": 1, "m": [2]}, {"n": 3}], indent=1))
    assert told(path) == [("2", {"n": 1, "m": [2]}), ("8", {"n": 3})]
    path.write_text(' [{"n": 1},{"n": 2}]\n')
    assert told(path) == [("1", {"n": 1}), ("1", {"n": 2})]
    path.write_text("[]")
    assert told(path) == []


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"a": 1}', "is not a JSON array"),
        ('[{"a": 1},\n{"b" 2}]', r"a\.json:2: is not JSON"),
        ('[{"a": 1}\n {"b": 2}]', "neither"),
        ('[{"a": 1}', "not whole"),
        ("", "is not a JSON array"),
    ],
)
def test_a_broken_array_is_refused_whole(tmp_path, text, match):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        list(read_rows(str(path)))


def test_an_array_that_is_not_utf8_names_the_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"a": 1},\n{"b": "\xff"}]')
    with pytest.raises(ConfigError, match=r"a\.json:2: byte 18 is not UTF-8"):
        list(read_rows(str(path)))


def test_a_folder_is_its_files_in_order(tmp_path):
    for name, n in (("b.jsonl", 2), ("a.json", 1)):
        (tmp_path / name).write_text(json.dumps([{"n": n}] if name.endswith("json") else {"n": n}))

    (tmp_path / "readme.md").write_text("no data")
    check_source(str(tmp_path), "data.train")
    assert [row.where for row in read_rows(str(tmp_path))] == [
        f"{tmp_path}/a.json:1",
        f"{tmp_path}/b.jsonl:1",
    ]


def test_what_can_be_no_source_is_refused_before_reading(tmp_path):
    (tmp_path / "a.xlsx").write_text("a,b")
    with pytest.raises(ConfigError, match=r"data\.train: .*a\.xlsx is none of"):
        check_source(str(tmp_path / "a.xlsx"), "data.train")
    with pytest.raises(ConfigError, match="has no"):
        check_source(str(tmp_path), "data.train")
    with pytest.raises(ConfigError, match=r"data\.eval: .*b\.jsonl does not exist"):
        check_source(str(tmp_path / "b.jsonl"), "data.eval")


def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    for source in ("somebody/something", str(tmp_path / "a.parquet")):
        with pytest.raises(MissingExtraError, match=r"pip install 'agentevo\[data\]'"):
            check_source(source, "data.train")


def test_parquet_rows_lose_the_nulls_that_the_table_put_in(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    rows = [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "tool", "content": "b", "name": "f"},
            ]
        },
        {"messages": [], "more": 1},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows, schema=None), tmp_path / "a.parquet")
    check_source(str(tmp_path / "a.parquet"), "data.train")
    assert told(tmp_path / "a.parquet") == [
        ("row 1", rows[0]),
        ("row 2", {"messages": []}),
    ]  # from_pylist takes the first row's keys

    (tmp_path / "a.parquet").write_bytes(b"PAR1nothing")
    with pytest.raises(ConfigError, match="can't be read as Parquet"):
        list(read_rows(str(tmp_path / "a.parquet")))


def test_a_parquet_text_that_is_not_utf8_costs_its_row(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    broken = arrow.array([b"good", b"\xff\xfe", b"fine"]).view(arrow.utf8())
    parquet.write_table(arrow.table({"text": broken}), tmp_path / "a.parquet")
    assert told(tmp_path / "a.parquet") == [
        ("row 1", {"text": "good"}),
        ("row 2", "not_utf8"),
        ("row 3", {"text": "fine"}),
    ]


def test_a_saved_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "user", "content": "b"}]},
    ]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(
        tmp_path / "splits"
    )
    datasets.DatasetDict({"odd": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "odd")

    for name in ("one", "splits"):
        check_source(str(tmp_path / name), "data.train")
        assert told(tmp_path / name) == [("row 1", rows[0]), ("row 2", rows[1])]

    with pytest.raises(ConfigError, match="holds the splits odd"):
        list(read_rows(str(tmp_path / "odd")))


def test_devices_and_pipes_are_refused_before_they_are_opened(tmp_path):
    pipe = tmp_path / "a.jsonl"
    os.mkfifo(pipe)
    for source in ("/dev/zero", "/dev/null", str(pipe)):
        with pytest.raises(ConfigError, match=f"tasks: {source} is a device, pipe or socket"):
            check_source(source, "tasks")


def test_csv_gives_the_line_on_which_each_row_begins(tmp_path):
    path = tmp_path / "a.csv"
    lines = ["query,answer,id", '"2 + 2, in ""words""?",four,7', '"two\nlines",,8', "", "x,y"]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, "\u2028,z,9"]).encode())
    assert told(path) == [
        ("2", {"query": '2 + 2, in "words"?', "answer": "four", "id": "7"}),
        ("3", {"query": "two\nlines", "id": "8"}),
        ("5", "empty"),
        ("6", "not_csv"),
        ("7", {"query": "\u2028", "answer": "z", "id": "9"}),
    ]

    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"n\n\xff\n1\n"))
    assert told(tmp_path / "b.csv.gz") == [("2", "not_utf8"), ("3", {"n": "1"})]

    path.write_text('n,m\n"a" b,1\n2,3\n')
    assert told(path) == [("2", "not_csv"), ("3", {"n": "2", "m": "3"})]


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("", "columns are missing"),
        ("a,,b", "each column a different name"),
        ("a,a", "each column a different name"),
        ("a;b", "separated by ';'"),
        ("a\tb", "use commas"),
        ('"a', "not a CSV header"),
    ],
)
def test_csv_without_a_header_is_refused(tmp_path, header, problem):
    path = tmp_path / "a.csv"
    path.write_text(header)
    check_source(str(path), "tasks.train")
    with pytest.raises(ConfigError, match=problem):
        list(read_rows(str(path)))
