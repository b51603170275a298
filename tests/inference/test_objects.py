"""One object of a store: whole or not at all, whoever writes while somebody reads."""

import itertools
import threading
import time

import pytest

from agentevo.inference.weights.objects import Objects

PATH = "engines/one.json"


@pytest.fixture
def store(tmp_path):
    return Objects(f"file://{tmp_path}/bucket")


def before(monkeypatch, files, kind, act):
    """`act(number)` is called before each call of one kind."""
    real = getattr(files, kind)
    numbers = itertools.count()

    def call(*args, **given):
        act(next(numbers))
        return real(*args, **given)

    monkeypatch.setattr(files, kind, call)


def test_a_local_object_is_replaced_at_once(store, tmp_path, monkeypatch):
    reader = Objects(store.url)
    store.put(PATH, b"old")
    real = store.files.pipe_file

    def slowly(place, content):
        for end in range(len(content) + 1):
            real(place, content[:end])
            assert reader.get(PATH) == b"old" and set(reader.under("engines")) == {"one.json"}

    monkeypatch.setattr(store.files, "pipe_file", slowly)
    store.put(PATH, b"what is newer")
    assert reader.get(PATH) == b"what is newer"
    assert [path.name for path in (tmp_path / "bucket/engines").iterdir()] == ["one.json"]


def test_a_write_that_breaks_off_leaves_the_old_object_and_nothing_else(
    store, tmp_path, monkeypatch
):
    store.put(PATH, b"old")
    real = store.files.pipe_file
    monkeypatch.setattr(store.files, "pipe_file", lambda place, content: real(place, content[:-1]))
    with pytest.raises(OSError, match="2 of 3 bytes have arrived"):
        store.put(PATH, b"new")
    assert store.get(PATH) == b"old"
    assert [path.name for path in (tmp_path / "bucket/engines").iterdir()] == ["one.json"]


def test_an_object_that_is_written_anew_while_it_is_read_is_read_again(store, monkeypatch):
    store.put(PATH, b"")
    writer = Objects(store.url)
    writes = {0: b"longer", 1: b"longest"}
    before(
        monkeypatch,
        store.files,
        "cat_file",
        lambda number: number in writes and writer.put(PATH, writes[number]),
    )
    assert store.get(PATH) == b"longest"


def test_a_download_that_falls_short_is_refused(store, monkeypatch):
    store.put(PATH, b"whole")
    real = store.files.cat_file
    monkeypatch.setattr(store.files, "cat_file", lambda place: real(place)[:-1])
    with pytest.raises(OSError, match="4 of 5 bytes have arrived"):
        store.get(PATH)


def test_an_object_that_never_keeps_still_is_given_up_in_time(tmp_path, monkeypatch):
    store = Objects(f"file://{tmp_path}/bucket", call_s=0.2)
    writer = Objects(store.url)
    writer.put(PATH, b"")
    before(
        monkeypatch,
        store.files,
        "cat_file",
        lambda number: writer.put(PATH, b"x" * (number + 1)),
    )
    started = time.monotonic()

    with pytest.raises(OSError, match="rewritten during each download"):
        store.get(PATH)

    assert time.monotonic() - started < 50


@pytest.mark.slow
def test_readers_beside_writers_meet_whole_objects_only(store):
    """Two writers and a reader, in threads, as an engine's beat and a sampler's look are."""
    contents = [b"a" * 10, b"b" * 3000]
    store.put(PATH, contents[0])
    ended = threading.Event()

    def write(content):
        writer = Objects(store.url)
        while not ended.is_set():
            writer.put(PATH, content)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in writers:
        thread.start()

    try:
        assert {store.get(PATH) for _ in range(150)} <= set(contents)
    finally:
        ended.set()
        for thread in writers:
            thread.join()
