"""Sequences as rows, for models that compute rows. Quick."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentevo.config import ParallelSection
from agentevo.errors import ModelError, TrainingError
from agentevo.models.compute.routers import enable_routing
from agentevo.training.batching.row_groups import row_passes
from agentevo.training.distribute import check_spread
from agentevo.training.tree import build_tree

CPU = torch.device("cpu")
SEQUENCES = [[1, 2, 3, 4], [1, 2, 5], [7, 8, 9, 9, 9, 9, 9, 9, 9, 9], [1, 2, 3], [6] * 9]


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("as_one_pass", [True, False])
def test_every_node_is_computed_once_after_its_own_beginning(merge, pads, as_one_pass):
    tree = build_tree(SEQUENCES, merge=merge)
    nodes = np.arange(tree.num_nodes)
    passes = row_passes(tree, nodes, pads, as_one_pass, CPU)
    beginnings = [
        group.input_ids[row, : column + 1].tolist()
        for group in passes.groups
        for row, column in zip(group.rows.tolist(), group.columns.tolist(), strict=True)
    ]
    path_of = {node: path for path in tree.paths for node in path.tolist()}
    expected = [tree.ids[path_of[node][path_of[node] <= node]].tolist() for node in nodes.tolist()]
    assert [beginnings[place] for place in passes.order.tolist()] == expected
    assert not as_one_pass or len(passes.groups) == 1


def test_rows_of_like_length_share_a_pass():
    tree = build_tree(SEQUENCES, merge=False)
    nodes = np.arange(tree.num_nodes)
    shapes = [tuple(g.input_ids.shape) for g in row_passes(tree, nodes, True, False, CPU).groups]
    assert shapes == [(3, 4), (2, 10)]
    shapes = [tuple(g.input_ids.shape) for g in row_passes(tree, nodes, False, False, CPU).groups]
    assert shapes == [(2, 3), (1, 4), (1, 9), (1, 10)]


def test_a_row_without_output_is_left_out():
    tree = build_tree(SEQUENCES)
    last = tree.paths[2][-1:]
    (group,) = row_passes(tree, last, True, False, CPU).groups
    assert group.input_ids.tolist() == [SEQUENCES[2]]


@pytest.mark.parametrize("key", ["tensor", "context", "expert", "pipeline"])
def test_what_divides_a_pass_needs_the_tree(key, random_model):
    with pytest.raises(TrainingError, match=f"trainer.parallel.{key} needs trainer.compute=tree"):
        check_spread(random_model("lfm2").model, ParallelSection(**{key: 2}))


def test_routing_replay_needs_the_tree(random_model):
    with pytest.raises(ModelError, match="computes rows"):
        enable_routing(random_model("qwen3-next").model)
