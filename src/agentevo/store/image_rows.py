"""Images in the store: one row for the bytes of an image, whoever names it, and one row for each
task or trajectory that names it.

    images       id (the SHA-256 of the bytes, in hexadecimal), media_type, put_at, data
    image_uses   kind (`task` or `trajectory`), owner (its id), image (an id)

An image is put before the row that names it is written, and a row that names an image that is not
in the store is refused. `gc` deletes the images that nothing names. It keeps those that were put
within IMAGE_GRACE_S seconds, because their rows may not be written yet. Naming an image that was
put longer ago than TOUCH_S renews its `put_at`. So on every database, either the deletion or the
naming of an image is refused or repeated, and no row names an image that is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from agentevo.errors import StoreError, UnusableStoreError
from agentevo.store.clock import CLOCK_TOLERANCE_S
from agentevo.store.damage_errors import readable
from agentevo.store.database_rows import CHUNK, Condition, DatabaseRows, Row, chunks
from agentevo.types import ImagePart
from agentevo.types.images import ImageFile

Owner = Literal["task", "trajectory"]

MAX_IMAGE_BYTES = 15 * 2**20
"""A document of MongoDB has at most 16 MB."""
MAX_BATCH_BYTES = 2**20
"""The images that are written in one transaction have at most so many bytes, unless it is one."""
IMAGE_PAGE = 32
"""The images that are read in one transaction."""
IMAGE_GRACE_S = 3600.0
TOUCH_S = 600.0


def encode_image(image: ImageFile) -> dict[str, Any]:
    """The row of an image, without `put_at`. Raises StoreError for bytes with another digest, and
    for too many of them."""
    name = image.part.sha256
    if not image.is_intact:
        raise StoreError(f"image {name}: its bytes have another SHA-256: read the image again")
    if len(image.data) > MAX_IMAGE_BYTES:
        raise StoreError(
            f"image {name} has {len(image.data):,} bytes, and a store keeps at most "
            f"{MAX_IMAGE_BYTES:,} of an image: make it smaller"
        )
    return {"id": name, "media_type": image.part.media_type, "data": image.data}


@readable("image")
def decode_image_row(row: Mapping[Any, Any]) -> ImageFile:
    """Raises UnusableStoreError for bytes that are not those of the digest."""
    image = ImageFile(ImagePart(row["id"], row["media_type"]), bytes(row["data"]))
    if not image.is_intact:
        raise StoreError("its bytes have another SHA-256: restore the store from a copy")
    return image


def decode_intact_images(rows: Iterable[Mapping[Any, Any]]) -> dict[str, ImageFile]:
    """Digest -> image, without those that `decode_image_row` refuses."""
    images = {}
    for row in rows:
        with suppress(UnusableStoreError):
            image: ImageFile = decode_image_row(row)
            images[image.part.sha256] = image
    return images


def batches(images: Iterable[Row]) -> Iterator[list[Row]]:
    """Different images, in lists that a transaction of any database holds."""
    batch: list[Row] = []
    num_bytes = 0
    for image in {image["id"]: image for image in images}.values():
        size = len(image["data"])
        if batch and (len(batch) == CHUNK or num_bytes + size > MAX_BATCH_BYTES):
            yield batch
            batch = []
            num_bytes = 0
        batch.append(image)
        num_bytes += size
    if batch:
        yield batch


async def put_batch(rows: DatabaseRows, images: Sequence[Row]) -> int:
    """Inserts the images, and renews `put_at` of those that are there. Returns the number of new
    ones."""
    now = (await rows.now()).steady
    stored = await rows.by_key("images", "id", [image["id"] for image in images], "put_at")
    await _touch(rows, stored.values(), now)
    new = [{**image, "put_at": now} for image in images if image["id"] not in stored]
    if new:
        await rows.insert("images", new)
    return len(new)


async def find_images(rows: DatabaseRows, digests: Sequence[str]) -> Sequence[Row]:
    """The rows of those images that are in the store."""
    return await rows.find("images", where=[("id", "in", digests)])


async def use_images(rows: DatabaseRows, kind: Owner, uses: Mapping[str, Sequence[str]]) -> None:
    """Records which images new rows name. `uses` maps the id of a row to different digests. Refuses
    an image that is not in the store."""
    named = {digest: owner for owner, digests in uses.items() for digest in digests}
    if not named:
        return

    stored = await rows.by_key("images", "id", named, "put_at")
    for digest, owner in named.items():
        if digest not in stored:
            raise StoreError(
                f"{kind} {owner!r} names the image {digest}, which is not in this store: put it "
                "first (put_images)"
            )

    await _touch(rows, stored.values(), (await rows.now()).steady)
    await rows.insert(
        "image_uses",
        [
            {"kind": kind, "owner": owner, "image": digest}
            for owner, digests in uses.items()
            for digest in digests
        ],
    )


async def forget_uses(rows: DatabaseRows, kind: Owner, owners: Iterable[str]) -> None:
    """For rows that no longer name images, because they or their turns are deleted."""
    for chunk in chunks(owners):
        await rows.delete("image_uses", [("kind", "=", kind), ("owner", "in", chunk)])


async def find_digests(rows: DatabaseRows, trajectory_id: str | None) -> list[str]:
    """The digests of all images, or of those that a trajectory names, in order."""
    if trajectory_id is None:
        return [row["id"] for row in await rows.find("images", ["id"], order="id")]

    named: list[Condition] = [("kind", "=", "trajectory"), ("owner", "=", trajectory_id)]
    return sorted(row["image"] for row in await rows.find("image_uses", ["image"], named))


async def delete_unused_images(rows: DatabaseRows, after: str | None) -> tuple[int, str | None]:
    """Deletes the images that nothing names, of the next CHUNK by id. See cleanup.py."""
    now = (await rows.now()).steady
    where: list[Condition] = [] if after is None else [("id", ">", after)]
    page = await rows.find("images", ["id", "put_at"], where, order="id", limit=CHUNK)
    unused = []
    for row in page:
        is_recent = _is_recent(row, now, IMAGE_GRACE_S)
        if not is_recent and not await rows.find(
            "image_uses", ["image"], [("image", "=", row["id"])], limit=1
        ):
            unused.append(row["id"])

    deleted = await rows.delete("images", [("id", "in", unused)]) if unused else 0
    return deleted, page[-1]["id"] if len(page) == CHUNK else None


async def _touch(rows: DatabaseRows, stored: Iterable[Row], now: float) -> None:
    old = [row["id"] for row in stored if not _is_recent(row, now, TOUCH_S)]
    for chunk in chunks(old):
        await rows.update("images", [("id", "in", chunk)], {"put_at": now})


def _is_recent(row: Row, now: float, within_s: float) -> bool:
    """A time in the future comes from before a restart of the machine."""
    return bool(-CLOCK_TOLERANCE_S <= now - row["put_at"] <= within_s)
