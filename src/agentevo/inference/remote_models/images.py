"""The images of a request to a remote model, as its server gets them: in base64."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentevo.data.images import checked_header, decode_image, read_image
from agentevo.errors import BadRequestError
from agentevo.types import Message
from agentevo.types.images import ImageFile, images_of_messages

MOST_TOKENS_OF_IMAGE = 2**16
"""The most tokens that any known server counts for an image: OpenAI's gpt-4o-mini counts up to
36,835."""
_SENT = ("image/png", "image/jpeg", "image/webp", "image/gif")
"""The formats that both APIs take. Images of other formats are sent as PNG."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    media_type: str
    data: str
    """The file in base64."""

    @property
    def url(self) -> str:
        """The image as a data URL."""
        return f"data:{self.media_type};base64,{self.data}"


def encode_images(
    messages: Sequence[Message], images: Mapping[str, ImageFile]
) -> dict[str, EncodedImage]:
    """Maps a digest to the image, for every image that the messages name. Raises BadRequestError
    for an image that is not among `images`, or whose message can't have one."""
    for number, message in enumerate(messages, start=1):
        for part in images_of_messages([message]):
            where = f"message {number}"
            if message.role in ("system", "assistant"):
                raise BadRequestError(
                    f"{where}, of role {message.role}, has an image, which no API of a remote "
                    "model takes: put it into a message of role user"
                )
            if part.sha256 not in images:
                raise BadRequestError(
                    f"{where}: the file of the image {part.sha256[:12]}... is missing: give it "
                    "with policy.add_image, or as `images` of generate"
                )

    return {part.sha256: _encode(images[part.sha256]) for part in images_of_messages(messages)}


def most_prompt_tokens(
    body: bytes, messages: Sequence[Message], encoded: Mapping[str, EncodedImage]
) -> int:
    """A bound of the tokens of a prompt, whose request is `body`: a byte of text has at most
    one."""
    named = [encoded[part.sha256] for part in images_of_messages(messages)]
    num_bytes = sum(len(image.data) for image in named)
    return len(body) - num_bytes + MOST_TOKENS_OF_IMAGE * len(named)


def _encode(image: ImageFile) -> EncodedImage:
    """Raises ImageError for content that is no image."""
    where = f"the image {image.part.sha256[:12]}..."
    header = checked_header(image.data, where)
    if header.media_type not in _SENT:
        image = read_image(decode_image(image, where), where)
        return EncodedImage(image.part.media_type, base64.b64encode(image.data).decode())
    return EncodedImage(header.media_type, base64.b64encode(image.data).decode())
