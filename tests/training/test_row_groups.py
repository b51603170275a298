"""Sequences as rows, for models that compute rows. Quick."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

from agentevo.config import MemorySection, ParallelSection
from agentevo.errors import ModelError, TrainingError
from agentevo.models.compute import rows
from agentevo.models.compute.activations import keep_activations
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.routers import enable_routing
from agentevo.models.compute.row_states import fork_state
from agentevo.models.compute.rows import row_settings, shares_prefixes
from agentevo.training.batching import row_groups
from agentevo.training.batching.row_groups import row_passes
from agentevo.training.distribute import check_spread
from agentevo.training.tree import build_tree

CPU = torch.device("cpu")
SEQUENCES = [[1, 2, 3, 4], [1, 2, 5], [7, 8, 9, 9, 9, 9, 9, 9, 9, 9], [1, 2, 3], [6] * 9]


def passes_of(tree, nodes, *, pads=True, shares=False, as_one_pass=False):
    return row_passes(tree, nodes, pads=pads, shares=shares, as_one_pass=as_one_pass, device=CPU)


def beginnings(groups):
    """The tokens up to each place whose output is needed, in the order of the groups."""
    of_state = []
    found = []
    for group in groups:
        before = [] if group.parent is None else of_state[group.parent]
        assert len(before) == group.start
        found += [
            before + group.input_ids[row, : column + 1].tolist()
            for row, column in zip(group.rows.tolist(), group.columns.tolist(), strict=True)
        ]
        of_state.append(before + group.input_ids[0].tolist() if group.is_parent else None)

    return found


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("as_one_pass", [True, False])
@pytest.mark.parametrize("smallest_saving", [1, 4, 128])
def test_every_node_is_computed_once_after_its_own_beginning(
    merge, pads, shares, as_one_pass, smallest_saving, monkeypatch
):
    monkeypatch.setattr(row_groups, "SMALLEST_SAVING", smallest_saving)
    draw = random.Random(smallest_saving)
    grown = [[1, 2]]
    for _ in range(40):
        stem = draw.choice(grown)
        grown.append(stem[: draw.randint(0, len(stem))] + draw.choices(range(4), k=5))

    for sequences in (SEQUENCES, grown):
        tree = build_tree(sequences, merge=merge)
        nodes = np.arange(tree.num_nodes)
        passes = passes_of(tree, nodes, pads=pads, shares=shares, as_one_pass=as_one_pass)
        path_of = {node: path for path in tree.paths for node in path.tolist()}
        expected = [
            tree.ids[path_of[node][path_of[node] <= node]].tolist() for node in nodes.tolist()
        ]
        found = beginnings(passes.groups)
        assert [found[place] for place in passes.order.tolist()] == expected
        assert not as_one_pass or len(passes.groups) == 1


def test_rows_of_like_length_share_a_pass():
    tree = build_tree(SEQUENCES, merge=False)
    nodes = np.arange(tree.num_nodes)
    shapes = [tuple(g.input_ids.shape) for g in passes_of(tree, nodes).groups]
    assert shapes == [(3, 4), (2, 10)]
    shapes = [tuple(g.input_ids.shape) for g in passes_of(tree, nodes, pads=False).groups]
    assert shapes == [(2, 3), (1, 4), (1, 9), (1, 10)]


def test_a_row_without_output_is_left_out():
    tree = build_tree(SEQUENCES)
    last = tree.paths[2][-1:]
    (group,) = passes_of(tree, last).groups
    assert group.input_ids.tolist() == [SEQUENCES[2]]


def test_a_shared_prefix_is_a_pass_of_its_own():
    """Two prompts of 200 tokens, and a shared prompt that is too short to save anything."""
    prompts = [[n] * 200 for n in (1, 2)]
    sequences = [[*prompt, 5, n] for prompt in prompts for n in (6, 7)]
    sequences += [[3] * 100 + [8], [3] * 100 + [9]]
    tree = build_tree(sequences)
    groups = passes_of(tree, np.arange(tree.num_nodes), shares=True).groups
    shapes = [(tuple(g.input_ids.shape), g.parent, g.start, g.is_parent) for g in groups]
    # A row that continues from a state has at least two tokens.
    assert sorted(shapes, key=str) == sorted(
        [
            ((1, 201), None, 0, True),
            ((1, 201), None, 0, True),
            ((2, 2), 0, 201, False),
            ((2, 2), 1, 201, False),
            ((2, 101), None, 0, False),
        ],
        key=str,
    )


@pytest.mark.slow
def test_a_deep_tree_needs_no_recursion():
    stem = [n % 7 for n in range(3000)]
    tree = build_tree([[*stem[:n], 9] for n in range(3, 3000)])
    passes = passes_of(tree, np.arange(tree.num_nodes), shares=True)
    assert sum(g.input_ids.numel() for g in passes.groups) < 10 * tree.num_nodes


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("lfm2", True),
        ("qwen3-next", True),
        ("minimax", False),
        ("gpt-oss-rows", False),
        ("mamba", False),
        ("bloom", True),
    ],
)
def test_models_whose_rows_continue_from_a_state(name, shares, random_model):
    assert row_settings(random_model(name).model).shares is shares
    assert shares_prefixes(random_model(name).model, wanted=True) is shares
    assert not shares_prefixes(random_model(name).model, wanted=False)


def test_states_that_pass_no_gradient_on_are_not_shared(random_model, monkeypatch):
    def fork_without_gradient(*args):
        with torch.no_grad():
            return fork_state(*args)

    monkeypatch.setattr(rows, "fork_state", fork_without_gradient)
    model = prepare(copy.deepcopy(random_model("lfm2").alone), compute="rows")
    assert not row_settings(model).shares


def test_checkpointed_layers_would_change_a_state_twice(random_model):
    model = copy.deepcopy(random_model("lfm2").model)
    keep_activations(model, MemorySection(checkpointing="full"))
    assert not shares_prefixes(model, wanted=True)


@pytest.mark.parametrize("key", ["tensor", "context", "expert", "pipeline"])
def test_what_divides_a_pass_needs_the_tree(key, random_model):
    with pytest.raises(TrainingError, match=f"trainer.parallel.{key} needs trainer.compute=tree"):
        check_spread(random_model("lfm2").model, ParallelSection(**{key: 2}))


def test_routing_replay_needs_the_tree(random_model):
    with pytest.raises(ModelError, match="computes rows"):
        enable_routing(random_model("qwen3-next").model)
