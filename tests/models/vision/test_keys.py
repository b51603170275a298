"""Two tokens have the same key exactly if the model reads the same there."""

from __future__ import annotations

import numpy as np
import pytest

from agentevo.errors import ModelError
from agentevo.models.vision import keys
from agentevo.models.vision.keys import FeatureRows, ImageKeys
from agentevo.types.image_span import ImageSpan

VOCABULARY = 100
PAD = 9
A, B = "a" * 64, "b" * 64


def test_images_are_compared_and_texts_keep_their_ids():
    table = ImageKeys(VOCABULARY)
    ids = [1, PAD, PAD, 2, PAD, PAD, PAD]
    first = table.intern(ids, [ImageSpan(1, 2, (2,), A), ImageSpan(4, 3, (3,), B)])
    assert first.tolist() == [1, 100, 101, 2, 102, 103, 104]
    assert table.intern([1, 2, 3], []).tolist() == [1, 2, 3]

    # The same image elsewhere has the same keys; another one has others from its first token.
    again = table.intern([5, *ids[4:], 1], [ImageSpan(1, 3, (3,), B)])
    assert again.tolist() == [5, 102, 103, 104, 1]
    assert table.intern(ids[:3], [ImageSpan(1, 2, (2,), "c" * 64)]).tolist() == [1, 105, 106]

    assert table.ids(first).tolist() == ids
    assert table.ids([1, 2, 3]).tolist() == [1, 2, 3]
    assert table.features(first) == [FeatureRows(A, 0, 2), FeatureRows(B, 0, 3)]
    assert table.features(first[2:6]) == [FeatureRows(A, 1, 2), FeatureRows(B, 0, 2)]
    assert table.features([101, 101, 102]) == [
        FeatureRows(A, 1, 2),
        FeatureRows(A, 1, 2),
        FeatureRows(B, 0, 1),
    ]
    assert table.features([1, 2]) == []


def test_tokens_between_tiles_keep_their_ids():
    table = ImageKeys(VOCABULARY)
    ids = [1, PAD, PAD, 7, PAD, PAD, 2]
    span = ImageSpan(1, 5, (4,), A)
    tiled = table.intern(ids, [span])
    assert tiled.tolist() == [1, 100, 101, 7, 102, 103, 2]
    assert table.ids(tiled).tolist() == ids
    assert table.features(tiled) == [FeatureRows(A, 0, 4)]


@pytest.mark.parametrize(
    ("ids", "span"),
    [
        ([1, PAD, PAD, 2], ImageSpan(1, 2, (3,), A)),
        ([1, PAD, 7, PAD], ImageSpan(1, 2, (2,), A)),
        ([1, PAD, 7, PAD], ImageSpan(1, 3, (1, 2, 6), A)),
        ([1, PAD, PAD, 2], ImageSpan(1, 2, (1, 3, 3), A)),
    ],
)
def test_a_span_that_is_not_of_its_tokens_is_refused(ids, span):
    with pytest.raises(ValueError, match="which do not fit its grid"):
        ImageKeys(VOCABULARY).intern(ids, [span])


def test_an_image_has_one_number_of_features():
    table = ImageKeys(VOCABULARY)
    table.intern([PAD, PAD], [ImageSpan(0, 2, (2,), A)])
    with pytest.raises(ValueError, match="3 feature tokens, and had 2 before"):
        table.intern([PAD] * 3, [ImageSpan(0, 3, (3,), A)])


def test_keys_end_at_the_largest_number_that_prefixes_can_sort(monkeypatch):
    monkeypatch.setattr(keys, "MAX_KEY", VOCABULARY + 3)
    table = ImageKeys(VOCABULARY)
    table.intern(np.array([PAD, PAD]), [ImageSpan(0, 2, (2,), A)])
    with pytest.raises(ModelError, match="have more than 3 features"):
        table.intern([PAD, PAD], [ImageSpan(0, 2, (2,), B)])
