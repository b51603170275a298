"""Who is said to live, and for how long after it has died."""

from __future__ import annotations

import asyncio
import os
import time

from agentevo.inference.directory import Announcement, EngineDirectory
from agentevo.inference.secret import RunSecret


def engine(name: str, pid: int = 1) -> Announcement:
    return Announcement(url=f"http://127.0.0.1:{pid}", name=name, pid=pid, started_at=12.5)


def names(directory: EngineDirectory, max_age_s: float = 5.0) -> list[str]:
    return [one.name for one in directory.living(max_age_s)]


def test_an_engine_is_found_while_it_is_announced(tmp_path):
    directory, reader = EngineDirectory(tmp_path / "engines"), EngineDirectory(tmp_path / "engines")

    async def work():
        assert reader.living(5.0) == [], "no folder yet"
        async with directory.announced(engine("b")), directory.announced(engine("a")):
            assert reader.living(5.0) == [engine("a"), engine("b")]
        assert reader.living(5.0) == []

    asyncio.run(work())
    assert list((tmp_path / "engines").iterdir()) == []


def test_a_heart_that_stops_is_noticed_and_one_that_beats_lives_on(tmp_path):
    directory, reader = EngineDirectory(tmp_path), EngineDirectory(tmp_path)

    async def work():
        directory.announce(engine("dead"))
        async with directory.announced(engine("alive"), every_s=0.02):
            assert names(reader) == ["alive", "dead"]
            await asyncio.sleep(0.4)
            reader.living(0.3)
            await asyncio.sleep(0.1)
            assert names(reader, 0.3) == ["alive"]
            directory.beat(engine("dead"))
            assert names(reader, 0.3) == ["alive", "dead"], "it was only late"

    asyncio.run(work())


def test_clocks_that_jump_make_nobody_dead_or_alive(tmp_path, monkeypatch):
    """The machine's clock, or another machine's: only a change of the file's time counts."""
    directory, reader = EngineDirectory(tmp_path), EngineDirectory(tmp_path)
    directory.announce(engine("a"))
    assert names(reader) == ["a"]
    real = time.time
    for jump in (86400.0, -86400.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        assert names(reader) == ["a"]
        os.utime(tmp_path / "a.json", (real() - 2 * jump, real() - 2 * jump))  # a beat by a clock that jumped too
        assert names(reader) == ["a"]
    stranger = EngineDirectory(tmp_path)
    assert names(stranger) == [], "a file as old as that, never seen before, is taken for a dead engine's"
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

    async def work():
        async with directory.announced(engine("new")):
            assert {file.name for file in tmp_path.iterdir()} == {"ahead.json", "younger.json", "new.json", "secret"}
            assert RunSecret(tmp_path).value() == value
            directory.beat(engine("old"))
            assert (tmp_path / "old.json").is_file(), "it lives after all"

    asyncio.run(work())
