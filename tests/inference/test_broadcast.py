"""Weights over a process group arrive bit for bit or not at all, whatever becomes of others."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from broadcast_member import BUCKET, Mixed, asks, member, sends, taken
from broadcast_rounds import assert_has, looked_after, settled, source_of, until, waiting

from agentevo.errors import WeightsLostError, WeightsNotSentError
from agentevo.inference.weights import broadcast_group, broadcast_sender
from agentevo.inference.weights.broadcast_files import IncomingWeights, PlaceAnswer
from agentevo.inference.weights.broadcast_sender import BroadcastSender
from agentevo.inference.weights.broadcast_source import receive_place
from agentevo.models.compute.parameters import trained_weights

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("quick_rounds")


@pytest.mark.slow
def test_engines_get_every_bit_of_each_version(folder, sender, notes):
    """Two at once, then the next version from `publish` alone, which waits for both."""
    sources = [source_of(folder), source_of(folder)]
    asyncio.run(sender.begin(3))
    with waiting(*sources) as coming:
        for found in looked_after(sender, *coming):
            assert_has(found, 3, sender._model)

    sender._model.table.data.mul_(2)
    with ThreadPoolExecutor(2) as threads:
        publishing = threads.submit(asyncio.run, sender.publish(4))

        def followed(source):
            while source.latest_version().version < 4:
                time.sleep(0.01)
            return taken(source)

        with ThreadPoolExecutor(2) as others:
            coming = [others.submit(followed, source) for source in sources]
            publishing.result(300)
            for one in coming:
                assert_has(one.result(300), 4, sender._model)

    assert notes == []
    assert [path.name for path in (folder / "rounds").iterdir()] == []
    assert [path.name for path in (folder / "answers").iterdir()] == []
    assert {path.name for path in (folder / "asks").iterdir()} <= {".clock"}
    assert len(list(folder.glob("tensors-*.json"))) == 2


@pytest.mark.slow
def test_round_after_round_each_engine_has_the_newest(folder, sender, notes):
    """What a round leaves behind in a process must not end it later."""
    last = 25
    model = sender._model

    def follow():
        source = source_of(folder)
        found = (-1, {})
        while found[0] < last:
            latest = source.latest_version()
            if latest is not None and latest.version > found[0]:
                found = taken(source)
        return found

    async def work():
        for version in range(last + 1):
            model.table.data.mul_(1.1)
            await sender.publish(version)

    with ThreadPoolExecutor(2) as threads:
        coming = [threads.submit(follow) for _ in range(2)]
        asyncio.run(work())
        for found in looked_after(sender, *coming):
            assert_has(found, last, model)

    assert notes == []


def test_every_place_of_an_engine_is_a_member(folder, sender, notes):
    """As the workers of vLLM are, beside another engine."""
    asyncio.run(sender.begin(1))
    source = source_of(folder)

    def incoming():
        while True:
            with suppress(WeightsNotSentError):
                return source.incoming(source.latest_version(), ["cpu", "cpu"])

    def place(number, given):
        return 1, receive_place(given, number, CPU)

    with ThreadPoolExecutor(4) as threads:
        alone = threads.submit(taken, source_of(folder))
        asked = threads.submit(incoming)
        until(lambda: len(list((folder / "asks").glob("*.json"))) == 2)
        sending = threads.submit(asyncio.run, sender.look_after())
        given = asked.result(300)
        assert given.answer.world == 4

        workers = [threads.submit(place, number, given) for number in (0, 1)]
        for one in (alone, *workers):
            assert_has(one.result(300), 1, sender._model)

        sending.result(300)

    assert notes == []


def test_nobody_is_waited_for_who_has_never_asked(sender, monkeypatch):
    monkeypatch.setattr(broadcast_sender, "ENGINE_WAIT_S", 3600.0)
    asyncio.run(sender.begin(0))
    asyncio.run(asyncio.wait_for(sender.publish(1), 300))


def test_who_is_cancelled_waits_for_the_round_that_reads_the_model(
    folder, sender, notes, monkeypatch
):
    """Else the model could change in the middle, and each tensor would still be as it was sent."""
    asyncio.run(sender.begin(1))
    real = broadcast_group.BroadcastGroup.broadcast
    goes_on = threading.Event()
    is_in_it = threading.Event()

    def held_up(self, tensor):
        is_in_it.set()
        assert goes_on.wait(300)
        real(self, tensor)

    monkeypatch.setattr(broadcast_group.BroadcastGroup, "broadcast", held_up)

    async def cancelled():
        looking = asyncio.ensure_future(sender.look_after())
        async with asyncio.timeout(300):
            while not is_in_it.is_set():
                await asyncio.sleep(0.01)

        looking.cancel()
        await asyncio.wait([looking], timeout=0.2)
        assert not looking.done()

        goes_on.set()
        await asyncio.wait([looking], timeout=300)
        assert looking.cancelled()

    with waiting(source_of(folder)) as coming:
        until(lambda: list((folder / "asks").glob("*.json")))
        asyncio.run(cancelled())
        assert_has(coming[0].result(300), 1, sender._model)

    assert notes == []


def test_an_engine_that_asked_in_vain_has_the_next_version_from_its_publish(folder, sender):
    """Where attempts are always ready, a trainer never looks after anything."""
    asyncio.run(sender.begin(1))
    with waiting(source_of(folder)) as coming:
        try:
            until(lambda: list((folder / "asks").glob("*.json")))
            asyncio.run(sender.publish(2))
            assert len(sender._served) == 1
        finally:
            (found,) = looked_after(sender, *coming)

    assert_has(found, 2, sender._model)


def test_an_engine_that_goes_without_asking_stalls_one_publish(folder, sender, monkeypatch):
    monkeypatch.setattr(broadcast_sender, "ENGINE_WAIT_S", 3.0)
    source = source_of(folder)
    asyncio.run(sender.begin(1))

    with waiting(source) as coming:
        looked_after(sender, *coming)

    began = time.monotonic()
    asyncio.run(sender.publish(2))
    assert time.monotonic() - began >= 3.0

    monkeypatch.setattr(broadcast_sender, "ENGINE_WAIT_S", 3600.0)
    asyncio.run(asyncio.wait_for(sender.publish(3), 300))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "how"),
    [
        pytest.param("ASKED", signal.SIGKILL, marks=pytest.mark.slow),
        ("BUCKET", signal.SIGKILL),
        pytest.param("BUCKET", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_member_that_dies_or_hangs_costs_the_others_one_round(
    when, how, folder, sender, notes, monkeypatch
):
    is_heard_of = when == "BUCKET" and how == signal.SIGKILL  # its connections end at once
    for limit in ("JOIN_S", "BUCKET_S"):
        monkeypatch.setattr(broadcast_group, limit, 300.0 if is_heard_of else 15.0)

    asyncio.run(sender.begin(7))

    with member(asks, folder, when, how) as said:
        if when == "ASKED":
            said("ends")
        else:
            until(lambda: list((folder / "asks").glob("*.json")))

        with waiting(source := source_of(folder)) as coming:
            until(lambda: len(list((folder / "asks").glob("*.json"))) == 2)
            (lost,) = settled(sender, *coming)
            assert isinstance(lost.exception(), WeightsLostError)

        with waiting(source) as coming:
            (found,) = looked_after(sender, *coming)

        assert_has(found, 7, sender._model)
        assert len(notes) == 1 and "that sends version 7 to 2 engines" in notes[0]


@pytest.mark.slow
def test_an_engine_that_asks_and_never_joins_keeps_nobody_from_the_weights(
    folder, sender, notes, monkeypatch
):
    """As one behind a firewall. Once that is known it costs the others nothing."""
    monkeypatch.setattr(broadcast_group, "JOIN_S", 3.0)
    monkeypatch.setattr(broadcast_sender, "ENGINE_WAIT_S", 60.0)
    ended = threading.Event()

    def asks_alone():
        source = source_of(folder)
        while not ended.is_set():
            with suppress(WeightsNotSentError):
                source.incoming(source.latest_version(), ["cpu"])

    last = 4
    has = [-1]

    def follow():
        source = source_of(folder)
        found = (-1, {})
        while found[0] < last:
            with suppress(WeightsLostError):
                latest = source.latest_version()
                found = taken(source) if latest.version > found[0] else found
            has[0] = found[0]

        return found

    async def published(version):
        """And looked after until the good one has it; what was broken off by then."""
        await sender.publish(version)
        while has[0] < version:
            await sender.look_after()
            await asyncio.sleep(0.02)
        return dict(sender._failed_rounds)

    asyncio.run(sender.begin(0))
    with ThreadPoolExecutor(2) as threads:
        threads.submit(asks_alone)
        good = threads.submit(follow)
        try:
            until(lambda: len(list((folder / "asks").glob("*.json"))) == 2)
            broken = [asyncio.run(published(version)) for version in range(last + 1)]
        finally:
            ended.set()

        assert_has(good.result(300), last, sender._model)

    ((count, _),) = broken[-1].values()
    assert 2 <= count <= 3, "with the other one twice, then alone, and not again within a minute"


@pytest.mark.slow
def test_a_trainer_that_dies_in_the_middle_leaves_nothing_and_the_next_one_goes_on(folder, notes):
    with member(sends, folder) as said:
        said("published")
        source = source_of(folder)
        with pytest.raises(WeightsLostError):
            taken(source)
        said("ends")

    assert list((folder / "rounds").iterdir()), "a former trainer's round lies there"

    after = BroadcastSender(folder, Mixed(2), note=notes.append)
    with waiting(source) as coming:
        until(lambda: list((folder / "asks").glob("*.json")))
        asyncio.run(after.begin(1))
        (found,) = looked_after(after, *coming)

    assert_has(found, 1, after._model)
    assert not list((folder / "rounds").iterdir()) and notes == []


def test_a_bit_that_flips_on_the_way_is_found_and_told(folder, sender, notes, monkeypatch):
    real = broadcast_group.BroadcastGroup.broadcast
    flips = [True]

    def flipped(self, tensor):
        real(self, tensor)
        if threading.current_thread().name.startswith("engine") and flips and len(tensor) == BUCKET:
            flips.clear()
            tensor[7] ^= 1

    monkeypatch.setattr(broadcast_group.BroadcastGroup, "broadcast", flipped)
    asyncio.run(sender.begin(1))

    source = source_of(folder)
    with ThreadPoolExecutor(1, thread_name_prefix="engine") as threads:
        (lost,) = settled(sender, threads.submit(taken, source))
        assert "1 tensors did not arrive as they were sent, table first" in str(lost.exception())
        (found,) = looked_after(sender, threads.submit(taken, source))

    assert_has(found, 1, sender._model)
    assert len(notes) == 1 and "1 of 1 received other bits than were sent" in notes[0]


def test_who_comes_to_a_round_that_is_over_goes_at_once(folder, sender):
    """A worker of vLLM, say, which begins between two long steps of its model."""
    asyncio.run(sender.begin(1))
    sha256 = sender._latest.sha256
    given = IncomingWeights(
        str(folder), PlaceAnswer("a" * 32, sha256, "gloo", first_rank=1, world=2)
    )
    with pytest.raises(WeightsLostError, match="the round ended"):
        receive_place(given, 0, CPU)


def test_a_newer_version_is_asked_for_in_place_of_the_one_before(folder, sender, monkeypatch):
    monkeypatch.setattr(broadcast_sender, "ENGINE_WAIT_S", 0.1)
    asyncio.run(sender.begin(1))

    source = source_of(folder)
    with pytest.raises(WeightsNotSentError):
        source.read(1)

    before = source._request
    asyncio.run(sender.publish(2))
    with waiting(source) as coming:
        (found,) = looked_after(sender, *coming)

    assert_has(found, 2, sender._model)
    assert not (folder / "asks" / f"{before.id}.json").exists()


def test_buckets_have_every_byte_once_and_in_order():
    specs = {
        name: broadcast_group.Spec(tensor.dtype, tuple(tensor.shape))
        for name, tensor in trained_weights(Mixed(1)).items()
    }
    total = sum(spec.num_bytes for spec in specs.values())
    for most in (1, 7, 64, total - 1, total, total + 1):
        found = list(broadcast_group.buckets(specs, most))
        sizes = [sum(piece.end - piece.begin for piece in bucket) for bucket in found]
        assert sum(sizes) == total and max(sizes) <= most

        ends = dict.fromkeys(specs, 0)
        for piece in (piece for bucket in found for piece in bucket):
            assert piece.begin == ends[piece.name]
            ends[piece.name] = piece.end

        assert ends == {name: spec.num_bytes for name, spec in specs.items()}


@pytest.mark.parametrize(
    ("places", "backend"),
    [(["cpu", "cuda 1"], "gloo"), (["cuda 1", "cuda 1"], "gloo"), (["cuda 1", "cuda 2"], "nccl")],
)
def test_nccl_takes_cuda_devices_each_of_which_is_there_once(places, backend, monkeypatch):
    monkeypatch.setattr(broadcast_group.distributed, "is_nccl_available", lambda: True)
    assert broadcast_group.backend_of(places) == backend
    monkeypatch.setattr(broadcast_group.distributed, "is_nccl_available", lambda: False)
    assert broadcast_group.backend_of(places) == "gloo"
