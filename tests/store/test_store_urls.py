"""URLs that are none."""

from __future__ import annotations

import asyncio

import pytest

from agentevo.errors import StoreError
from agentevo.store import open_store


@pytest.mark.parametrize(
    "url",
    ["me:s3cret@db.example.org/training", "postgresql://me:s3cret@db.example.org:port/training"],
)
def test_no_message_shows_a_password(url: str) -> None:
    with pytest.raises(StoreError, match=r"is not the URL of .*postgresql://") as raised:
        asyncio.run(open_store(url))
    shown = str(raised.value) + str(raised.value.__cause__)
    assert "me:***@db.example.org" in shown
    assert "s3cret" not in shown
