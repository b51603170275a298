"""Packs samples into one forward pass: the token tree, and for each trained token its position and
its weight."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from agentevo.models.compute.routers import Routing
from agentevo.models.compute.sharded import any_sharded
from agentevo.training.batching.images import (
    BatchImages,
    ImageProvider,
    batch_images,
    has_images,
)
from agentevo.training.batching.routing import merge_keys, node_rows
from agentevo.training.batching.row_groups import RowPasses, row_passes
from agentevo.training.kernels.token_penalties import PenaltyTable
from agentevo.training.kernels.tree_attention import TreeAttention
from agentevo.training.tree import TokenTree, build_tree
from agentevo.types import Sample
from agentevo.types.penalties import PenaltyChanges


@dataclass(eq=False)
class PackedBatch:
    """M trained tokens of S samples over a tree of N nodes. The model's pass has no padding. Losses
    read tables [S, T] with one row per sample, filled from the left and 0 elsewhere."""

    input_ids: torch.Tensor
    """[1, N]"""
    position_ids: torch.Tensor
    """[A, 1, N] the positions that the model reads, on A = 3 axes where images are shown by M-RoPE,
    otherwise on one. Attention uses the depths of the nodes, `plan.tree.positions`."""
    plan: TreeAttention
    logit_nodes: torch.Tensor
    """[R]: the nodes that predict a trained token. A node has one row for each mask under which it
    predicts, and one for each token with penalties."""
    rows: torch.Tensor
    """[M]: the index of the one of the R nodes that predicts the token."""
    targets: torch.Tensor
    """[M]: the token itself."""
    nodes: torch.Tensor
    """[M]: the token's node."""
    rollout_logprobs: torch.Tensor
    """[S, T] float32 behaviour log-probs."""
    advantages: torch.Tensor
    """[S, T] float32"""
    columns: Mapping[str, torch.Tensor]
    """Sample.columns, [S, T] float32 each."""
    samples: torch.Tensor
    """[M]: the sample that the token belongs to."""
    places: torch.Tensor
    """[M]: the token's index among the trained tokens of its sample."""
    mask: torch.Tensor
    """[S, T] bool: where the tables have a trained token."""
    temperature: float
    masks: torch.Tensor | None
    """[R, W] int32: the tokens that each row may predict, a bit each, lowest bit first; None if no
    row is constrained."""
    penalties: PenaltyTable | None
    """The penalties at these rows; None if there are none."""
    routed_experts: torch.Tensor | None
    """[N, layers, top_k] int64: see `node_rows`; None if nothing was recorded."""
    images: BatchImages | None
    """None if no sample has images."""
    num_logical: int
    """The total number of tokens of all samples. Tokens that share a node count separately."""
    all_rows: bool = False
    """Whether a model that computes rows also computes those whose outputs other rows give."""
    _row_passes: dict[tuple[bool, ...], RowPasses] = field(default_factory=dict)

    def row_passes(self, pads: bool, *, shares: bool, at_tokens: bool = False) -> RowPasses:
        """The passes of a model that computes rows. Their output is that of the nodes that predict
        or, `at_tokens`, of the trained tokens themselves. `pads`, `shares`: see RowSettings."""
        key = (pads, shares, at_tokens, self.all_rows)
        if key not in self._row_passes:
            nodes = (self.nodes if at_tokens else self.logit_nodes).cpu().numpy()
            # If the model is divided, all processes must run the same number of passes.
            self._row_passes[key] = row_passes(
                self.plan.tree,
                nodes,
                pads=pads,
                shares=shares,
                all_rows=self.all_rows,
                as_one_pass=any_sharded(),
                device=self.input_ids.device,
                positions=None if self.images is None else self.position_ids[:, 0].cpu().numpy(),
                images=self.images,
            )
        return self._row_passes[key]

    def with_routing(self, routing: Routing) -> PackedBatch:
        """A batch for passes in which the model's routers report to `routing`."""
        plan = copy.copy(self.plan)
        plan.routing = routing
        return replace(self, plan=plan)

    def with_all_rows(self) -> PackedBatch:
        """A batch for passes in which each node is computed."""
        return replace(self, all_rows=True)

    def with_tables_of(self, samples: Sequence[Sample]) -> PackedBatch:
        """The batch with the log-probs, advantages and columns of these samples, which have the
        same tokens and loss masks as those that were packed."""
        mask = self.mask.cpu().numpy()
        return replace(self, **_tables_of(samples, mask, self.mask.device))

    @property
    def num_distinct(self) -> int:
        return self.input_ids.shape[1]

    def table(self, values: torch.Tensor) -> torch.Tensor:
        """Puts values [M] into a table [S, T], 0 elsewhere. Differentiable."""
        return values.new_zeros(self.mask.shape).index_put((self.samples, self.places), values)

    @property
    def old_logprobs(self) -> torch.Tensor:
        """[S, T] the old log-probs of the importance ratio: those recomputed at the start of the
        step, if there are any, otherwise the behaviour log-probs."""
        return self.columns.get("old_logp", self.rollout_logprobs)

    @property
    def inputs(self) -> dict[str, Any]:
        """The keyword arguments of the model for one pass, without the features of images."""
        axes = self.position_ids
        return {
            "input_ids": self.input_ids,
            "position_ids": axes if len(axes) > 1 else axes[0],
            "use_cache": False,
            "plan": self.plan,
            "logits_to_keep": self.logit_nodes,
        }


