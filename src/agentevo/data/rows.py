"""Rows of data from any source: a file, a folder of files, or a Hugging Face dataset.

    FILE.jsonl[.gz]     one JSON object a line
    FILE.json[.gz]      a JSON array of objects
    FILE.csv[.gz]       a header and a row for each record, cells separated by commas: texts; an
                        empty one is a key that the row lacks
    FILE.parquet        (pip install 'agentevo[data]')
    FOLDER              the output of `Dataset.save_to_disk`, or files of the kinds above, in
                        the order of their names
    ORG/NAME[:SPLIT]    a dataset of the Hugging Face hub, split `train` unless given
                        (pip install 'agentevo[data]')

A row records its place. A line that is not JSON or not UTF-8 is a bad row, and reading continues. A
file that can't be read as a whole raises ConfigError. Only a line feed ends a line. Other line
separators in JSON, such as U+2028, are kept.
"""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from agentevo.data.row_report import RowError
from agentevo.errors import ConfigError
from agentevo.runtime.extras import load_extra
from agentevo.runtime.parsing import ParseError, check_depth, check_file, parse_json
from agentevo.runtime.paths import spelling_hint
from agentevo.runtime.progress import bar

_DECODER = json.JSONDecoder()
_BAD_LINES = {"not_utf8": "is not UTF-8", "not_json": "is not JSON"}
_KINDS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")
_HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<split>\w[\w.\[\]:%-]*))?"
)


@dataclass(frozen=True)
class SourceRow:
    where: str
    value: Any
    """The content of the row, or a RowError with the reason why it can't be read."""


def check_source(source: str, key: str) -> None:
    """Raises ConfigError for an impossible source, before anything is read."""
    path = Path(source).expanduser()
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(
            f"{key}: {source} is a device, pipe or socket: give a file, which can be read again"
        )

    if path.is_file() and _kind(path) is None:
        raise ConfigError(f"{key}: {source} is none of {', '.join(_KINDS)}: rename or convert it")

    if path.is_dir() and not _is_saved_dataset(path) and not _files(path):
        raise ConfigError(
            f"{key}: {source} has no {', '.join(_KINDS)} and no saved dataset: give a file or "
            "another folder"
        )

    if not path.exists() and (_kind(path) is not None or not _HUB_NAME.fullmatch(source)):
        raise ConfigError(
            f"{key}: {source} does not exist: {spelling_hint(path)}give a file, a folder, or a "
            "dataset of the hub written ORG/NAME or ORG/NAME:SPLIT"
        )

    if not path.exists() or _is_saved_dataset(path):
        _package("datasets", source)
    elif any(_kind(file) == ".parquet" for file in ([path] if path.is_file() else _files(path))):
        _package("pyarrow", source)


def check_not_a_source(out: Path, source: str, key: str) -> None:
    """Raises ConfigError if the output file is also an input, even by another path."""
    path = Path(source).expanduser()
    read = [path] if path.is_file() else _files(path) if path.is_dir() else []
    if out.exists() and any(out.samefile(file) for file in read):
        raise ConfigError(f"{key}: {out} is also the input: give another output file")


def read_rows(source: str) -> Iterator[SourceRow]:
    """Every row of a source that `check_source` accepts. Raises ConfigError if reading a file can't
    continue."""
    path = Path(source).expanduser()
    if path.is_dir() and not _is_saved_dataset(path):
        for file in _files(path):
            yield from _read_file(file)
    elif path.is_file():
        yield from _read_file(path)
    else:
        yield from _read_dataset(source, path)


def read_json_lines(path: Path) -> Iterator[SourceRow]:
    """Every line of a file of JSON lines except empty ones. The file can have any name. Raises
    ConfigError for a file that can't be read, and for a line that is not JSON."""
    check_file(path)
    for row in _read(path, _read_lines):
        if not isinstance(row.value, RowError):
            yield row
        elif row.value.reason != "empty":
            raise ConfigError(f"{row.where}: {_BAD_LINES[row.value.reason]} ({row.value.detail})")


def _read_file(path: Path) -> Iterator[SourceRow]:
    kind = _kind(path)
    if kind == ".parquet":
        yield from _read(path, _read_parquet)
    elif kind in (".jsonl", ".jsonl.gz"):
        yield from _read(path, _read_lines)
    elif kind in (".csv", ".csv.gz"):
        yield from _read(path, _read_csv)
    else:
        yield from _read(path, _read_array)


def _read(path: Path, rows: Callable[[Path], Iterator[SourceRow]]) -> Iterator[SourceRow]:
    try:
        yield from rows(path)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{path} can't be read ({type(error).__name__}: {error}): write it again"
        ) from error


def _read_lines(path: Path) -> Iterator[SourceRow]:
    with path.open("rb") as raw, bar(path.name, path.stat().st_size, "bytes") as read:
        file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        for number, line in enumerate(cast(IO[bytes], file), start=1):
            read.to(raw.tell())
            yield SourceRow(
                f"{path}:{number}",
                _parsed_line(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line),
            )


def _parsed_line(line: bytes) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return RowError(
            "not_utf8", f"byte {error.start} of the line is not UTF-8: convert the file to UTF-8"
        )

    if not text.strip():
        return RowError("empty", "an empty line: remove it")

    try:
        return parse_json(text)
    except ParseError as error:
        return RowError("not_json", f"{_in_line(error, text)}: write one JSON object a line")


def _in_line(error: ParseError, text: str) -> str:
    """The problem and its place in the line. The line's place in the file is reported
    separately."""
    cause = error.__cause__
    if not isinstance(cause, json.JSONDecodeError):
        return str(error)
    if cause.pos >= len(text.rstrip()):
        return f"the line breaks off after {len(text.rstrip())} characters ({cause.msg})"
    return f"{cause.msg} at character {cause.pos + 1} of the line"


