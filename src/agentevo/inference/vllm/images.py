"""Shows images to vLLM.

vLLM gets the prompt's ids with one placeholder in place of each image, and the image's pixel
tensors, which come from the run's own processor: vLLM's would compute slightly other pixels than
training does. vLLM expands the placeholders, and its ids must be those of the prompt, token by
token, because the prompt's are trained. Its prefix cache and its cache of features know an image by
its digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from agentevo.errors import EngineError
from agentevo.inference.engine import CANT_SEE, refuse_images
from agentevo.inference.image_reader import RequestImageReader
from agentevo.types.image_span import ImageSpan
from agentevo.types.images import PromptImage

if TYPE_CHECKING:
    from agentevo.models.vision.processor import ProcessedImage, VisionProcessor


class VllmImages:
    """Makes vLLM's prompts of one engine. It belongs to one event loop."""

    def __init__(self, processor: VisionProcessor | None, llm: Any) -> None:
        """`processor`: None for a model that is shown no images. `llm`: vLLM's engine."""
        self._reader = None if processor is None else RequestImageReader(processor)
        self._processor: Any = None if processor is None else llm.renderer.get_mm_processor()

    async def prompt_of(
        self, ids: Sequence[int], images: Sequence[PromptImage], deadline_s: float
    ) -> Any:
        """vLLM's object for a prompt. Raises EngineError for images that don't belong to it, or
        that vLLM would show as other tokens, and DeadlineExceededError."""
        from vllm.inputs.engine import mm_input, tokens_input

        if self._reader is None:
            refuse_images(images, CANT_SEE)
            return tokens_input(list(ids))

        processed = await self._reader.read(ids, images, deadline_s)
        if not images:
            return tokens_input(list(ids))

        shown = [processed[image.span.digest] for image in images]
        expanded, items, places = self._expand(collapse(ids, [i.span for i in images]), shown)
        check_expanded(ids, expanded)
        digests = [image.digest for image in shown]
        return mm_input(expanded, items, {"image": digests}, {"image": places})

    def _expand(
        self, collapsed: list[int], images: Sequence[ProcessedImage]
    ) -> tuple[list[int], Any, list[Any]]:
        """What vLLM makes of ids with a placeholder per image: its ids, the images in its form, and
        the places of their tokens."""
        from vllm.multimodal.inputs import MultiModalKwargsItems
        from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems

        items = MultiModalKwargsItems({"image": [self._item_of(image) for image in images]})
        # Qwen's processors take the number of tokens from the pixels' grid, not from these.
        counted = MultiModalDataItems({"image": ImageProcessorItems([None] * len(images))})
        updates = self._processor._get_mm_prompt_updates(counted, {}, items)
        expanded, places = self._processor._apply_prompt_updates(collapsed, updates)
        return expanded, items, [place.to_range() for place in places["image"]]

    def _item_of(self, image: ProcessedImage) -> Any:
        from vllm.multimodal.inputs import MultiModalKwargsItems

        tensors: Any = dict(image.tensors)
        fields = self._processor._get_mm_fields_config(tensors, {})
        (item,) = MultiModalKwargsItems.from_hf_inputs(tensors, fields)["image"]
        return item


def collapse(ids: Sequence[int], spans: Sequence[ImageSpan]) -> list[int]:
    """The ids with the first token of each span in place of the span."""
    collapsed: list[int] = []
    end = 0
    for span in spans:
        collapsed += ids[end : span.offset + 1]
        end = span.end
    return collapsed + list(ids[end:])


def check_expanded(ids: Sequence[int], expanded: Sequence[int]) -> None:
    """Raises EngineError if vLLM's ids of a prompt with images are not the prompt's."""
    if list(ids) == list(expanded):
        return

    pairs = zip_longest(ids, expanded)
    place, (own, other) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
    raise EngineError(
        f"vLLM shows the prompt with images as {len(expanded)} tokens, and training as {len(ids)}: "
        f"token {place} is {other} at vLLM and {own} here, so the request is refused: use "
        "engine.type=torch, and report this with the model's name"
    )
