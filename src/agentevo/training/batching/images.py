"""Brings the images of turns to samples and to the nodes of a batch, and makes their pixels again.

A sample has the spans of the images on its path. The files are given for each step
(`ImageProvider.hold`), and the run's processor makes the pixels from them again. They must be the
ones that the engine saw, so an attempt is left out of training if an image has no file or another
digest, if other settings made it, or if it has another grid or number of features now. Models do
not notice any of these, and some do not notice a missing feature.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from agentevo.errors import AgentEvoError, TrainingError
from agentevo.models.token_rows import causal_model
from agentevo.models.vision.keys import FeatureRows
from agentevo.models.vision.parts import processor_of
from agentevo.runtime.byte_cache import ByteCache
from agentevo.types import Sample, Trajectory, Turn, images_of_path
from agentevo.types.image_span import ImageSpan, feature_places, why_misplaced

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from agentevo.models.vision.processor import ProcessedImage, VisionProcessor
    from agentevo.types.images import ImageFile

PIXEL_BYTES = 2**30
"""The pixels that a provider keeps. Those of other images are made again for each pass."""
LEFT_OUT = "images"
"""The reason for which an attempt is dropped whose images can't be shown to the model again."""


def path_images(name: str, path: Sequence[Turn]) -> tuple[tuple[ImageSpan, ...], str]:
    """The images on a path of trajectory `name`, whose offsets count from the path's first token,
    and the fingerprint of the processor that made them. Raises TrainingError for several
    fingerprints."""
    fingerprints = sorted({turn.processor for turn in path if turn.images})
    if len(fingerprints) > 1:
        raise TrainingError(
            f"trajectory {name}: its images are from processors with the fingerprints "
            f"{', '.join(f'{value[:12]}...' for value in fingerprints)}: all turns of an attempt "
            "must be made with one"
        )
    return tuple(images_of_path(path)), "".join(fingerprints)


def spans_within(spans: Iterable[ImageSpan], start: int, stop: int) -> tuple[ImageSpan, ...]:
    """The images among the tokens `start` to `stop`, whose offsets count from `start`. An image
    that is not wholly there is left out."""
    return tuple(
        span.shifted(-start) for span in spans if start <= span.offset and span.end <= stop
    )


def admit(
    provider: ImageProvider | None, trajectories: Sequence[Trajectory]
) -> tuple[list[Trajectory], dict[str, str], list[str]]:
    """`ImageProvider.admit`; without a provider all trajectories."""
    return (list(trajectories), {}, []) if provider is None else provider.admit(trajectories)


class _Layout(NamedTuple):
    """What must be as it was when the engine saw an image, and the size of its pixels."""

    grid: tuple[int, ...]
    num_features: int
    num_patches: int


