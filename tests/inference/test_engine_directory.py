"""Who is said to live, and for how long after it has died."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from agentevo.errors import ConfigError
from agentevo.inference.serving import directory as module
from agentevo.inference.serving.directory import Announcement, EngineDirectory
from agentevo.inference.serving.secret import RunSecret


def engine(name: str, pid: int = 1) -> Announcement:
    return Announcement(url=f"http://127.0.0.1:{pid}", name=name, pid=pid, started_at=12.5)


def names(directory: EngineDirectory, max_age_s: float = 5.0) -> list[str]:
    return [one.name for one in directory.living(max_age_s)]


def test_an_engine_is_found_while_it_is_announced(tmp_path):
    directory = EngineDirectory(tmp_path / "engines")
    reader = EngineDirectory(tmp_path / "engines")

    async def work():
        assert reader.living(5.0) == [], "no folder yet"
        async with directory.keep_announced(engine("b")), directory.keep_announced(engine("a")):
            assert reader.living(5.0) == [engine("a"), engine("b")]
        assert reader.living(5.0) == []

    asyncio.run(work())
    assert list((tmp_path / "engines").iterdir()) == []


class Clock:
    """The module `time`, of whose monotonic clock more passes where a test says so."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.passed_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_heart_that_stops_is_noticed_and_one_that_beats_lives_on(tmp_path, clock):
    directory = EngineDirectory(tmp_path)
    reader = EngineDirectory(tmp_path)

    async def work():
        directory.announce(engine("dead"))
        async with directory.keep_announced(engine("alive"), every_s=0.02):
            assert names(reader) == ["alive", "dead"]
            clock.passed_s += 1000.0
            async with asyncio.timeout(300):
                while names(reader, 500.0) != ["alive"]:
                    await asyncio.sleep(0.02)

            directory.beat(engine("dead"))
            assert names(reader, 500.0) == ["alive", "dead"], "it was only late"

    asyncio.run(work())


def test_clocks_that_jump_make_nobody_dead_or_alive(tmp_path, monkeypatch):
    """The machine's clock, or another machine's: only a change of the file's time counts."""
    directory = EngineDirectory(tmp_path)
    reader = EngineDirectory(tmp_path)
    directory.announce(engine("a"))
    assert names(reader) == ["a"]

    real = time.time
    for jump in (86400.0, -86400.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        assert names(reader) == ["a"]
        os.utime(
            tmp_path / "a.json", (real() - 2 * jump, real() - 2 * jump)
        )  # a beat by a clock that jumped too
        assert names(reader) == ["a"]

    stranger = EngineDirectory(tmp_path)
    assert names(stranger) == [], (
        "a file as old as that, never seen before, is taken for a dead engine's"
    )

    directory.beat(engine("a"))
    assert names(stranger) == ["a"], "until it beats"


def test_only_ones_own_announcement_is_withdrawn_and_a_deleted_one_comes_back(tmp_path):
    directory = EngineDirectory(tmp_path)
    directory.announce(engine("a", pid=1))
    directory.announce(engine("a", pid=2))  # restarted under the same name
    directory.withdraw(engine("a", pid=1))
    assert directory.living(5.0) == [engine("a", pid=2)]

    (tmp_path / "a.json").unlink()
    directory.beat(engine("a", pid=2))
    assert directory.living(5.0) == [engine("a", pid=2)]


def test_each_beat_tells_the_version_and_the_end_withdraws_whatever_it_was(tmp_path):
    async def serve():
        directory = EngineDirectory(tmp_path)
        serving = [4]
        async with directory.keep_announced(engine("a"), serves=lambda: serving[0], every_s=0.01):
            assert directory.find("a").version == 4
            serving[0] = 5
            async with asyncio.timeout(300):
                while directory.find("a").version != 5:
                    await asyncio.sleep(0.01)
            assert directory.find("a").is_of_same(engine("a"))

        assert directory.find("a") is None

    asyncio.run(serve())


@pytest.mark.slow
def test_the_announcement_of_another_engine_is_left_alone_until_that_one_is_dead(
    tmp_path, monkeypatch, clock
):
    """Two of one name, where locks don't hold."""
    monkeypatch.setattr(module, "DEAD_S", 4000.0)
    one = EngineDirectory(tmp_path)
    other = EngineDirectory(tmp_path)
    file = tmp_path / "a.json"
    one.announce(engine("a", pid=1))
    other.announce(engine("a", pid=2))

    for second in range(10):
        os.utime(file, (second, second))  # the other's heart, by whatever clock
        one.beat(engine("a", pid=1))
        assert one.find("a") == engine("a", pid=2) and file.stat().st_mtime == second, (
            "not made younger either"
        )
        clock.passed_s += 1000.0

    one.beat(engine("a", pid=1))
    assert one.find("a") == engine("a", pid=2), "its heart has just beaten"

    clock.passed_s += 5000.0
    one.beat(engine("a", pid=1))
    assert one.find("a") == engine("a", pid=1)

    other.beat(engine("a", pid=2))
    assert other.find("a") == engine("a", pid=1)


def test_a_name_is_one_living_engines(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ENDING_S", 0.1)
    one = EngineDirectory(tmp_path / "engines")
    other = EngineDirectory(tmp_path / "engines")
    told = pytest.raises(ConfigError, match="an engine named a is running: give another --name")
    with one.hold_name("a"), one.hold_name("b"), told, other.hold_name("a"):
        raise AssertionError
    with other.hold_name("a"):
        assert (tmp_path / "engines" / ".a.lock").is_file()

    assert list((tmp_path / "engines").iterdir()) == []


def test_who_is_about_to_end_is_waited_for(tmp_path):
    held = threading.Event()

    def hold():
        with EngineDirectory(tmp_path).hold_name("a"):
            held.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    with EngineDirectory(tmp_path).hold_name("a"):
        thread.join()


def test_what_no_engine_has_written_is_passed_over(tmp_path):
    directory = EngineDirectory(tmp_path)
    directory.announce(engine("a"))
    (tmp_path / "b.json").write_text('{"url": "http')
    (tmp_path / "c.json").write_text('{"name": "c"}')
    assert names(directory) == ["a"]


def test_who_starts_an_engine_deletes_what_has_been_dead_for_an_hour(tmp_path):
    directory = EngineDirectory(tmp_path)
    for name, age_s in (("old", 3700), ("younger", 3500), ("ahead", -90000)):
        directory.announce(engine(name))
        os.utime(tmp_path / f"{name}.json", (time.time() - age_s, time.time() - age_s))

    value = RunSecret(tmp_path).value()
    os.utime(tmp_path / "secret", (1.0, 1.0))
    torn = tmp_path / ".torn.12345678"
    torn.write_text("")
    os.utime(torn, (1.0, 1.0))
    for name in (".held.lock", ".killed.lock"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1.0, 1.0))

    async def work():
        async with directory.keep_announced(engine("new")):
            left = {"ahead.json", "younger.json", "new.json", "secret", ".held.lock"}
            assert {file.name for file in tmp_path.iterdir()} == left
            assert RunSecret(tmp_path).value() == value
            directory.beat(engine("old"))
            assert (tmp_path / "old.json").is_file(), "it lives after all"

    with EngineDirectory(tmp_path).hold_name("held"):
        os.utime(tmp_path / ".held.lock", (1.0, 1.0))
        asyncio.run(work())
