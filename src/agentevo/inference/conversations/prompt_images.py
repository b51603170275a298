"""The images of a prompt, by the recorded turns: each engine request gets those of the whole
context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentevo.errors import BadRequestError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.types.image_span import ImageSpan
from agentevo.types.images import ImageFile, PromptImage, file_of


def with_files(
    spans: Sequence[ImageSpan], images: Mapping[str, ImageFile]
) -> tuple[PromptImage, ...]:
    """The images of these spans. Raises ImageError if a file is missing."""
    return tuple(PromptImage(span, file_of(span.digest, images)) for span in spans)


def check_no_images(ids: Sequence[int], chat: ChatFormat) -> None:
    """Raises BadRequestError for a prompt of token ids or plain text that has tokens of images:
    those are the same for every image, so they do not say which one is meant."""
    processor = chat.processor
    if processor is not None and processor.feature_id in ids:
        place = list(ids).index(processor.feature_id)
        raise BadRequestError(
            f"token {place} of the prompt is that of an image ({processor.family.feature}), and "
            "ids do not say which image: send messages with images"
        )
