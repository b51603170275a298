"""Files of broadcast rounds that are torn, forged, old, or away keep no engine from its weights."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import time

import pytest
from broadcast_rounds import assert_has, looked_after, settled, source_of, waiting

from agentevo.errors import ConfigError, EngineError, WeightsNotSentError
from agentevo.inference.weights import broadcast_files, broadcast_group

pytestmark = pytest.mark.usefixtures("quick_rounds")


def test_rubbish_among_the_asks_goes_and_engines_are_served(folder, sender, notes, monkeypatch):
    monkeypatch.setattr(broadcast_files, "STALE_S", 300.0)
    asyncio.run(sender.begin(1))
    asks = folder / "asks"
    sha256 = sender._latest.sha256

    with (asks / f"{'a' * 32}.json").open("wb") as huge:
        huge.truncate(2**30)

    (asks / f"{'b' * 32}.json").write_bytes(b"\xff{")
    (asks / f"{'c' * 32}.json").write_text('{"id": "' + "d" * 32 + '"}')
    (asks / f"{'e' * 32}.json").mkdir()
    (asks / f"{'f' * 32}.json").symlink_to("/dev/zero")
    torn = f'{{"id":"{"1" * 32}","engine":"{"1" * 32}","sha256":"{sha256}","where":"","places":'
    (asks / f"{'1' * 32}.json").write_text(torn + "[]}")
    (asks / f"{'2' * 32}.json").write_text(
        torn.replace("1" * 32, "2" * 32) + '["x"' + ',"x"' * 9**4
    )

    with waiting(source_of(folder)) as coming:
        (found,) = looked_after(sender, *coming)

    assert_has(found, 1, sender._model)
    assert notes == [] and not list(asks.glob("*.json"))


@pytest.mark.slow
def test_asks_of_engines_that_are_gone_go_by_themselves(folder, sender, notes, monkeypatch):
    """Ten thousand of them, and one that lives."""
    monkeypatch.setattr(broadcast_files, "STALE_S", 300.0)
    asyncio.run(sender.begin(1))

    then = time.time() - 3600
    sha256 = sender._latest.sha256
    for number in range(10_000):
        name = f"{number:032x}"
        ask = folder / "asks" / f"{name}.json"
        ask.write_text(
            f'{{"id":"{name}","engine":"{name}","sha256":"{sha256}","places":["cpu"],"where":"x"}}'
        )
        os.utime(ask, (then, then))

    with waiting(source_of(folder)) as coming:
        (found,) = looked_after(sender, *coming)

    assert_has(found, 1, sender._model)
    assert notes == [] and not list((folder / "asks").glob("*.json"))


def test_an_answer_that_is_torn_or_for_other_weights_is_not_followed(folder, sender):
    asyncio.run(sender.begin(1))
    source = source_of(folder)
    latest = source.latest_version()
    with pytest.raises(WeightsNotSentError):
        source.read(1, sha256=latest.sha256)
    with pytest.raises(WeightsNotSentError, match="no longer the newest"):
        source.read(1, sha256="0" * 64)

    whole = {"round": "a" * 32, "sha256": latest.sha256, "backend": "gloo"}
    whole |= {"first_rank": 1, "world": 2}
    for forged in ({"round": "../../x"}, {"backend": "mpi"}, {"first_rank": 2}, {"world": 10**6}):
        answer = json.dumps(whole | forged)
        (folder / "answers" / f"{source._request.id}.json").write_text(answer)
        with pytest.raises(EngineError, match="it is torn, or another program"):
            source.read(1, sha256=latest.sha256)


def test_a_folder_that_is_away_is_told_once_and_waited_for(folder, sender, notes):
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("no folder")
    asyncio.run(sender.begin(1))
    asyncio.run(sender.look_after())
    assert len(notes) == 1 and "version 1 can't be sent" in notes[0]

    folder.unlink()
    with waiting(source_of(folder)) as coming:
        (found,) = looked_after(sender, *coming)

    assert_has(found, 1, sender._model)


@pytest.mark.slow
def test_a_full_disk_is_no_engines_fault(folder, sender, notes, monkeypatch):
    """None is kept waiting for long once there is room again."""
    full = [None] * 4
    real = broadcast_files.BroadcastFiles.write_sent

    def write_sent(self, round_id, sent):
        if full:
            full.pop()
            raise OSError(errno.ENOSPC, "no room")
        real(self, round_id, sent)

    monkeypatch.setattr(broadcast_files.BroadcastFiles, "write_sent", write_sent)
    asyncio.run(sender.begin(1))

    source = source_of(folder)
    for _ in range(4):
        with waiting(source) as coming:
            settled(sender, *coming)

    with waiting(source) as coming:
        (found,) = looked_after(sender, *coming)

    assert_has(found, 1, sender._model)
    assert sender._failed_rounds == {} and len(notes) == 1 and "no room" in notes[0]


@pytest.mark.parametrize("name", ["", "asks", "answers", "rounds"])
def test_a_folder_that_was_deleted_is_made_again(name, folder, sender, notes):
    asyncio.run(sender.begin(1))
    shutil.rmtree(folder / name)
    asyncio.run(sender.look_after())
    with waiting(source_of(folder)) as coming:
        (found,) = looked_after(sender, *coming)
    assert_has(found, 1, sender._model)
    assert notes == []


def test_a_latest_that_was_lost_is_written_again(folder, sender):
    asyncio.run(sender.begin(1))
    for damage in (lambda path: path.unlink(), lambda path: path.write_text("{")):
        damage(folder / "latest.json")
        asyncio.run(sender.look_after())
        assert source_of(folder).latest_version().version == 1


def test_a_network_that_is_not_there_is_refused_before_the_first_round(monkeypatch):
    broadcast_group.check_network()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    broadcast_group.check_network()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth99")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME=lo,eth99: set it to one of .*lo"):
        broadcast_group.check_network()
