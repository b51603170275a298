"""Numbers by which tokens are compared where images are among them.

The feature tokens of all images have the same id. The key of one is a number beyond the vocabulary
that stands for (digest, index of the feature in the image). The key of any other token is its id.
Equal keys mean equal tokens, so two sequences with different images differ from the first feature
token of the image that differs, and no common prefix of two sequences ends inside an image that
both have. One processor makes all images of a run, so equal keys also mean equal positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agentevo.errors import ModelError
from agentevo.types.image_span import ImageSpan, feature_places

MAX_KEY = 2**31 - 1


class FeatureRows(NamedTuple):
    """Consecutive features of one image."""

    digest: str
    start: int
    """The first one's index in the image."""
    stop: int
    """One past the last one."""


class ImageKeys:
    """Interned keys. The same digest has the same keys as long as the object lives."""

    def __init__(self, first: int) -> None:
        """`first`: the first key that is no id, such as the size of the vocabulary."""
        self._first = first
        self._next = first
        self._starts = np.zeros(0, dtype=np.int64)
        """The first key of each image, in ascending order."""
        self._digests: list[str] = []
        self._ids = np.zeros(0, dtype=np.int64)
        """The id of each image's feature tokens."""
        self._places: dict[str, tuple[int, int]] = {}
        """Digest -> the first key and the number of features."""

    def intern(self, ids: Sequence[int] | np.ndarray, spans: Sequence[ImageSpan]) -> np.ndarray:
        """[T] int32: the keys of a sequence of tokens. Raises ValueError for a span that does not
        fit its tokens, and for an image that has had another number of features."""
        keys = np.array(ids, dtype=np.int32)
        for span in spans:
            places = feature_places(keys, span)
            first = self._first_key(span.digest, len(places), int(keys[places[0]]))
            keys[places] = np.arange(first, first + len(places), dtype=np.int32)
        return keys

    def ids(self, keys: Sequence[int] | np.ndarray) -> np.ndarray:
        """[T] int64: the ids that the model reads."""
        ids = np.array(keys, dtype=np.int64)
        features = np.flatnonzero(ids >= self._first)
        if len(features):
            images = np.searchsorted(self._starts, ids[features], side="right") - 1
            ids[features] = self._ids[images]
        return ids

    def features(self, keys: Sequence[int] | np.ndarray) -> list[FeatureRows]:
        """The features that the model reads in the feature tokens among `keys`, in their order."""
        numbers = np.asarray(keys, dtype=np.int64)
        numbers = numbers[numbers >= self._first]
        if not len(numbers):
            return []

        images = np.searchsorted(self._starts, numbers, side="right") - 1
        rows = numbers - self._starts[images]
        cuts = np.flatnonzero((np.diff(images) != 0) | (np.diff(rows) != 1)) + 1
        borders = [0, *cuts.tolist(), len(numbers)]
        return [
            FeatureRows(self._digests[images[start]], int(rows[start]), int(rows[stop - 1]) + 1)
            for start, stop in itertools.pairwise(borders)
        ]

    def _first_key(self, digest: str, count: int, feature_id: int) -> int:
        if digest not in self._places:
            if self._next + count > MAX_KEY:
                raise ModelError(
                    f"the images of one process have more than {MAX_KEY - self._first:,} features: "
                    "start the run again, it resumes"
                )
            self._places[digest] = (self._next, count)
            self._starts = np.append(self._starts, self._next)
            self._digests.append(digest)
            self._ids = np.append(self._ids, feature_id)
            self._next += count

        first, known = self._places[digest]
        if known != count:
            raise ValueError(
                f"the image {digest[:12]}... has {count} feature tokens, and had {known} before: "
                "one processor makes all images of a run"
            )
        return first
