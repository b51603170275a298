"""A tiny policy and an MCP server that others wrote, the SQLite server of the protocol's authors,
over a database whose schema is drawn: `agentevo evolve` makes questions to it, shows some, and lets
the policy learn to ask them in SQL.

    python -m venv build/sqlite && build/sqlite/bin/pip install mcp-server-sqlite 'mcp<2'
    python sqlite_server.py --server build/sqlite/bin/mcp-server-sqlite --out runs/evolve_sqlite
"""

from __future__ import annotations

import random
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from tiny import arguments, evolve, rows_of

OWNERS = ("customers", "members", "patients", "players", "tenants")
THINGS = ("orders", "visits", "rentals", "parcels", "tickets")
PLACES = ("Oslo", "Rome", "Lima", "Kyiv", "Bonn", "Nice", "Cork", "Bari")
KINDS = ("lamp", "desk", "sofa", "vase", "tent", "kite", "oven", "bike")
PLACE_NAMES = ("city", "town", "branch")
KIND_NAMES = ("item", "kind", "goods")
NUMBER_NAMES = ("amount", "price", "weight", "length", "score")
TASKS = {"max_calls": 1, "kinds": ["answer"], "max_difficulty": 4}


def database(file: Path, seed: int) -> None:
    """Two tables, one of which names rows of the other, with names and rows by the seed."""
    draw = random.Random(seed)
    owner = draw.choice(OWNERS)
    thing = draw.choice(THINGS)
    place = draw.choice(PLACE_NAMES)
    kind = draw.choice(KIND_NAMES)
    first, second = draw.sample(NUMBER_NAMES, 2)

    file.unlink(missing_ok=True)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(f"CREATE TABLE {owner} (id INTEGER PRIMARY KEY, {place} TEXT, age INT)")
        connection.execute(
            f"CREATE TABLE {thing} (id INTEGER PRIMARY KEY, owner INT REFERENCES {owner}(id), "
            f"{kind} TEXT, {first} INT, {second} INT)"
        )
        for number in range(1, 61):
            row = (number, draw.choice(PLACES), draw.randint(18, 90))
            connection.execute(f"INSERT INTO {owner} VALUES (?, ?, ?)", row)

        for number in range(1, 241):
            small = draw.randint(1, 99)
            large = draw.randint(100, 999)
            row = (number, draw.randint(1, 60), draw.choice(KINDS), small, large)
            connection.execute(f"INSERT INTO {thing} VALUES (?, ?, ?, ?, ?)", row)

        connection.commit()


if __name__ == "__main__":
    parser = arguments(__doc__ or "", "runs/evolve_sqlite")
    parser.add_argument("--server", default="mcp-server-sqlite", help="the command")
    parser.add_argument("--schema", type=int, default=0, help="the seed of the database")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    database(file := (given.out / "shop.db").absolute(), given.schema)
    found = Path(given.server)
    server = {
        "type": "mcp",
        "name": "sqlite",
        "command": str(found.absolute()) if found.is_file() else given.server,
        "args": ["--db-path", str(file)],
        "session": "shared",
        "include": ["read_query", "list_tables", "describe_table"],
    }
    sys.exit(evolve(given, [server], TASKS, rows_of(server, TASKS)))