class ImageProvider:
    """The processed images of a run's policy, by digest."""

    def __init__(self, processor: VisionProcessor, config: PretrainedConfig) -> None:
        """`config`: the model's."""
        self.processor = processor
        patch: Any = config.vision_config.patch_size
        self._patch_area = int(np.prod(patch)) if isinstance(patch, (list, tuple)) else patch**2
        self._files: Mapping[str, ImageFile] = {}
        self._kept: ByteCache[str, ProcessedImage] = ByteCache(PIXEL_BYTES)
        self._layouts: dict[str, _Layout] = {}

    @classmethod
    def of(cls, model: PreTrainedModel) -> ImageProvider | None:
        """That of a model with a processor. None for a model that reads text only."""
        processor = processor_of(model)
        return None if processor is None else cls(processor, causal_model(model).config)

    def hold(self, files: Mapping[str, ImageFile]) -> None:
        """The files of the images of the next passes, by digest, instead of those before."""
        self._files = files

    def __getitem__(self, digest: str) -> ProcessedImage:
        """The pixels of an image. Raises TrainingError for an image without a file or whose file
        has another digest; ImageError for one that is damaged."""
        kept = self._kept.get(digest)
        if kept is not None:
            return kept

        self._check_present(digest)
        file = self._files[digest]
        if file.part.sha256 != digest or not file.is_intact:
            raise TrainingError(
                f"the file of the image {digest[:12]}... has another SHA-256: restore the run's "
                "store"
            )

        image = self.processor.process(file)
        self._kept.put(digest, image, image.num_bytes)
        return image

    def patches(self, digest: str) -> int:
        """The number of patches of an image that the vision tower reads."""
        return self._layout(digest).num_patches

    def positions(self, sample: Sample) -> np.ndarray:
        """[A, T] int64, see VisionProcessor.positions."""
        return self.processor.positions(len(sample.ids), sample.images)

    def admit(
        self, trajectories: Sequence[Trajectory]
    ) -> tuple[list[Trajectory], dict[str, str], list[str]]:
        """The trajectories whose images the model can be shown as the engine saw them, the ids of
        the others with the reason LEFT_OUT, and a message for the user. The pixels of each image
        are made."""
        wrong = {t.id: why for t in trajectories if (why := self._why_unusable(t))}
        if not wrong:
            return list(trajectories), {}, []

        name, why = next(iter(wrong.items()))
        message = (
            f"{len(wrong)} of {len(trajectories)} attempts are not trained on, because their "
            f"images can't be shown to the model as it saw them: {name}: {why}"
        )
        kept = [t for t in trajectories if t.id not in wrong]
        return kept, dict.fromkeys(wrong, LEFT_OUT), [message]

    def check(self, samples: Iterable[Sample]) -> None:
        """Raises TrainingError for a sample whose images can't be shown to the model."""
        for sample in samples:
            trained = sample.loss_mask
            if why := self._why_refused(sample.ids, trained, sample.images, sample.processor):
                raise TrainingError(f"sample of {sample.trajectory_id}: {why}")

    def _why_unusable(self, trajectory: Trajectory) -> str:
        for turn in trajectory.turns:
            ids = np.concatenate([turn.prompt_ids, turn.completion_ids]).astype(np.int64)
            sampled = np.arange(len(ids)) >= len(turn.prompt_ids)
            why = why_misplaced(turn.images, len(turn.prompt_ids))
            why = why or self._why_refused(ids, sampled, turn.images, turn.processor)
            if why:
                return f"turn {turn.index}: {why}"
        return ""

    def _why_refused(
        self, ids: np.ndarray, trained: np.ndarray, spans: Sequence[ImageSpan], fingerprint: str
    ) -> str:
        """Why the model can't be shown these tokens, or can't be trained on those where `trained`
        [T] bool is true; empty if it can."""
        if why := why_misplaced(spans, len(ids)):
            return why
        if spans and fingerprint != self.processor.fingerprint:
            return (
                f"its images are from a processor with the fingerprint {fingerprint[:12]}..., and "
                f"that of this run has {self.processor.fingerprint[:12]}...: start a new run"
            )

        is_feature = ids == self.processor.feature_id
        try:
            for span in spans:
                is_feature[feature_places(ids, span)] = False
                self._check_image(ids, span)
        except (AgentEvoError, ValueError) as error:
            return str(error)

        if is_feature.any():
            return (
                f"token {int(is_feature.argmax())} stands for a feature of an image, and no image "
                "is there"
            )

        places = np.flatnonzero(trained)
        for place, token in zip(places.tolist(), ids[places].tolist(), strict=True):
            if token in self.processor.vision_ids:
                return (
                    f"token {place} ({token}) stands for an image or a part of one, so it is never "
                    "sampled and has no log-prob"
                )
        return ""

    def _check_image(self, ids: np.ndarray, span: ImageSpan) -> None:
        """Raises ValueError unless the image that is made again has the tokens of the span."""
        layout = self._layout(span.digest)
        name = f"the image {span.digest[:12]}..."
        if layout.grid != tuple(span.grid):
            raise ValueError(f"{name} has the grid {layout.grid}, and had {span.grid}")

        num_places = len(feature_places(ids, span))
        if ids[span.offset] != self.processor.feature_id or layout.num_features != num_places:
            raise ValueError(
                f"{name} has {layout.num_features} features, and its tokens have places for "
                f"{num_places}"
            )

    def _check_present(self, digest: str) -> None:
        """Raises TrainingError if there is nothing to make the pixels of."""
        if digest not in self._kept and digest not in self._files:
            raise TrainingError(f"the image {digest[:12]}... is missing: restore the run's store")

    def _layout(self, digest: str) -> _Layout:
        self._check_present(digest)
        if digest not in self._layouts:
            image = self[digest]
            num_patches = math.prod(image.grid)
            if len(image.grid) == 1:  # padding of the pixels counts too
                num_patches = image.tensors["pixel_values"].numel() // (3 * self._patch_area)
            num_features = self.processor.count_features(image)
            self._layouts[digest] = _Layout(tuple(image.grid), num_features, num_patches)
        return self._layouts[digest]


