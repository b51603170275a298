"""The images of an embedded engine's requests: pixel tensors, keys, positions and features.

A request's ids are keys (models/vision/keys.py), so the scheduler, sessions and shared prefixes
compare numbers, and prompts that differ only in an image share nothing from its first token on. The
code that builds a pass turns keys into what the model reads: ids, positions on the model's axes,
the type of each token, and the features of the images.

Each image is processed once (image_reader.py) and encoded alone and once, so its features don't
depend on the other images of a step. They stay in a cache under (version of the weights, digest),
without the version if no training and no adapter reaches tower and projector. A chunk of a prompt
may end inside an image, since its features are taken by rows. Models in which the tokens of an
image see each other compute an image in one pass (`fit_chunk`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from agentevo.errors import EngineError
from agentevo.inference.image_reader import RequestImageReader
from agentevo.models.token_rows import causal_model
from agentevo.models.vision.features import (
    ImageEncoder,
    ImageFeatures,
    position_ids,
)
from agentevo.models.vision.keys import ImageKeys
from agentevo.models.vision.parts import vision_may_change
from agentevo.models.vision.processor import ProcessedImage, VisionProcessor
from agentevo.runtime.byte_cache import ByteCache
from agentevo.types.image_span import ImageSpan
from agentevo.types.images import PromptImage

if TYPE_CHECKING:
    from agentevo.inference.embedded.scheduler import Sequence as EngineSequence

SHARE = 1 / 8
"""The most memory for features that no step needs now, as a share of the bytes of key-value
memory."""


class Stretch(NamedTuple):
    """Consecutive tokens of a sequence in a pass."""

    sequence: EngineSequence
    first: int
    length: int

    @property
    def keys(self) -> list[int]:
        return self.sequence.ids[self.first : self.first + self.length]


class EngineImages:
    """See the module."""

    def __init__(self, model: PreTrainedModel, processor: VisionProcessor, kv_bytes: int) -> None:
        """`kv_bytes`: the size of the engine's key-value memory."""
        self._processor = processor
        self._feature_id = processor.feature_id
        self._first_key = int(model.config.get_text_config().vocab_size)
        self._keys = ImageKeys(self._first_key)
        self._grids: dict[str, tuple[int, ...]] = {}
        self._reader = RequestImageReader(processor)
        self._features = ByteCache[tuple[int | None, str], ImageFeatures](int(SHARE * kv_bytes))
        self._device = next(model.parameters()).device
        self._model = model
        self._may_change = vision_may_change(model)
        self.sees_both_ways = sees_both_ways(model)
        """Whether the tokens of an image see each other."""
        self.encoded = 0
        """The number of images that the tower has encoded."""

    async def read(
        self, prompt_ids: Sequence[int], images: Sequence[PromptImage], deadline_s: float
    ) -> tuple[list[int], dict[str, ProcessedImage]]:
        """The keys of a prompt, and its images by digest. Does not await if there are none. Raises
        as RequestImageReader.read."""
        processed = await self._reader.read(prompt_ids, images, deadline_s)
        if self.sees_both_ways and prompt_ids[-1] == self._feature_id:
            raise EngineError(
                "the prompt ends inside an image, whose tokens see each other: end it after the "
                "token that closes the image"
            )
        if not images:
            return list(prompt_ids), {}

        self._grids |= {digest: image.grid for digest, image in processed.items()}
        return self._keys.intern(prompt_ids, [image.span for image in images]).tolist(), processed

    def fit_chunk(self, sequence: EngineSequence, count: int) -> int:
        """How many tokens a pass computes of a sequence that could have `count`: not a part of an
        image whose tokens see each other."""
        keys = sequence.ids
        first = sequence.cached
        end = first + count
        if not self.sees_both_ways or not self._cuts_image(keys, end):
            return count

        start = end
        while self._cuts_image(keys, start):
            start -= 1
        while start <= first and self._cuts_image(keys, end):
            end += 1
        return (start if start > first else end) - first

    def ids(self, keys: Sequence[int]) -> list[int]:
        """What the model reads in place of the keys."""
        ids: list[int] = self._keys.ids(keys).tolist()
        return ids

    def position_ids(self, rows: Sequence[Sequence[Stretch]]) -> torch.Tensor:
        """The positions of a pass over rows of stretches, padded on the right, as the model reads
        them: [B, L] int64, or [A, B, L] on several axes."""
        of_rows = [
            np.concatenate([self._positions_of(stretch) for stretch in row], axis=1) for row in rows
        ]
        width = max(positions.shape[1] for positions in of_rows)
        padded = [np.pad(row, ((0, 0), (0, width - row.shape[1]))) for row in of_rows]
        return position_ids(torch.as_tensor(np.stack(padded, axis=1), device=self._device))

    def features(
        self, stretches: Sequence[Stretch], model: PreTrainedModel, version: int
    ) -> list[ImageFeatures]:
        """What the model reads in the feature tokens of a pass, in their order. `version`: that of
        the model's weights."""
        runs = self._keys.features([key for stretch in stretches for key in stretch.keys])
        known: dict[str, ProcessedImage] = {}
        for stretch in stretches if runs else ():
            assert stretch.sequence.request is not None
            known |= stretch.sequence.request.images

        digests = dict.fromkeys(run.digest for run in runs)
        encoded = {digest: self._encode(known[digest], model, version) for digest in digests}
        return [encoded[run.digest].rows(run.start, run.stop) for run in runs]

    def types(self, rows: Sequence[Stretch]) -> torch.Tensor | None:
        """[B, T] int64: 1 for a feature token and 0 for others, for all tokens of each sequence up
        to the end of its stretch, because transformers looks them up by the place in the sequence.
        None where they don't decide who sees whom."""
        if not self.sees_both_ways or not any(
            key >= self._first_key for s in rows for key in s.keys
        ):
            return None

        ends = [stretch.first + stretch.length for stretch in rows]
        types = np.zeros((len(rows), max(ends)), dtype=np.int64)
        for row, stretch, end in zip(types, rows, ends, strict=True):
            row[:end] = np.asarray(stretch.sequence.ids[:end]) >= self._first_key
        return torch.as_tensor(types, device=self._device)

    def weights_changed(self) -> None:
        """Call this after weights were changed in place, or another adapter serves."""
        self._may_change = self._may_change or vision_may_change(self._model)
        if self._may_change:
            self._features.clear()

    def forget(self) -> None:
        """Drops all features and pixels that no request holds."""
        self._features.clear()
        self._reader.forget()

    def stats(self) -> dict[str, float]:
        """See Engine.stats."""
        return {
            "engine/encoded_images": self.encoded,
            "engine/image_bytes": self._features.num_bytes + self._reader.num_bytes,
        }

    def _encode(self, image: ProcessedImage, model: PreTrainedModel, version: int) -> ImageFeatures:
        key = (version if self._may_change else None, image.digest)
        features = self._features.get(key)
        if features is None:
            (features,) = ImageEncoder(model, self._processor).encode([image])
            size = sum(part.nbytes for part in (features.pooled, *features.levels))
            self._features.put(key, features, size)
            self.encoded += 1
        return features

    def _positions_of(self, stretch: Stretch) -> np.ndarray:
        """[A, count] int64"""
        request = stretch.sequence.request
        assert request is not None
        if request.positions is None:
            request.positions = self._positions_from_start(request.ids)

        known = request.positions
        size = known.shape[1] - 1
        end = stretch.first + stretch.length
        later = np.arange(max(stretch.first, size), max(end, size)) - size
        return np.concatenate([known[:, stretch.first : min(end, size)], known[:, -1:] + later], 1)

    def _positions_from_start(self, keys: Sequence[int]) -> np.ndarray:
        """[A, T + 1] int64: the positions of these tokens and of a text token after them."""
        length = len(keys) + 1
        merge = self._processor.family.merge
        if merge is None:
            return self._processor.positions(length, [])

        numbers = np.asarray(keys, dtype=np.int64)
        places = np.flatnonzero(numbers >= self._first_key)
        spans = []
        place = 0
        for run in self._keys.features(keys):
            grid = self._grids[run.digest]
            size = int(np.prod(grid)) // merge**2
            spans.append(ImageSpan(int(places[place]), size, grid, run.digest))
            place += run.stop - run.start

        end = max(length, spans[-1].end) if spans else length  # a prefix may end inside an image
        return self._processor.positions(end, spans)[:, :length]

    def _cuts_image(self, keys: Sequence[int], place: int) -> bool:
        """Whether the tokens before and at this place are features of one image."""
        return (
            0 < place < len(keys)
            and keys[place - 1] >= self._first_key
            and keys[place] == keys[place - 1] + 1
        )


def sees_both_ways(model: PreTrainedModel) -> bool:
    """Whether the tokens of an image see each other."""
    config = causal_model(model).config
    text = config.get_text_config()
    return (
        config.model_type == "gemma3"
        or getattr(text, "use_bidirectional_attention", None) == "vision"
    )