def pack(
    samples: Sequence[Sample],
    device: torch.device,
    *,
    merge: bool = True,
    images: ImageProvider | None = None,
) -> PackedBatch:
    """Packs samples of one temperature. With `merge`, shared prefixes are computed once. Without
    it, every sample is computed separately. In both cases no sample sees another's tokens, and the
    results are the same. `images` is needed for samples with images."""
    temperature = _one_temperature(samples)
    tree = build_tree(merge_keys(samples), merge=merge)
    for sample, path in zip(samples, tree.paths, strict=True):
        tree.ids[path] = sample.ids

    predictors = []
    nodes = []
    for sample, path in zip(samples, tree.paths, strict=True):
        _check_start(sample)
        places = np.flatnonzero(sample.loss_mask)
        predictors.append(path[places - 1])
        nodes.append(path[places])

    counts = np.array([len(part) for part in nodes])
    mask = np.arange(counts.max()) < counts[:, None]
    trained = np.concatenate(nodes)
    predicting = np.concatenate(predictors)
    changes = _changes(samples)
    logit_nodes, rows, masks = _logit_rows(samples, predicting, tree.num_nodes, changes)

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array, device=device)

    return PackedBatch(
        input_ids=tensor(tree.ids).unsqueeze(0),
        position_ids=tensor(_positions(samples, tree, images)).unsqueeze(1),
        plan=TreeAttention(tree, device),
        logit_nodes=tensor(logit_nodes),
        rows=tensor(rows),
        targets=tensor(tree.ids[trained]),
        nodes=tensor(trained),
        samples=tensor(np.repeat(np.arange(len(samples)), counts)),
        places=tensor(np.concatenate([np.arange(count) for count in counts])),
        mask=tensor(mask),
        temperature=temperature,
        masks=None if masks is None else tensor(masks),
        penalties=PenaltyTable.of({int(rows[m]): c for m, c in changes.items()}, device),
        routed_experts=node_rows(samples, tree.paths, tree.num_nodes, device),
        images=batch_images(samples, tree.paths, tree.num_nodes, images),
        num_logical=sum(len(s.ids) for s in samples),
        **_tables_of(samples, mask, device),
    )


def _positions(
    samples: Sequence[Sample], tree: TokenTree, images: ImageProvider | None
) -> np.ndarray:
    """[A, N] int64: the position of each node on each axis."""
    if images is None or not has_images(samples):
        return tree.positions[None]

    of_samples = [images.positions(sample) for sample in samples]
    positions = np.empty((len(of_samples[0]), tree.num_nodes), dtype=np.int64)
    for path, of_sample in zip(tree.paths, of_samples, strict=True):
        positions[:, path] = of_sample
    return positions


