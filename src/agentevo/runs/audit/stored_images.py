"""Checks that every image which a task or trajectory names is in the store, with the bytes of its
digest."""

from __future__ import annotations

from agentevo.errors import StoreError
from agentevo.runs.audit.findings import Audit
from agentevo.store.store import Store


async def check_images(store: Store, report: Audit) -> None:
    """`report.images` has the images that are named. Those that nothing names are read too, because
    an attempt that is not written yet may name them."""
    try:
        stored = await store.image_digests()
    except StoreError as error:
        report.add(f"the images can't be read: {error}")
        return

    for digest in sorted(report.images.keys() - set(stored)):
        report.add(f"the image {digest} of {report.images[digest]} is missing")

    for digest in stored:
        try:
            await store.image(digest)
        except StoreError as error:
            report.add(str(error))

    report.stored_images = len(stored)
