"""One engine step as tensors: which tokens of which sequences, where their keys go, and the
resulting rows of attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from agentevo.inference.embedded.cache_attention import CacheAttention, CacheRows, Stretch
from agentevo.inference.embedded.kv_cache import KVCache
from agentevo.inference.embedded.scheduler import Sequence

MAX_CHUNK = 512
"""The most new tokens of one sequence in a step. It limits the size of the attention mask."""


@dataclass
class StepBatch:
    """Inputs of one forward pass over the new tokens of several sequences, concatenated."""

    work: list[tuple[Sequence, int]]
    """Each sequence, and how many of its tokens this step computes."""
    input_ids: torch.Tensor
    """[1, T]"""
    position_ids: torch.Tensor
    """[1, T]"""
    plan: CacheAttention
    sampled: list[Sequence]
    """Sequences whose last token is in this step, so that the next one can be sampled."""
    scored: list[tuple[Sequence, int]]
    """Sequences whose given tokens this step scores, and how many tokens of each."""
    logit_rows: torch.Tensor
    """Positions in the token row whose logits are needed: first those of `sampled`, then those of
    `scored`."""


def choose_work(running: list[Sequence], prefill_tokens: int) -> list[tuple[Sequence, int]]:
    """Chooses how many tokens of each sequence a step computes. A sequence that needs one token
    gets it. Sequences that need more share `prefill_tokens`, first come first served."""
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
    cache: KVCache, work: list[tuple[Sequence, int]], device: torch.device
) -> StepBatch:
    """Lays out the step. Sequences are sorted by slot, so that adjacent slots can be viewed instead
    of copied."""
    work = sorted(work, key=lambda item: item[0].slot)
    ids = [token for s, n in work for token in s.ids[s.cached : s.cached + n]]
    counts = np.array([n for _, n in work])
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    cached = np.array([s.cached for s, _ in work])
    offsets = np.array([s.offset for s, _ in work])
    slots = np.array([s.slot for s, _ in work])
    within = np.arange(len(ids)) - np.repeat(starts, counts)
    positions = np.repeat(cached, counts) + within
    places = positions - np.repeat(offsets, counts)

    def tensor(array: np.ndarray | list[int]) -> torch.Tensor:
        return torch.as_tensor(np.asarray(array, dtype=np.int64), device=device)

    lengths = cached + counts - offsets
    rows = [
        _rows(bucket, work[bucket[0]][0], slots, starts, counts, lengths, tensor, cache.num_slots)
        for bucket in _buckets([(id(s.segment), n) for s, n in work])
    ]
    done = [
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
        plan=CacheAttention(cache, tensor(np.repeat(slots, counts)), tensor(places), rows),
        sampled=[work[index][0] for index in done],
        scored=scored,
        logit_rows=tensor([*(starts[done] + counts[done] - 1 if done else ()), *predicting]),
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
            of_first, fewest = kinds[buckets[-1][0]]
            if segment == of_first and count <= 2 * fewest and (count == 1) == (fewest == 1):
                buckets[-1].append(index)
                continue
        buckets.append([index])

    return [np.sort(np.array(bucket)) for bucket in buckets]


def _rows(
    bucket: np.ndarray,
    any_of_them: Sequence,
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
    span = last - first + 1
    dense = span <= 1.25 * len(bucket) + 2 and last < num_slots
    batch = span if dense else len(bucket)
    lines = (
        slots[bucket] - first if dense else np.arange(len(bucket))
    )  # row of each sequence; a dense span may include idle slots

    width = int(counts[bucket].max())
    tokens = np.zeros((batch, width), dtype=np.int64)
    queries = np.zeros(batch, dtype=np.int64)
    keys = np.ones(batch, dtype=np.int64)
    steps = np.arange(width)
    tokens[lines] = starts[bucket, None] + np.minimum(steps, counts[bucket, None] - 1)
    queries[lines] = counts[bucket]
    keys[lines] = lengths[bucket]
    real = steps < counts[bucket, None]  # [n, width]
    take_rows = (lines[:, None] * width + steps)[real]
    take_tokens = tokens[lines][real]
    is_one_query_each = (
        width == 1 and batch == len(starts) and np.array_equal(take_rows, take_tokens)
    )
    stretches = zip(starts[bucket], counts[bucket], slots[bucket], lengths[bucket], strict=True)

    return CacheRows(
        stretches=[Stretch(*map(int, stretch)) for stretch in stretches],
        segment=any_of_them.segment,
        slots=tensor(np.arange(first, last + 1) if dense else slots[bucket]),
        tokens=tensor(tokens),
        queries=tensor(queries),
        lengths=tensor(keys),
        max_length=int(keys.max()),
        first_slot=first if dense else None,
        take_rows=tensor(take_rows),
        take_tokens=tensor(take_tokens),
        is_one_query_each=is_one_query_each,
        has_equal_lengths=is_one_query_each and dense and int(keys.min()) == int(keys.max()),
    )
