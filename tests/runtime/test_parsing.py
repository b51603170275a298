"""YAML and JSON from outside: what is read is plain, anything else is refused with its line."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import yaml

from agentevo.config import sources
from agentevo.errors import ConfigError
from agentevo.runtime.parsing import (
    MAX_DEPTH,
    ParseError,
    dump_yaml,
    parse_json,
    parse_yaml,
    read_json_object,
    read_text,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: 1e-5", {"a": 1e-5}),
        ("a: 2020-01-01", {"a": "2020-01-01"}),
        ("~: x\n1: y\n1.50: z\nyes: w", {"~": "x", "1": "y", "1.50": "z", "yes": "w"}),
        ("a: &a {b: 1, c: 2}\nd: {<<: *a, b: 3}", {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}),
        ("a: =", {"a": "="}),
        ("[12:00:00, 1:30.5, 190:20]", ["12:00:00", "1:30.5", "190:20"]),
        ("[0, -12, +1_000, 010, 0b11, -0x1F]", [0, -12, 1000, 8, 3, -31]),
        ("a: !!str 1", {"a": "1"}),
        ("[1, yes, ~, 0x1f, .inf]", [1, True, None, 31, float("inf")]),
    ],
)
def test_yaml_is_read_as_it_is_meant(text, value):
    assert parse_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: !!set {b}", "line 1: not valid YAML: the tag '!!set' has no meaning here"),
        ("\na: !x y", "line 2: not valid YAML: the tag '!x'"),
        ("a: " + "9" * 5000, "line 1: a whole number of 5000 characters"),
        ("a: 0x_", "line 1: '0x_' is not a valid int"),
        ("a: !!int ''", "line 1: '' is not a valid int"),
        ("k" * 100_000 + ": 1", "line 1: "),
        ("? " + "k" * 100_000 + "\n: 1", "line 1: a key of 100,000 characters"),
        ("? [a]\n: b", "line 1: not valid YAML: a key is a list"),
        ('"": b', "line 1: a key that is empty"),
        ("a: 1\na: 2", "line 2: not valid YAML: found duplicate key a"),
        ('a: "\\0"', "line 1: a text with a NUL character"),
        ("a: {<<: 5}", "line 1: `<<` takes a mapping"),
        ("&a [*a]", "nested in more than 64 levels"),
        ("a: " + "[" * 65 + "]" * 65, "nested in more than 64 levels"),
        ("a: " + "[" * 5000 + "]" * 5000, "line 1: nested in more than 64 levels"),
        ("- " * 5000, "nested in more than 64 levels"),
        ("[" * 100_000, "nested in more than 64 levels"),
        ("\0", "not valid YAML"),
        ("a: \ud800", "not valid YAML"),
        ("--- 1\n--- 2", "not valid YAML"),
    ],
)
def test_yaml_beyond_the_limits_is_refused_with_its_line(text, expected):
    started = time.process_time()
    with pytest.raises(ParseError) as raised:
        parse_yaml(text)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300
    assert time.process_time() - started < 20


@pytest.mark.slow
def test_aliases_of_aliases_are_counted_as_often_as_they_are_used():
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    with pytest.raises(ParseError, match="100,000 values"):
        parse_yaml("\n".join(lines))


@pytest.mark.parametrize(
    "text",
    ["12:30", "1e5", "12e03", "1.5", "010", "0x1f", "yes", "~", "2020-01-01", "=", "", "é\n"],
)
def test_a_text_is_read_as_it_was_written(text):
    assert parse_yaml(dump_yaml({"a": [text]})) == {"a": [text]}
    assert yaml.safe_load(dump_yaml({"a": text})) == {"a": text}


@pytest.mark.parametrize("path", sources.packaged_recipes().values(), ids=lambda path: path.stem)
def test_the_packaged_recipes_are_read_as_other_yaml_libraries_do(path: Path):
    text = path.read_text(encoding="utf-8")
    assert parse_yaml(text) == yaml.load(text, Loader=yaml.SafeLoader)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[" * 100 + "]" * 100, f"more than {MAX_DEPTH} levels"),
        ("9" * 5000, "4300"),
        ("{'a': 1}", "Expecting property name"),
        (b"\xff", "decode"),
    ],
)
def test_json_beyond_the_limits_is_refused(text, expected):
    with pytest.raises(ParseError, match=expected):
        parse_json(text)


def test_json_up_to_the_limit_is_read():
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: path.mkdir(), "is a folder: give a file"),
        (os.mkfifo, "is a device, pipe or socket"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, pipe or socket"),
        (lambda path: path.symlink_to(path.name), "can't be read: Too many levels of symbolic"),
        (lambda path: path.symlink_to("no-such"), "can't be read: No such file"),
        (lambda path: path.write_bytes(b"\xff"), "not UTF-8 text"),
        (lambda path: path.write_bytes(b"x" * 1_000_001), "has 1,000,001 bytes"),
    ],
)
def test_what_is_no_text_file_is_refused_and_never_waited_for(tmp_path, make, expected):
    make(tmp_path / "file")
    with pytest.raises(ConfigError, match=expected):
        read_text(tmp_path / "file")


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_a_damaged_file_of_ours_is_named(tmp_path, content):
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(ConfigError, match=r"summary\.json: is damaged"):
        read_json_object(tmp_path / "summary.json")
