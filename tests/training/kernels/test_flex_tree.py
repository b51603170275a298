"""FlexAttention's block mask from the tree: exactly the pairs that see one another, and no block
too many where it matters.

Its kernels need a GPU; here PyTorch's own slow form of it runs, on the same mask.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slow import soak
from torch.nn.attention.flex_attention import flex_attention

from agentevo.models.compute.windows import Chunk
from agentevo.training.kernels import flex_tree
from agentevo.training.kernels.flex_tree import FlexTree
from agentevo.training.kernels.tree_attention import TreeAttention
from agentevo.training.tree import build_tree
from examples import examples

CPU = torch.device("cpu")
PROMPT = list(range(150))
GROUP = [PROMPT + [1000 + n] * (90 * n + 1) for n in range(5)] + [[7] * 300]
SINKS = torch.tensor([0.3, -2.0, 4.0, 0.0])
sequences_of_few_letters = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=9
)


def pairs(tree, window):
    """[N, N] bool, query by key, from the paths."""
    seen = np.zeros((tree.num_nodes, tree.num_nodes), dtype=bool)
    for path in tree.paths:
        distance = np.arange(len(path))[:, None] - np.arange(len(path))[None, :]
        if isinstance(window, Chunk):
            chunk = np.arange(len(path)) // window.size
            near = chunk[:, None] == chunk[None, :]
        else:
            near = distance < (window or len(path))
        seen[path[:, None], path[None, :]] |= (distance >= 0) & near
    return seen


@pytest.mark.parametrize("window", [None, 5, 40, 200, Chunk(5), Chunk(64)])
def test_blocks_hold_exactly_what_is_seen(monkeypatch, window):
    monkeypatch.setattr(flex_tree, "BLOCK", 4)

    @settings(max_examples=examples(20), deadline=None)
    @given(sequences_of_few_letters)
    @example(GROUP)
    def any_tree(sequences):
        tree = build_tree(sequences)
        flex = FlexTree(tree, CPU)
        some, every = flex._blocks(window)
        expected = pairs(tree, window)
        padded = np.zeros((len(flex.ends), len(flex.ends)), dtype=bool)
        padded[: tree.num_nodes, : tree.num_nodes] = expected
        blocks = padded.reshape(len(some), 4, len(some), 4)
        assert not (blocks.any((1, 3)) & ~some).any(), (
            "a pair that sees one another lies in a block that is left out"
        )
        assert (blocks.all((1, 3)) | ~every).all(), "a block counts as full and is not"

        query, key = (
            x.reshape(-1)
            for x in torch.meshgrid(*[torch.arange(tree.num_nodes)] * 2, indexing="ij")
        )
        found = flex.block_mask(window).mask_mod(None, None, query, key).view(tree.num_nodes, -1)
        assert np.array_equal(found.numpy(), expected)

    any_tree()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "softcap"),
    [
        (60, 2.0),
        pytest.param(None, None, marks=pytest.mark.soak),
        pytest.param(Chunk(60), None, marks=pytest.mark.soak),
    ],
)
def test_attention_is_that_of_the_plan_for_cpus(window, softcap):
    tree = build_tree(GROUP)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tree.num_nodes, heads, 16, generator=generator) for heads in (4, 2, 2))
    found = FlexTree(tree, CPU).attend(q, k, v, 0.25, window, softcap)
    torch.testing.assert_close(
        found,
        TreeAttention(tree, CPU).attend(q, k, v, 0.25, window, softcap),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.slow
@pytest.mark.parametrize("window", [Chunk(60), *soak(None, 60)])
def test_sinks_are_those_of_the_plan_for_cpus(window):
    """In texts that would otherwise take flash attention, too."""
    for sequences in (GROUP, [[5] * 2048]):
        tree = build_tree(sequences)
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(tree.num_nodes, heads, 16, generator=generator) for heads in (4, 2, 2)
        )
        found, wanted = (
            plan.attend(q, k, v, 0.25, window, None, SINKS)
            for plan in (FlexTree(tree, CPU), TreeAttention(tree, CPU))
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gradients_pass_through_the_log_sum_exp_to_the_sinks(monkeypatch):
    """FlexAttention has no backward pass on a CPU. Here a dense attention stands in for it, which
    gives the same outputs."""

    def dense(q, k, v, score_mod, block_mask, scale, enable_gqa, return_lse):
        places = torch.arange(q.shape[2])
        seen = block_mask.mask_mod(None, None, places[:, None], places[None, :])
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
        assert return_lse
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    tree = build_tree(GROUP)
    generator = torch.Generator().manual_seed(0)
    shapes = [(tree.num_nodes, heads, 16) for heads in (4, 2, 2)]
    leaves = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]
    leaves.append(SINKS.clone().requires_grad_())
    q, k, v, sinks = leaves
    monkeypatch.setattr(flex_tree, "_attention_function", lambda kind: dense)
    results = []
    for plan in (FlexTree(tree, CPU), TreeAttention(tree, CPU)):
        out = plan.attend(q, k, v, 0.25, Chunk(60), None, sinks)
        above = torch.linspace(-1, 1, out.numel()).view_as(out)
        results.append([out, *torch.autograd.grad(out, leaves, above)])

    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_shared_prompt_leaves_out_the_other_members_blocks():
    prompt = list(range(1024))
    members = 8
    flex = FlexTree(build_tree([[*prompt, *[2000 + n] * 256] for n in range(members)]), CPU)
    some, every = flex._blocks(None)
    assert some.sum() == 8 * 9 // 2 + members * (8 * 2 + 3)
    assert every.sum() == some.sum() - len(some), "only the diagonal needs the mask"


@pytest.mark.slow
def test_a_mask_for_128k_nodes_takes_no_memory_for_all_pairs():
    tree = build_tree([list(range(131072))])
    mask = FlexTree(tree, CPU).block_mask(None)
    assert mask.kv_num_blocks.sum() == 1024 and mask.full_kv_num_blocks.sum() == 1024 * 1023 // 2


@pytest.mark.parametrize("lengths", [[300], [200, 300, 150]])
def test_long_texts_that_share_nothing_take_flash_attention(lengths, monkeypatch):
    monkeypatch.setattr(flex_tree, "LONG_TEXT", 200)
    monkeypatch.setattr(
        flex_tree, "_attention_function", lambda kind: pytest.fail("FlexAttention was called")
    )

    tree = build_tree([[10 * n + 1] * length for n, length in enumerate(lengths)])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tree.num_nodes, heads, 16, generator=generator) for heads in (4, 2, 2))
    found = FlexTree(tree, CPU).attend(q, k, v, 0.25, None, None)
    wanted = TreeAttention(tree, CPU).attend(q, k, v, 0.25, None, None)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_short_texts_and_those_that_share_take_flex_attention(monkeypatch):
    monkeypatch.setattr(flex_tree, "LONG_TEXT", 200)
    shared = [1] * 400
    for sequences in ([[1] * 300, [2] * 60], [[*shared, 2, 2], [*shared, 3, 3, 3]]):
        assert FlexTree(build_tree(sequences), CPU).texts == []


@pytest.mark.slow
def test_narrow_heads_are_padded():
    tree = build_tree(GROUP)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tree.num_nodes, heads, 8, generator=generator) for heads in (4, 2, 2))
    given = []

    def attention(*heads, **kwargs):
        given.append([x.shape[-1] for x in heads])
        return flex_attention(*heads, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_tree, "_attention_function", lambda kind: attention)
        found = FlexTree(tree, CPU).attend(q, k, v, 0.25, None, None)
    assert given == [[16, 16, 16]] and found.shape == q.shape

    wanted = TreeAttention(tree, CPU).attend(q, k, v, 0.25, None, None)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