def _read_array(path: Path) -> Iterator[SourceRow]:
    """The elements of a file with a single array, each with the line on which it begins."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        raw = file.read()

    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: byte {error.start} is not UTF-8: convert the file to UTF-8, or "
            "write JSONL"
        ) from error

    place = skip_blank(text, 0)
    line = 1
    counted_to = 0

    if not text.startswith("[", place):
        raise ConfigError(
            f"{path}: is not a JSON array: write [{{...}}, ...], or one object per line into a "
            "file named .jsonl"
        )

    place = skip_blank(text, place + 1)
    while not text.startswith("]", place):
        line += text.count("\n", counted_to, place)
        counted_to = place
        value, place = json_value(
            text, place, f"{path}:{line}", "write JSONL, of which a bad line costs only itself"
        )
        yield SourceRow(f"{path}:{line}", value)

        if text.startswith(",", place):
            place = skip_blank(text, place + 1)
        elif not text.startswith("]", place):
            raise ConfigError(
                f"{path}:{line}: neither `,` nor `]` follows the element: the file is not whole"
            )


def json_value(text: str, place: int, where: str, remedy: str) -> tuple[Any, int]:
    """The JSON value that begins at a place, and the place after the value. Raises ConfigError with
    the place `where`, and with `remedy` as an alternative to a correction."""
    try:
        value, end = _DECODER.raw_decode(text, place)
        check_depth(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON ({error}): correct it, or {remedy}") from error
    return value, skip_blank(text, end)


def skip_blank(text: str, place: int) -> int:
    """The position of the next character that is not white space."""
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


def _read_csv(path: Path) -> Iterator[SourceRow]:
    """The rows of a CSV file. A byte that is not UTF-8 makes its row a bad row."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        reader = csv.reader(cast(Iterable[str], text), strict=True)
        try:
            names = next(reader, [])
        except csv.Error as error:
            raise ConfigError(f"{path}:1: is not a CSV header ({error}): correct it") from error

        _check_header(names, path)
        while True:
            where = f"{path}:{reader.line_num + 1}"
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield SourceRow(where, RowError("not_csv", f"{error}: correct it, or write JSONL"))
                continue

            yield SourceRow(where, _parsed_cells(names, cells))


def _check_header(names: Sequence[str], path: Path) -> None:
    other_separators = [name for name in (";", "\t") if len(names) == 1 and name in names[0]]
    if other_separators:
        raise ConfigError(f"{path}:1: cells are separated by {other_separators[0]!r}: use commas")
    if not names or not all(names) or len(set(names)) < len(names):
        raise ConfigError(
            f"{path}:1: the columns are {', '.join(names) or 'missing'}: the first line must give "
            "each column a different name"
        )


def _parsed_cells(names: Sequence[str], cells: Sequence[str]) -> Any:
    if not any(cells):
        return RowError("empty", "an empty line: remove it")
    if len(cells) != len(names):
        return RowError(
            "not_csv",
            f"{len(cells)} cells for {len(names)} columns: put a text with commas or line breaks "
            "into double quotes",
        )

    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return RowError("not_utf8", "a byte of the row is not UTF-8: convert the file to UTF-8")

    return {name: cell for name, cell in zip(names, cells, strict=True) if cell}


def _read_parquet(path: Path) -> Iterator[SourceRow]:
    parquet = _package("pyarrow.parquet", str(path))
    arrow = _package("pyarrow", str(path))
    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for index in range(batch.num_rows):
                    number += 1
                    yield SourceRow(f"{path}:row {number}", _parsed_row(batch.slice(index, 1)))
    except arrow.ArrowException as error:
        raise ConfigError(
            f"{path} can't be read as Parquet ({type(error).__name__}: {error}): write it again"
        ) from error


def _parsed_row(batch: Any) -> Any:
    """The only row of an Arrow batch."""
    try:
        (value,) = batch.to_pylist()
    except UnicodeDecodeError as error:
        return RowError(
            "not_utf8", f"byte {error.start} of a text is not UTF-8: write the file again"
        )
    return _without_nulls(value)


def _read_dataset(source: str, path: Path) -> Iterator[SourceRow]:
    datasets = _package("datasets", source)
    hub_name = None if path.exists() else _HUB_NAME.fullmatch(source)
    try:
        if hub_name is None:
            data = datasets.load_from_disk(str(path))
        else:
            data = datasets.load_dataset(hub_name["name"], split=hub_name["split"] or "train")
    except (OSError, ValueError, RuntimeError, pickle.PickleError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"dataset {source} can't be loaded ({type(error).__name__}: {reason}): check name, "
            "split and network, or convert it to JSONL"
        ) from error

    if isinstance(data, dict):
        if "train" not in data:
            raise ConfigError(
                f"{source} has the splits {', '.join(data)}: give the folder of one of them, "
                f"such as {path / next(iter(data))}"
            )
        data = data["train"]

    for number, value in enumerate(data, start=1):
        yield SourceRow(f"{source}:row {number}", _without_nulls(value))


def _without_nulls(value: Any) -> Any:
    """The row without its null values. In a table every row has all keys, and null marks those that
    a row lacks."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _kind(path: Path) -> str | None:
    return next(
        (kind for kind in sorted(_KINDS, key=len, reverse=True) if path.name.endswith(kind)), None
    )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and _kind(path) is not None)


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _package(name: str, source: str) -> Any:
    return load_extra(name, "data", source, ", or convert it to JSONL")
