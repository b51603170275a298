"""Images by digest, and where trajectories and tasks name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import chain
from typing import Any

import msgspec

from agentevo.errors import ImageError
from agentevo.types import QUERY_MESSAGES, ImagePart, Message, Sample, Task, Trajectory
from agentevo.types.image_span import ImageSpan


class ImageFile(msgspec.Struct, frozen=True):
    """An image as a message names it, with the bytes of its file."""

    part: ImagePart
    data: bytes

    @property
    def is_intact(self) -> bool:
        """Whether the bytes have the digest of the part."""
        return sha256(self.data).hexdigest() == self.part.sha256

    def __repr__(self) -> str:
        return f"<ImageFile {self.part.media_type}, {len(self.data):,} bytes, {self.part.sha256}>"


class PromptImage(msgspec.Struct, frozen=True):
    """An image in a prompt that an engine gets."""

    span: ImageSpan
    """Its tokens among the prompt's ids."""
    file: ImageFile


def image_file(data: bytes, media_type: str) -> ImageFile:
    """The image with these bytes, under their digest."""
    return ImageFile(ImagePart(sha256(data).hexdigest(), media_type), data)


def file_of(digest: str, images: Mapping[str, ImageFile]) -> ImageFile:
    """The image of this digest. Raises ImageError if it is missing."""
    file = images.get(digest)
    if file is None:
        raise ImageError(
            f"the image {digest[:12]}... of a message is missing: give its file with "
            "policy.add_image"
        )
    return file


def images_of_messages(messages: Iterable[Message]) -> Iterator[ImagePart]:
    """Every image that the messages name, in order and with repetitions."""
    for message in messages:
        if not isinstance(message.content, str):
            yield from (part for part in message.content if isinstance(part, ImagePart))


def images_of_trajectory(trajectory: Trajectory) -> dict[str, ImagePart]:
    """Maps a digest to the image, for every image that a message or a turn's tokens name, in the
    order of the first mention. An image that no message names has the default media type."""
    named: dict[str, ImagePart] = {}
    messages = [turn.messages for turn in trajectory.turns]
    messages += [turn.messages for turn in trajectory.remote_turns]
    in_prompts = (ImagePart(span.digest) for turn in trajectory.turns for span in turn.images)
    for part in chain(images_of_messages(chain.from_iterable(messages)), in_prompts):
        named.setdefault(part.sha256, part)
    return named


def images_of_samples(
    samples: Iterable[Sample], images: Mapping[str, ImageFile]
) -> dict[str, ImageFile]:
    """Those of the images that the samples show, by digest. Raises ImageError for one that is
    missing."""
    named = dict.fromkeys(span.digest for sample in samples for span in sample.images)
    return {digest: file_of(digest, images) for digest in named}


def images_of_task(task: Task) -> list[str]:
    """The digests of the images that the task's query names, each once."""
    messages: Any = task.metadata.get(QUERY_MESSAGES)
    digests: dict[str, None] = {}
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "image" and "sha256" in part:
                digests[str(part["sha256"])] = None
    return list(digests)
