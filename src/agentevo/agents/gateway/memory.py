"""The answers of one session that an API keeps, so that a client can name one instead of sending it
back. The memory is bounded: beyond its limits the oldest answers are dropped.

Answers of the Responses API that a session keeps: storing, listing and deleting them and their
inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from agentevo.agents.gateway.refusals import Refusal
from agentevo.errors import shown
from agentevo.models.chat.chat_format import num_characters
from agentevo.types import Message
from agentevo.types.images import ImageFile

MAX_KEPT = 10_000
"""Answers that one session keeps."""
MAX_CHARACTERS = 2**26
"""The maximum characters of all of them, with those of their images in base64."""


class Memory:
    """See the module. It belongs to the event loop of the gateway."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, int]] = {}
        self._num_characters = 0

    def keep(self, name: str, value: Any, num_characters: int) -> None:
        """Keeps a value of about so many characters under a name that is new."""
        self._kept[name] = (value, num_characters)
        self._num_characters += num_characters
        while len(self._kept) > MAX_KEPT or self._num_characters > MAX_CHARACTERS:
            oldest = next(iter(self._kept))
            self._num_characters -= self._kept.pop(oldest)[1]

    def forget(self, name: str) -> None:
        """Drops a kept name."""
        self._num_characters -= self._kept.pop(name)[1]

    def find(self, name: str) -> Any | None:
        """The value under the name; None if there is none, or it was dropped."""
        return self._kept.get(name, (None,))[0]


MAX_LISTED = 100
"""Items in one list."""


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """An answer with all before it."""

    history: tuple[Message, ...]
    body: dict[str, Any]
    input_items: tuple[dict[str, Any], ...]
    """The items of its input, each with an id."""


def keep(
    memory: Memory,
    history: tuple[Message, ...],
    body: dict[str, Any],
    raw_input: Any,
    images: Sequence[ImageFile] = (),
) -> None:
    """Keeps an answer, and its items for requests that refer to one. `raw_input`: its input, a text
    or items, which have the `images`."""
    name = body["id"]
    items = raw_input if isinstance(raw_input, list) else [{"role": "user", "content": raw_input}]
    response = KeptResponse(
        history,
        body,
        tuple(
            {"id": f"item_{name[5:]}_{n}", "type": "message", **item}
            for n, item in enumerate(items)
        ),
    )
    num_image_characters = sum(len(image.data) for image in images) * 4 // 3
    size = num_characters(history) + len(msgspec.json.encode(body)) + num_image_characters
    memory.keep(name, response, size)
    for item in body["output"]:
        memory.keep(item["id"], item, num_characters(history[-1:]))


def find_response(memory: Memory, name: str) -> KeptResponse:
    """The kept answer of that name. Raises Refusal if there is none."""
    response = memory.find(name)
    if not isinstance(response, KeptResponse):
        raise Refusal(
            f"response {shown(name)} is not found: it is not of this session, was sent with "
            "store=false, or is no longer kept",
            status=404,
            param="response_id",
        )

    return response


def forget(memory: Memory, name: str) -> dict[str, Any]:
    """Forgets the answer and its items. Raises Refusal if there is no such answer."""
    for item in find_response(memory, name).body["output"]:
        if memory.find(item["id"]) is not None:
            memory.forget(item["id"])
    memory.forget(name)
    return {"id": name, "object": "response.deleted", "deleted": True}


def input_items(memory: Memory, name: str, query: Mapping[str, str]) -> dict[str, Any]:
    """A list of its input items, the newest first unless `order` is asc; `after` an item, and
    `limit` of them. Raises Refusal."""
    order = query.get("order", "desc")
    limit = query.get("limit", "20")
    after = query.get("after")

    is_count = limit.isascii() and limit.isdigit() and len(limit) < 4
    if not is_count or not 1 <= int(limit) <= MAX_LISTED:
        raise Refusal(f"limit is {shown(limit)}: give 1 to {MAX_LISTED}", param="limit")
    if order not in ("asc", "desc"):
        raise Refusal(f"order is {shown(order)}: give asc or desc", param="order")

    items: Sequence[dict[str, Any]] = find_response(memory, name).input_items
    items = items if order == "asc" else items[::-1]
    if after is not None:
        place = next((n for n, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise Refusal(f"there is no item {shown(after)}: give an id of the list", param="after")
        items = items[place + 1 :]

    listed = items[: int(limit)]
    return {
        "object": "list",
        "data": list(listed),
        "first_id": listed[0]["id"] if listed else None,
        "last_id": listed[-1]["id"] if listed else None,
        "has_more": len(listed) < len(items),
    }
