"""Reads the images of engine requests: checks that they belong to the prompt, and makes their pixel
tensors. Each image is processed once, off the event loop, also for requests that come together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from agentevo.errors import DeadlineExceededError, EngineError, ImageError
from agentevo.inference.engine import check_images
from agentevo.models.vision.processor import ProcessedImage, VisionProcessor
from agentevo.runtime.event_loop import in_thread
from agentevo.types.image_span import ImageSpan, feature_places
from agentevo.types.images import ImageFile, PromptImage

INLINE_BYTES = 2**16
"""Files of so many bytes are hashed in less time than a thread needs to begin."""


class RequestImageReader:
    """See the module. It belongs to one event loop."""

    def __init__(self, processor: VisionProcessor) -> None:
        self._processor = processor
        self._processing: dict[str, asyncio.Task[ProcessedImage]] = {}

    @property
    def num_bytes(self) -> int:
        """The size of the pixel tensors that are kept."""
        return self._processor.pixel_bytes

    async def read(
        self, prompt_ids: Sequence[int], images: Sequence[PromptImage], deadline_s: float
    ) -> dict[str, ProcessedImage]:
        """The images of a prompt, by digest. Does not await if there are none. Raises EngineError
        for spans, ids and files that don't belong together, DeadlineExceededError for images that
        aren't processed in time."""
        check_images(prompt_ids, images)
        spans = [image.span for image in images]
        self._check_features(prompt_ids, spans)
        if not images:
            return {}

        try:
            async with asyncio.timeout(deadline_s):
                files = {image.span.digest: image.file for image in images}
                await _check_bytes([image.file for image in images])
                processed = {digest: await self._process(files[digest]) for digest in files}
        except TimeoutError:
            raise DeadlineExceededError(
                f"the request's images were not processed within {deadline_s:g} s: raise "
                "engine.timeout_s, or show fewer or smaller images"
            ) from None

        numbers = np.asarray(prompt_ids, dtype=np.int64)
        for span in spans:
            image = processed[span.digest]
            facts = (image.grid, self._processor.count_features(image))
            stated = (span.grid, len(feature_places(numbers, span)))
            if stated != facts:
                raise EngineError(
                    f"the image {span.digest[:12]}... has the grid {facts[0]} and {facts[1]} "
                    f"features, and its span has {stated[0]} and {stated[1]}: make prompts with "
                    "the processor of this model and these settings"
                )
        return processed

    def forget(self) -> None:
        """Drops all pixels that no request holds."""
        self._processor.forget_pixels()

    def _check_features(self, ids: Sequence[int], spans: Sequence[ImageSpan]) -> None:
        """Raises EngineError if the feature tokens are not those of the spans. No model notices
        each such mistake."""
        feature_id = self._processor.feature_id
        feature = self._processor.family.feature
        numbers = np.asarray(ids, dtype=np.int64)
        total = int(np.count_nonzero(numbers == feature_id))
        for span in spans:
            if ids[span.offset] != feature_id:
                raise EngineError(
                    f"the image {span.digest[:12]}... begins at token {span.offset}, which is "
                    f"{ids[span.offset]} and not {feature} ({feature_id}): make prompts with the "
                    "processor of this model"
                )
            try:
                total -= len(feature_places(numbers, span))
            except ValueError as error:
                raise EngineError(f"{error}: make prompts with the model's processor") from error

        if total:
            raise EngineError(
                f"the prompt has {total} tokens {feature} outside of its images: give the image of "
                "each"
            )

    async def _process(self, file: ImageFile) -> ProcessedImage:
        digest = file.part.sha256
        known = self._processor.kept_image(digest)
        if known is not None:
            return known

        task = self._processing.get(digest)
        if task is None:
            task = asyncio.ensure_future(in_thread(self._processor.process, file))
            self._processing[digest] = task
            task.add_done_callback(lambda done: self._end_processing(digest, done))
        try:
            return await asyncio.shield(task)  # another request may wait for it
        except ImageError as error:
            raise EngineError(str(error)) from error

    def _end_processing(self, digest: str, task: asyncio.Task[ProcessedImage]) -> None:
        del self._processing[digest]
        if not task.cancelled():
            task.exception()  # whoever waits for the task raises it


async def _check_bytes(files: Sequence[ImageFile]) -> None:
    """Raises EngineError for a file with another digest. Large files are read on a thread."""
    if sum(len(file.data) for file in files) <= INLINE_BYTES:
        damaged = _find_damaged(files)
    else:
        damaged = await in_thread(_find_damaged, files)

    if damaged is not None:
        raise EngineError(
            f"the image {damaged.part.sha256[:12]}... has bytes of another SHA-256: send the file "
            "that its digest names"
        )


def _find_damaged(files: Sequence[ImageFile]) -> ImageFile | None:
    return next((file for file in files if not file.is_intact), None)