def _tables_of(samples: Sequence[Sample], mask: np.ndarray, device: torch.device) -> dict[str, Any]:
    """The fields of a batch that hold numbers of its trained tokens, [S, T] each. mask [S, T]: the
    places of these tokens."""
    for sample in samples:
        _check_columns(sample, samples[0])

    def table(rows: Iterable[np.ndarray]) -> torch.Tensor:
        filled = np.zeros(mask.shape, dtype=np.float32)
        filled[mask] = np.concatenate(list(rows))
        return torch.as_tensor(filled, device=device)

    return {
        "rollout_logprobs": table(s.logprobs[s.loss_mask] for s in samples),
        "advantages": table(s.advantages for s in samples),
        "columns": {name: table(s.columns[name] for s in samples) for name in samples[0].columns},
    }


def _changes(samples: Sequence[Sample]) -> dict[int, PenaltyChanges]:
    """Index of a trained token, 0 to M - 1 -> the penalties under which it was sampled."""
    changes_by_token: dict[int, PenaltyChanges] = {}
    first = 0
    for sample in samples:
        if sample.penalties is not None:
            places = np.flatnonzero(sample.loss_mask)
            changes = sample.penalties.changes(sample.ids, places)
            changes_by_token |= {
                first + n: changes[p] for n, p in enumerate(places.tolist()) if p in changes
            }
        first += sample.num_trained

    return changes_by_token


def _logit_rows(
    samples: Sequence[Sample],
    predicting: np.ndarray,
    num_nodes: int,
    changes: Collection[int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The batch's logit_nodes [R], rows [M] and masks [R, W], from the node [M] that predicts each
    trained token. The tokens of `changes` have separate rows."""
    if not changes and all(sample.masks is None for sample in samples):
        predicts = np.zeros(num_nodes, dtype=np.int64)
        predicts[predicting] = 1
        return np.flatnonzero(predicts), np.cumsum(predicts)[predicting] - 1, None

    numbers: dict[bytes, int] = {}
    of_tokens = [_numbers_of_masks(sample, numbers) for sample in samples]
    kinds = len(numbers) + 1  # 0 means all tokens
    change_numbers = np.zeros(len(predicting), dtype=np.int64)
    change_numbers[list(changes)] = np.arange(1, len(changes) + 1)
    keys = (predicting * (len(changes) + 1) + change_numbers) * kinds + np.concatenate(of_tokens)
    keys, rows = np.unique(keys, return_inverse=True)
    nodes = keys // kinds // (len(changes) + 1)
    if not numbers:
        return nodes, rows, None

    different = [np.frombuffer(mask, dtype=np.int32) for mask in numbers]
    table = np.stack([np.full_like(different[0], -1), *different])
    return nodes, rows, table[keys % kinds]


def _numbers_of_masks(sample: Sample, numbers: dict[bytes, int]) -> np.ndarray:
    """[M] for a sample's trained tokens: the number of its mask from 1, or 0 without a mask."""
    if sample.masks is None:
        return np.zeros(sample.num_trained, dtype=np.int64)
    mask_numbers = [
        numbers.setdefault(mask.tobytes(), len(numbers) + 1) for mask in sample.masks.table
    ]
    return np.array([0, *mask_numbers])[sample.masks.rows[sample.loss_mask] + 1]


def _one_temperature(samples: Sequence[Sample]) -> float:
    temperatures = {s.temperature for s in samples}
    if len(temperatures) != 1:
        raise ValueError(
            f"one pass has one temperature, not {sorted(temperatures)}: pack samples of "
            f"different temperatures separately"
        )
    return temperatures.pop()


def _check_start(sample: Sample) -> None:
    if sample.loss_mask[0]:
        raise ValueError(
            f"sample of {sample.trajectory_id}: its first token is marked as trained, but nothing "
            "predicts it"
        )


def _check_columns(sample: Sample, first: Sample) -> None:
    if sample.columns.keys() != first.columns.keys():
        raise ValueError(
            f"sample of {sample.trajectory_id} has the columns {sorted(sample.columns)}, others "
            f"have {sorted(first.columns)}"
        )