@dataclass(frozen=True, eq=False)
class BatchImages:
    """The images of a batch of N nodes."""

    digests: list[str]
    """Those of the batch, in the order of their first node."""
    image_of_node: np.ndarray
    """[N] int64: the number of a feature node's image among `digests`; -1 for other nodes."""
    row_of_node: np.ndarray
    """[N] int64: the index of a feature node's feature in the image."""
    provider: ImageProvider

    def feature_rows(self, nodes: np.ndarray) -> list[FeatureRows]:
        """The features that a pass over these nodes reads, in its order."""
        nodes = nodes[self.image_of_node[nodes] >= 0]
        images, rows = self.image_of_node[nodes], self.row_of_node[nodes]
        cuts = np.flatnonzero((np.diff(images) != 0) | (np.diff(rows) != 1)) + 1
        borders = [0, *cuts.tolist(), len(nodes)] if len(nodes) else [0]
        return [
            FeatureRows(self.digests[images[start]], int(rows[start]), int(rows[stop - 1]) + 1)
            for start, stop in itertools.pairwise(borders)
        ]

    @property
    def processed(self) -> list[ProcessedImage]:
        """The pixels of `digests`."""
        return [self.provider[digest] for digest in self.digests]


def batch_images(
    samples: Sequence[Sample],
    paths: Sequence[np.ndarray],
    num_nodes: int,
    provider: ImageProvider | None,
) -> BatchImages | None:
    """The images of a batch. None if it has none. Raises TrainingError without a provider."""
    if not has_images(samples):
        return None
    if provider is None:
        name = next(sample.trajectory_id for sample in samples if sample.images)
        raise TrainingError(
            f"sample of {name} has images, and the model reads text only: choose a model with a "
            "vision tower and an image processor"
        )

    images: dict[str, int] = {}
    image_of_node = np.full(num_nodes, -1)
    row_of_node = np.zeros(num_nodes, dtype=np.int64)
    for sample, path in zip(samples, paths, strict=True):
        for span in sample.images:
            nodes = path[feature_places(sample.ids, span)]
            image_of_node[nodes] = images.setdefault(span.digest, len(images))
            row_of_node[nodes] = np.arange(len(nodes))

    numbers, firsts = np.unique(image_of_node[image_of_node >= 0], return_index=True)
    order = numbers[np.argsort(firsts)]
    place_of_number = np.append(np.argsort(order), -1)  # the last one is that of other nodes
    names = list(images)
    return BatchImages(
        [names[number] for number in order], place_of_number[image_of_node], row_of_node, provider
    )


def token_sizes(
    samples: Sequence[Sample], provider: ImageProvider | None
) -> list[np.ndarray] | None:
    """For each sample, what a token counts in the limit of a micro-batch [T] int64. None if every
    token counts one. A feature token counts one and the number of patches that the vision tower
    reads for it, rounded up. An image counts wherever it is computed, although a pass encodes it
    once."""
    if provider is None or not has_images(samples):
        return None

    sizes = []
    for sample in samples:
        size = np.ones(len(sample.ids), dtype=np.int64)
        for span in sample.images:
            places = feature_places(sample.ids, span)
            size[places] += -(-provider.patches(span.digest) // len(places))
        sizes.append(size)
    return sizes


def has_images(samples: Iterable[Sample]) -> bool:
    """Whether a sample has images."""
    return any(sample.images for sample in samples)
