"""Database servers as fixtures: one of each kind that all tests share, and a server of its own for
a test that stops it. Where a server can't be started the test is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from servers import MongoDB, PostgreSQL, unused_name
from slow import slow

BACKENDS = ["sqlite", *slow("postgresql", "mongodb")]


@contextmanager
def running_postgresql() -> Iterator[PostgreSQL]:
    if reason := PostgreSQL.why_not():
        pytest.skip(reason)

    server = PostgreSQL()
    server.start()
    try:
        yield server
    finally:
        server.delete()


@contextmanager
def running_mongodb(folder: Path, *, replica_set: str = "rs0") -> Iterator[MongoDB]:
    if reason := MongoDB.why_not():
        pytest.skip(reason)
    server = MongoDB(folder / "data", replica_set=replica_set)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    with running_postgresql() as server:
        yield server


@pytest.fixture
def own_postgresql() -> Iterator[PostgreSQL]:
    """A server for one test alone, which may stop or kill it."""
    with running_postgresql() as server:
        yield server


@pytest.fixture(scope="session")
def mongodb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MongoDB]:
    with running_mongodb(tmp_path_factory.mktemp("mongodb")) as server:
        yield server


@pytest.fixture(params=BACKENDS)
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """`new_url()`: the URL of a store that doesn't exist yet, of every backend in turn."""

    def make() -> str:
        name = unused_name()
        return f"sqlite:///{tmp_path / name}" if request.param == "sqlite" else server.url(name)

    server = None if request.param == "sqlite" else request.getfixturevalue(request.param)
    return make


@pytest.fixture
def any_store(new_url: Callable[[], str]) -> str:
    """The URL of a store that doesn't exist yet, of every backend in turn."""
    return new_url()
