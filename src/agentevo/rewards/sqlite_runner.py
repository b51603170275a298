"""A program for a sandbox that runs queries on an untrusted SQLite database.

It reads {"file", "queries", "most_rows"} as JSON on stdin, and writes a JSON list on stdout. The
list has the rows of each query, or a text with the reason why the query has none.
"""

import json
import math
import sqlite3
import sys
from typing import Any


def main() -> None:
    """Reads the input, runs the queries, and writes the results."""
    spec = json.load(sys.stdin)
    results = [_ask(spec["file"], query, spec["most_rows"]) for query in spec["queries"]]
    print(json.dumps(results))


def _ask(file: str, query: str, most_rows: int) -> Any:
    database = sqlite3.connect(file)
    try:
        database.execute("PRAGMA trusted_schema = OFF")
        rows = database.execute(query).fetchmany(most_rows + 1)
        return [[_plain(cell) for cell in row] for row in rows]
    except sqlite3.Error as error:
        return str(error)
    finally:
        database.close()


def _plain(value: Any) -> Any:
    """The value for JSON: bytes in hexadecimal, infinity as a text."""
    if isinstance(value, bytes):
        return value.hex()
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


if __name__ == "__main__":
    main()
