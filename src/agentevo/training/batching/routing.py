"""Brings the experts that were chosen for the tokens of samples to the nodes of a batch. The
experts come from the record of the turns, or from a pass of the trainer.

Rows belong to tokens, not to positions in a batch. `merge_keys` gives two tokens the same key if
they are the same token with the same row, and only those may become one node of the token tree.
Samples that were routed differently share nothing from that token on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from agentevo.errors import TrainingError
from agentevo.models.compute.routers import KEY, OWN, Routers
from agentevo.models.vision.keys import ImageKeys
from agentevo.training.batching.images import has_images
from agentevo.types import Sample, Turn
from agentevo.types.routed_experts import RoutedExperts, join_experts, why_misaligned


def path_rows(name: str, path: Sequence[Turn]) -> RoutedExperts | None:
    """[T - 1] rows of the tokens on a path of trajectory `name`. None if no turn has rows. Raises
    TrainingError for rows that are missing, too many, or of other routers."""
    parts = [turn.routed_experts for turn in path]
    if all(part is None for part in parts):
        return None

    wrong = next(
        (
            why_misaligned(turn)
            if turn.routed_experts is not None
            else f"turn {turn.index} has no routed experts, and others have"
            for turn in path
            if turn.routed_experts is None or why_misaligned(turn)
        ),
        "",
    )
    try:
        rows = None if wrong else join_experts([part for part in parts if part is not None])
    except ValueError as error:
        wrong = str(error)

    if wrong:
        raise _refusal(name, wrong)

    return rows


def check_recorded(samples: Sequence[Sample], routers: Routers) -> None:
    """Raises TrainingError if a sample has no row for every token but the last, or rows of other
    routers than the policy's."""
    for sample in samples:
        rows = sample.routed_experts
        if rows is None:
            raise _refusal(
                sample.trajectory_id,
                "no engine has recorded which experts it chose: the attempt was made without "
                "engine.routed_experts",
            )

        if (rows.layers, rows.top_k, rows.num_experts) != routers:
            raise _refusal(
                sample.trajectory_id,
                f"its routed experts are of {rows.layers} layers that choose {rows.top_k} of "
                f"{rows.num_experts}, and the policy has {routers.layers} that choose "
                f"{routers.top_k} of {routers.num_experts}",
            )

        _rows_of(sample)


def _refusal(name: str, wrong: str) -> TrainingError:
    return TrainingError(
        f"{KEY}: trajectory {name}: {wrong} (the weights were not changed): begin a new run, or "
        f"set {KEY}=none"
    )


def merge_keys(samples: Sequence[Sample]) -> list[np.ndarray]:
    """For each sample, a number per token [T] int32. Equal numbers mean the same token with the
    same row, and the same feature of the same image. Without rows and images, the numbers are the
    ids."""
    ids = [sample.ids for sample in samples]
    if has_images(samples):
        images = ImageKeys(1 + max(int(sample.ids.max()) for sample in samples))
        ids = [images.intern(sample.ids, sample.images) for sample in samples]
    if all(sample.routed_experts is None for sample in samples):
        return ids
    tokens = np.concatenate(
        [_token_bytes(sample, keys) for sample, keys in zip(samples, ids, strict=True)]
    )
    token_records = tokens.view(np.dtype((np.void, tokens.shape[1]))).ravel()
    _, keys = np.unique(token_records, return_inverse=True)
    ends = np.cumsum([len(sample.ids) for sample in samples])[:-1]
    return np.split(keys.astype(np.int32), ends)


def _token_bytes(sample: Sample, ids: np.ndarray) -> np.ndarray:
    """[T, B] uint8: for each token its id or key, whether it has a row, and the row."""
    rows = _rows_of(sample)
    token_bytes = np.zeros((len(sample.ids), 5 + rows.bytes_per_token), dtype=np.uint8)
    token_bytes[:, :4] = ids.astype("<i4").view(np.uint8).reshape(-1, 4)
    token_bytes[:-1, 4] = 1
    token_bytes[:-1, 5:] = np.frombuffer(rows.data, dtype=np.uint8).reshape(
        -1, rows.bytes_per_token
    )
    return token_bytes


def _rows_of(sample: Sample) -> RoutedExperts:
    rows = sample.routed_experts
    if rows is None or rows.num_tokens != len(sample.ids) - 1:
        count = 0 if rows is None else rows.num_tokens
        raise _refusal(
            sample.trajectory_id,
            f"it has routed experts of {count} tokens, and {len(sample.ids) - 1} are needed",
        )

    return rows


def node_rows(
    samples: Sequence[Sample], paths: Sequence[np.ndarray], num_nodes: int, device: torch.device
) -> torch.Tensor | None:
    """[N, layers, top_k] int64 of a batch's nodes, from the rows of each sample's tokens. OWN for
    last tokens, which predict nothing. None if nothing was recorded."""
    if all(sample.routed_experts is None for sample in samples):
        return None
    first = _rows_of(samples[0])
    rows = np.full((num_nodes, first.layers, first.top_k), OWN, dtype=np.int32)
    for sample, path in zip(samples, paths, strict=True):
        rows[path[:-1]] = _rows_of(sample).array()
    return torch.as_tensor(rows, device=device).long()


def with_rows(sample: Sample, rows: np.ndarray, routers: Routers) -> Sample:
    """The sample with the rows [T, layers, top_k] of a pass of the trainer. The last row is left
    out."""
    routed_experts = RoutedExperts.of(rows[:-1], routers.num_experts)
    return msgspec.structs.replace(sample, routed_experts=routed_experts)
