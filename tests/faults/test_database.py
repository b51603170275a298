"""The database goes away, locks up or loses its connections while samplers and trainer work: they
wait, and nothing is lost or doubled."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from fault_attacks import finish
from fault_checks import check, expected_ids
from fault_hooks import SHORT_S
from fault_processes import Component, ForkServer
from servers import PostgreSQL, unused_name

from agentevo.config import RunConfig

pytestmark = pytest.mark.slow

Small = Callable[..., RunConfig]
Members = Callable[..., list[Component]]

APART = ("serve", "sample", "learn")


@contextmanager
def meanwhile(
    disturb: Callable[[], bool],
    trainer: Component,
    *,
    least: int,
    every_s: tuple[float, float],
    seed: int,
) -> Iterator[list[int]]:
    """Calls `disturb` at random times on a thread of its own; yields a list with an entry for each
    time that it has come to something. `trainer` does not begin its last step before there are
    `least`."""
    done = []
    over = threading.Event()
    rng = random.Random(seed)
    errors = []
    trainer.marks.hold_at = trainer.config.trainer.steps - 1

    def work() -> None:
        while not over.wait(rng.uniform(*every_s)):
            try:
                if disturb():
                    done.append(len(done))
            except BaseException as error:
                errors.append(error)
                raise
            finally:
                if errors or len(done) >= least:
                    trainer.marks.hold_at = 0

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()

    if errors:
        raise errors[0]

    assert len(done) >= least


def killed_while_it_writes(path: str) -> None:
    """Takes the write lock, changes every row, and is_last."""
    connection = sqlite3.connect(path, timeout=300.0, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE tasks SET state = 'poison'")
    connection.execute("DELETE FROM trajectories")
    os.kill(os.getpid(), signal.SIGKILL)


def test_sqlite_whose_writers_are_killed(
    small: Small, members: Members, fork_server: ForkServer
) -> None:
    config = small("trainer.steps=8")
    path = config.run_dir / "store.sqlite"

    def disturb() -> bool:
        if not path.exists():
            return False

        if (
            not sqlite3.connect(path)
            .execute("SELECT count(*) FROM sqlite_master WHERE name = 'tasks'")
            .fetchone()[0]
        ):
            return False

        assert fork_server.run(killed_while_it_writes, str(path)) == -signal.SIGKILL
        return True

    parts = members(config, "train")
    with meanwhile(disturb, parts[-1], least=5, every_s=(0.02, 0.2), seed=1):
        finish(parts)

    assert check(config).trained == expected_ids(config)


@pytest.mark.soak
def test_sqlite_that_is_locked_for_longer_than_any_deadline(small: Small, members: Members) -> None:
    config = small("trainer.steps=8")
    path = config.run_dir / "store.sqlite"

    def disturb() -> bool:
        if not path.exists():
            return False

        connection = sqlite3.connect(path, timeout=300.0, isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(2 * SHORT_S)
        connection.execute("ROLLBACK")
        connection.close()
        return True

    parts = members(config, *APART, before="fault_hooks:short_store_deadline")
    with meanwhile(disturb, parts[-1], least=3, every_s=(0.3, 0.8), seed=2):
        finish(parts)

    assert check(config).trained == expected_ids(config)


def test_postgresql_that_is_restarted(
    small: Small, members: Members, own_postgresql: PostgreSQL, kills: int | None
) -> None:
    """By the order to stop at once, and by SIGKILL to its first process; each time it is away for a
    moment."""
    config = small(
        f"trainer.steps={8 + (kills or 0) // 10}", f"store.url={own_postgresql.url(unused_name())}"
    )
    rng = random.Random(3)

    def disturb() -> bool:
        began = time.monotonic()
        if rng.random() < 0.5:
            own_postgresql.stop("immediate")
        else:
            own_postgresql.kill()
        time.sleep(rng.uniform(0.0, 0.5))
        own_postgresql.start()

        # A slow machine needs longer to open the store, too.
        time.sleep(2 * (time.monotonic() - began))
        return True

    parts = members(config, *APART)
    with meanwhile(disturb, parts[-1], least=3, every_s=(0.1, 1.0), seed=3) as restarts:
        finish(parts)

    print(f"{len(restarts)} restarts")
    assert check(config).trained == expected_ids(config)
