"""Images in the store: once by digest, there before and as long as anything names them."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pictures import base64_of, file_of, huge_png, picture

from agentevo.errors import StoreError, UnusableStoreError
from agentevo.store import export_store, import_store, open_store
from agentevo.store.codec import content_digest, encode_trajectories
from agentevo.store.image_rows import (
    IMAGE_GRACE_S,
    MAX_IMAGE_BYTES,
    TOUCH_S,
    encode_image,
)
from agentevo.types import QUERY_MESSAGES, Message, Task, TextPart, Trajectory
from agentevo.types.image_span import ImageSpan
from agentevo.types.images import ImageFile, image_file

Make = Callable[..., Trajectory]
A, B, C = (image_file(file_of(picture(colour=(n, 0, 0))), "image/png") for n in range(3))
JPEG = image_file(file_of(picture(), "JPEG"), "image/jpeg")


def naming(make: Make, name: str, *images: ImageFile, **changes: Any) -> Trajectory:
    """An attempt whose first message has these images."""
    trajectory = make(name, **changes)
    parts = (TextPart("look"), *(image.part for image in images))
    turn = msgspec.structs.replace(trajectory.turns[0], messages=[Message("user", parts)])
    return msgspec.structs.replace(trajectory, turns=[turn, *trajectory.turns[1:]])


def asking(name: str, image: ImageFile) -> Task:
    content = [{"type": "image", "sha256": image.part.sha256}, {"type": "text", "text": "what?"}]
    chat = [{"role": "user", "content": content}]
    return Task(id=name, query="what?", metadata={QUERY_MESSAGES: chat})


def digests(*images: ImageFile) -> list[str]:
    return sorted(image.part.sha256 for image in images)


@pytest.mark.slow
def test_an_image_is_stored_once_and_read_back(url: str, make_trajectory: Make) -> None:
    async def scenario() -> None:
        async with await open_store(url) as store:
            assert await store.put_images([A, B, A, JPEG]) == 3
            assert await store.put_images([A, C]) == 1
            assert await store.image(A.part.sha256) == A
            assert await store.image(JPEG.part.sha256) == JPEG
            assert await store.image_digests() == digests(A, B, C, JPEG)
            wanted = [A.part.sha256, "beef", JPEG.part.sha256]
            assert await store.images(wanted) == {A.part.sha256: A, JPEG.part.sha256: JPEG}

            one = naming(make_trajectory, "one", A, B, A)
            two = naming(make_trajectory, "two", B)
            for _ in range(2):  # writing again changes nothing
                await store.write_trajectories([one, two], split="train", step=1)
            assert await store.image_digests(trajectory_id="one") == digests(A, B)
            assert await store.image_digests(trajectory_id="two") == digests(B)
            assert await store.image_digests(trajectory_id="none") == []
            assert await store.trajectory("one") == one

            with pytest.raises(UnusableStoreError, match="no image 'beef'"):
                await store.image("beef")
            named = [*digests(A, C, JPEG), "beef", A.part.sha256]
            assert await store.images(named) == {i.part.sha256: i for i in (A, C, JPEG)}
            assert await store.images([]) == {}

    asyncio.run(scenario())


def seeing(trajectory: Trajectory, *spans: ImageSpan, processor: str = "f" * 64) -> Trajectory:
    """An attempt whose first prompt has tokens of images, which no message names."""
    turn = msgspec.structs.replace(
        trajectory.turns[0], prompt_ids=[1, 2, 2, 3, 2, 2, 4], images=spans, processor=processor
    )
    return msgspec.structs.replace(trajectory, turns=[turn, *trajectory.turns[1:]])


def span_of(image: ImageFile, offset: int, *grid: int) -> ImageSpan:
    return ImageSpan(offset, 2, grid or (2,), image.part.sha256)


def test_the_tokens_of_images_are_stored_with_their_turn(
    url: str, make_trajectory: Make, tmp_path: Path
) -> None:
    """They count as content, their images are kept while the turn is, and an export has them."""
    told = seeing(make_trajectory("told"), span_of(A, 1), span_of(B, 4, 1, 2, 4))
    other = seeing(make_trajectory("told"), span_of(A, 1), span_of(C, 4, 1, 2, 4))
    copied = f"sqlite:///{tmp_path}/copy.sqlite"

    async def scenario() -> None:
        async with await open_store(url) as store:
            await store.put_images([A, B, C])
            await store.write_trajectories([told], split="train", step=1)
            assert await store.trajectory("told") == told
            assert await store.image_digests(trajectory_id="told") == digests(A, B)
            with pytest.raises(StoreError, match="other content"):
                await store.write_trajectories([other], split="train", step=1)
            await export_store(store, tmp_path / "all.jsonl")

        async with await open_store(copied) as store:
            await import_store(store, tmp_path / "all.jsonl")
            assert await store.trajectory("told") == told
            assert await store.image_digests(trajectory_id="told") == digests(A, B)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("spans", "processor", "message"),
    [
        ([span_of(A, 4), span_of(B, 1)], "f", "begins at token 1, before the end of the image"),
        ([span_of(A, 1), span_of(B, 2)], "f", "begins at token 2, before the end of the image"),
        ([span_of(A, 6)], "f", "the tokens 6 to 7, and there are 7: an image is never cut"),
        ([span_of(A, -1)], "f", "the tokens -1 to 0, and there are 7"),
        ([ImageSpan(1, 0, (2,), A.part.sha256)], "f", "an image is never cut"),
        ([span_of(A, 1, 2, 2)], "f", r"the grid \(2, 2\): give one or three sizes"),
        ([span_of(A, 1, 0)], "f", "sizes above 0"),
        ([ImageSpan(1, 2, (2,), "F" * 64)], "f", "'FFF.*: give the SHA-256 of its file"),
        ([span_of(A, 1)], "", "without the fingerprint of their processor"),
    ],
)
def test_tokens_of_images_that_can_not_be_are_refused(
    spans: list[ImageSpan], processor: str, message: str, make_trajectory: Make
) -> None:
    trajectory = seeing(make_trajectory("a"), *spans, processor=processor)
    with pytest.raises(StoreError, match=f"'a' can't be stored: turn 0: .*{message}"):
        encode_trajectories([trajectory], "train", 1)


def test_an_import_refuses_tokens_of_images_that_can_not_be(
    sqlite_url: str, make_trajectory: Make, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with await open_store(sqlite_url) as store:
            await store.put_images([A])
            told = seeing(make_trajectory("told"), span_of(A, 1))
            await store.write_trajectories([told], split="train", step=1)
            await export_store(store, tmp_path / "all.jsonl")

        text = (tmp_path / "all.jsonl").read_text()
        (tmp_path / "cut.jsonl").write_text(text.replace('"offset":1', '"offset":6'))
        async with await open_store(f"sqlite:///{tmp_path}/copy.sqlite") as store:
            with pytest.raises(StoreError, match="an image is never cut"):
                await import_store(store, tmp_path / "cut.jsonl")

    asyncio.run(scenario())


def test_the_digest_of_an_attempt_without_images_is_that_of_before(make_trajectory: Make) -> None:
    (encoded,) = encode_trajectories([make_trajectory("a")], "train", 1)
    assert encoded.digest.hex() == "f89818397c5c13487694d5d2a89e00d3"
    assert (
        content_digest(make_trajectory("a")).hex()
        == "b4e934e87e5294e6816034e088f5913f00bc4a57bb0fdb88c462ce2faab903dd"
    )


def test_a_row_whose_image_is_missing_is_refused(url: str, make_trajectory: Make) -> None:
    async def scenario() -> None:
        async with await open_store(url) as store:
            await store.put_images([A])
            good = naming(make_trajectory, "good", A)
            bad = naming(make_trajectory, "bad", A, B)
            with pytest.raises(StoreError, match=f"'bad' names the image {B.part.sha256}, which"):
                await store.write_trajectories([good, bad], split="train", step=1)
            with pytest.raises(StoreError, match=r"task 't' names .* put it first"):
                await store.add_tasks([asking("t", B)])

            assert [stored async for stored in store.trajectories()] == []
            await store.put_images([B])
            await store.write_trajectories([good, bad], split="train", step=1)
            await store.add_tasks([asking("t", B)])

    asyncio.run(scenario())


@pytest.mark.slow
def test_wrong_and_large_images_are_refused(sqlite_url: str) -> None:
    """The largest image is too slow for a test server of MongoDB on a busy machine."""

    async def scenario() -> None:
        async with await open_store(sqlite_url) as store:
            with pytest.raises(StoreError, match="its bytes have another SHA-256"):
                await store.put_images([msgspec.structs.replace(A, data=b"other")])

            largest = image_file(bytes(MAX_IMAGE_BYTES), "image/bmp")
            assert await store.put_images([largest]) == 1
            assert (await store.image(largest.part.sha256)).is_intact
            with pytest.raises(StoreError, match="at most 15,728,640"):
                await store.put_images([image_file(bytes(MAX_IMAGE_BYTES + 1), "image/bmp")])

    asyncio.run(scenario())


def test_the_largest_image_is_one_document_of_mongodb() -> None:
    bson = pytest.importorskip("bson")  # of pymongo
    row = encode_image(image_file(bytes(MAX_IMAGE_BYTES), "image/bmp"))
    assert 15_000_000 < len(bson.encode({**row, "put_at": 0.0})) < 16 * 2**20 - 2**14


def test_gc_deletes_what_nothing_names(url: str, make_trajectory: Make, clock: Any) -> None:
    async def scenario() -> None:
        async with await open_store(url, clock=clock) as store:
            await store.put_images([A, B, C, JPEG])
            await store.add_tasks([asking("t", JPEG)])
            await store.write_trajectories(
                [naming(make_trajectory, "old", A, task_id="t")], split="train", step=1
            )
            assert (await store.gc())["images"] == 0  # B and C were put a moment ago

            clock.steady += IMAGE_GRACE_S + 1
            await store.put_images([C])
            assert (await store.gc())["images"] == 1
            assert await store.image_digests() == digests(A, C, JPEG)

            await store.commit_step(1, {}, ids=[])
            await store.write_trajectories(
                [naming(make_trajectory, "new", C, A)], split="train", step=2
            )
            clock.steady += IMAGE_GRACE_S + 1
            assert (await store.gc())["images"] == 0
            await store.rewind(1)
            assert (await store.gc())["images"] == 1
            assert await store.image_digests() == digests(A, JPEG)

            await store.drop(["old"], "stale")
            assert (await store.gc(dropped=True))["images"] == 1
            assert await store.image_digests() == digests(JPEG)
            assert await store.image_digests(trajectory_id="old") == []

            await store.clear()
            assert await store.image_digests() == []

    asyncio.run(scenario())


def test_naming_an_image_keeps_it_from_gc(url: str, make_trajectory: Make, clock: Any) -> None:
    """An image that was put long ago is as safe as a new one once a row names it."""

    async def scenario() -> None:
        async with await open_store(url, clock=clock) as store:
            await store.put_images([A])
            clock.steady += TOUCH_S + 1
            await store.write_trajectories([naming(make_trajectory, "a", A)], split="train", step=1)
            await store.rewind(0)
            clock.steady += IMAGE_GRACE_S - 1
            assert (await store.gc())["images"] == 0
            clock.steady += 2
            assert (await store.gc())["images"] == 1

    asyncio.run(scenario())


def test_concurrent_puts_are_one_row(url: str) -> None:
    async def scenario() -> None:
        stores = [await open_store(url) for _ in range(4)]
        try:
            news = await asyncio.gather(
                *(store.put_images([A, B]) for store in stores for _ in range(3))
            )
            assert sum(news) == 2
            assert await stores[0].image_digests() == digests(A, B)
        finally:
            for store in stores:
                await store.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_export_and_import(url: str, make_trajectory: Make, tmp_path: Path) -> None:
    async def scenario() -> None:
        first = tmp_path / "first.jsonl.gz"
        async with await open_store(url) as store:
            await store.put_images([A, B, JPEG])
            await store.add_tasks([asking("t", B)])
            await store.write_trajectories(
                [naming(make_trajectory, "one", A, JPEG, task_id="t")], split="train", step=1
            )
            assert await export_store(store, first) == 5

        async with await open_store(f"sqlite:///{tmp_path / 'copy.sqlite'}") as copy:
            assert await import_store(copy, first) == 5
            assert await import_store(copy, first) == 0
            assert await copy.image(JPEG.part.sha256) == JPEG
            assert await copy.image_digests(trajectory_id="one") == digests(A, JPEG)
            second = tmp_path / "second.jsonl.gz"
            await export_store(copy, second)
            assert second.read_bytes() == first.read_bytes()

        lines = gzip.decompress(first.read_bytes()).splitlines()
        damaged = tmp_path / "damaged.jsonl"
        damaged.write_text(json.dumps(json.loads(lines[0]) | {"data": base64_of(C.data)}))
        without = tmp_path / "without.jsonl"
        without.write_bytes(b"\n".join(lines[3:]))
        async with await open_store(f"sqlite:///{tmp_path / 'other.sqlite'}") as other:
            with pytest.raises(StoreError, match="another SHA-256"):
                await import_store(other, damaged)
            with pytest.raises(StoreError, match="which is not in this store"):
                await import_store(other, without)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (image_file(huge_png(), "image/png"), "40,000 x 40,000 pixels"),
        (image_file(b"<script>alert(1)</script>", "image/png"), "which no image has"),
    ],
)
def test_an_import_refuses_bombs_and_what_is_no_image(
    image: ImageFile, why: str, sqlite_url: str, tmp_path: Path
) -> None:
    line = {
        "kind": "image",
        "sha256": image.part.sha256,
        "media_type": "image/png",
        "data": base64_of(image.data),
    }
    (tmp_path / "all.jsonl").write_text(json.dumps(line))

    async def scenario() -> None:
        async with await open_store(sqlite_url) as store:
            with pytest.raises(StoreError, match=f"image {image.part.sha256}.*{why}"):
                await import_store(store, tmp_path / "all.jsonl")
            assert await store.image_digests() == []

    asyncio.run(scenario())


def test_an_imported_image_has_the_type_of_its_content(sqlite_url: str, tmp_path: Path) -> None:
    line = {
        "kind": "image",
        "sha256": JPEG.part.sha256,
        "media_type": "text/html",
        "data": base64_of(JPEG.data),
    }
    (tmp_path / "all.jsonl").write_text(json.dumps(line))

    async def scenario() -> None:
        async with await open_store(sqlite_url) as store:
            assert await import_store(store, tmp_path / "all.jsonl") == 1
            assert await store.image(JPEG.part.sha256) == JPEG

    asyncio.run(scenario())
