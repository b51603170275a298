"""One engine step as tensors: the new tokens of its sequences, the cache positions of their keys,
and the rows of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from agentevo.inference.embedded.cache_attention import CacheAttention
from agentevo.inference.embedded.cache_rows import CacheRows, NewTokens
from agentevo.inference.embedded.images import EngineImages, Stretch
from agentevo.inference.embedded.kv_cache import KVCache
from agentevo.inference.embedded.routing import record, recording_of
from agentevo.inference.embedded.scheduler import Sequence
from agentevo.models.compute.routers import Routers
from agentevo.models.vision.features import image_arguments

MAX_CHUNK = 512
"""The maximum number of new tokens of one sequence in a step. It limits the size of the attention
mask."""


class StepWork(Protocol):
    """A step: which tokens of which sequences it computes, and how."""

    work: list[tuple[Sequence, int]]
    """(sequence, number of its tokens that this step computes) pairs."""
    sampled: list[Sequence]
    """Sequences whose next token is sampled, because this step computes their last token."""
    scored: list[tuple[Sequence, int]]
    """(sequence, number of its given tokens that this step scores) pairs."""

    def logits(self, model: PreTrainedModel, version: int) -> torch.Tensor:
        """The logits [sampled + scored, V], by the model of that version of the weights."""
        ...


@dataclass
class StepBatch:
    """A StepWork: inputs of one forward pass over the new tokens of several sequences, in a row."""

    work: list[tuple[Sequence, int]]
    input_ids: torch.Tensor
    """[1, T]"""
    position_ids: torch.Tensor
    """[1, T]"""
    plan: CacheAttention
    sampled: list[Sequence]
    scored: list[tuple[Sequence, int]]
    logit_rows: torch.Tensor
    """Positions in the token row whose logits are needed: first those of `sampled`, then those of
    `scored`."""
    images: EngineImages | None = None
    """Those of the engine, if its model can be shown some."""
    routers: Routers | None = None
    """The routers whose choices are recorded, if any."""

    def logits(self, model: PreTrainedModel, version: int) -> torch.Tensor:
        """See StepWork.logits."""
        images = self.images
        shown: dict[str, Any] = {}
        if images is not None:
            row = [Stretch(sequence, sequence.cached, count) for sequence, count in self.work]
            keys = [key for stretch in row for key in stretch.keys]
            self.input_ids = torch.tensor([images.ids(keys)], device=self.input_ids.device)
            self.position_ids = images.position_ids([row])
            shown = image_arguments(model, self.input_ids, images.features(row, model, version))

        self.plan.routing = recording = recording_of(self, self.routers)
        outputs: Any = model(
            input_ids=self.input_ids,
            position_ids=self.position_ids,
            use_cache=False,
            plan=self.plan,
            logits_to_keep=self.logit_rows,
            **shown,
        )
        if recording is not None:
            record(self, recording)

        logits: torch.Tensor = outputs.logits[0]
        return logits


def choose_work(running: list[Sequence], prefill_tokens: int) -> list[tuple[Sequence, int]]:
    """Chooses how many tokens of each sequence a step computes. A sequence that needs one token
    always gets that token. Sequences that need more share `prefill_tokens`, first come first
    served."""
    work = []
    remaining = prefill_tokens
    for sequence in running:
        missing = len(sequence.ids) - sequence.cached
        count = 1 if missing == 1 else min(missing, MAX_CHUNK, remaining)
        if count > 0:
            work.append((sequence, count))
            remaining -= count if missing > 1 else 0

    return work


def build_batch(
    cache: KVCache,
    work: list[tuple[Sequence, int]],
    device: torch.device,
    images: EngineImages | None = None,
    routers: Routers | None = None,
) -> StepBatch:
    """Builds the inputs of a step. Sequences are sorted by slot, because a view of adjacent slots
    needs no copy. `images` and `routers`: see StepBatch."""
    work = sorted(work, key=lambda item: item[0].slot)
    ids = [token for s, n in work for token in s.ids[s.cached : s.cached + n]]
    counts = np.array([n for _, n in work])
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    cached = np.array([s.cached for s, _ in work])
    offsets = np.array([s.offset for s, _ in work])
    slots = np.array([s.slot for s, _ in work])
    index_in_sequence = np.arange(len(ids)) - np.repeat(starts, counts)
    positions = np.repeat(cached, counts) + index_in_sequence
    cache_positions = positions - np.repeat(offsets, counts)

    def tensor(array: np.ndarray | list[int]) -> torch.Tensor:
        return torch.as_tensor(np.asarray(array, dtype=np.int64), device=device)

    lengths = cached + counts - offsets
    rows = [
        _rows(bucket, work[bucket[0]][0], slots, starts, counts, lengths, tensor, cache.num_slots)
        for bucket in _buckets([(id(s.segment), n) for s, n in work])
    ]
    sampled_indices = [
        index
        for index, (s, n) in enumerate(work)
        if s.cached + n == len(s.ids)
        and s.request is not None
        and s.request.future is not None
        and s.request.scored is None
    ]
    scored, predicting = _sequences_to_score(work, starts)

    return StepBatch(
        work=work,
        input_ids=tensor(ids).unsqueeze(0),
        position_ids=tensor(positions).unsqueeze(0),
        plan=CacheAttention(cache, tensor(np.repeat(slots, counts)), tensor(cache_positions), rows),
        sampled=[work[index][0] for index in sampled_indices],
        scored=scored,
        logit_rows=tensor(
            [
                *(starts[sampled_indices] + counts[sampled_indices] - 1 if sampled_indices else ()),
                *predicting,
            ]
        ),
        images=images,
        routers=routers,
    )


def _sequences_to_score(
    work: list[tuple[Sequence, int]], starts: np.ndarray
) -> tuple[list[tuple[Sequence, int]], list[int]]:
    """The sequences whose given tokens this step scores, how many tokens of each, and the positions
    in the token row that predict them."""
    scored: list[tuple[Sequence, int]] = []
    rows: list[int] = []
    for (sequence, count), start in zip(work, starts.tolist(), strict=True):
        request = sequence.request
        if request is None or request.scored is None:
            continue
        first = max(request.num_context - 1 - sequence.cached, 0)
        if first < count:
            scored.append((sequence, count - first))
            rows += range(start + first, start + count)

    return scored, rows


def _buckets(kinds: list[tuple[int, int]]) -> list[np.ndarray]:
    """Groups sequences, given by their segments and numbers of tokens, into buckets of indices. All
    sequences in a bucket have the same segment, and none is padded to more than about twice its
    tokens. Sequences with a single token have their own bucket."""
    order = sorted(range(len(kinds)), key=lambda index: kinds[index])
    buckets: list[list[int]] = []
    for index in order:
        segment, count = kinds[index]
        if buckets:
            first_segment, first_count = kinds[buckets[-1][0]]
            if (
                segment == first_segment
                and count <= 2 * first_count
                and (count == 1) == (first_count == 1)
            ):
                buckets[-1].append(index)
                continue
        buckets.append([index])

    return [np.sort(np.array(bucket)) for bucket in buckets]


def _rows(
    bucket: np.ndarray,
    first_sequence: Sequence,
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    lengths: np.ndarray,
    tensor: object,
    num_slots: int,
) -> CacheRows:
    """The attention rows of one bucket. `lengths`: the number of keys in each slot after the
    step."""
    assert callable(tensor)

    first = int(slots[bucket[0]])
    last = int(slots[bucket[-1]])
    num_slots_spanned = last - first + 1
    is_dense = num_slots_spanned <= 1.25 * len(bucket) + 2 and last < num_slots
    batch = num_slots_spanned if is_dense else len(bucket)
    row_of_sequence = (
        slots[bucket] - first if is_dense else np.arange(len(bucket))
    )  # row of each sequence; a dense span may include idle slots

    width = int(counts[bucket].max())
    tokens = np.zeros((batch, width), dtype=np.int64)
    queries = np.zeros(batch, dtype=np.int64)
    keys = np.ones(batch, dtype=np.int64)
    steps = np.arange(width)
    tokens[row_of_sequence] = starts[bucket, None] + np.minimum(steps, counts[bucket, None] - 1)
    queries[row_of_sequence] = counts[bucket]
    keys[row_of_sequence] = lengths[bucket]
    is_query = steps < counts[bucket, None]  # [n, width]
    take_rows = (row_of_sequence[:, None] * width + steps)[is_query]
    take_tokens = tokens[row_of_sequence][is_query]
    is_one_query_each = (
        width == 1 and batch == len(starts) and np.array_equal(take_rows, take_tokens)
    )
    new_tokens = zip(starts[bucket], counts[bucket], slots[bucket], lengths[bucket], strict=True)

    return CacheRows(
        new_tokens=[NewTokens(*map(int, numbers)) for numbers in new_tokens],
        segment=first_sequence.segment,
        slots=tensor(np.arange(first, last + 1) if is_dense else slots[bucket]),
        tokens=tensor(tokens),
        queries=tensor(queries),
        lengths=tensor(keys),
        max_length=int(keys.max()),
        first_slot=first if is_dense else None,
        take_rows=tensor(take_rows),
        take_tokens=tensor(take_tokens),
        is_one_query_each=is_one_query_each,
        has_equal_lengths=is_one_query_each and is_dense and int(keys.min()) == int(keys.max()),
    )
