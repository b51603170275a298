"""Attention over a token tree is each sequence's own, forward and backward, however the tree is cut
into kernel calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slow import soak

from agentevo.models.compute.windows import Chunk
from agentevo.training.kernels import attention_kernels, tree_attention
from agentevo.training.kernels.tree_attention import TreeAttention, lay_out
from agentevo.training.tree import build_tree
from examples import examples

CPU = torch.device("cpu")
sequences_of_few_letters = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=9
)
LONG = [[1] * 40, [1] * 40 + [2] * 30, [1] * 40 + [2] * 10 + [0] * 25, [0], [0] + [1] * 12]


def attention_alone(q, k, v, scaling, window, softcap, sinks=None):
    """One sequence, [n, H, D], naively. A sink is a further key, whose value is zeros."""
    repeat = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(repeat, 1)
    v = v.repeat_interleave(repeat, 1)
    out = torch.empty_like(q)
    for place in range(len(q)):
        first = 0
        if isinstance(window, Chunk):
            first = next(n for n in range(place + 1) if n // window.size == place // window.size)
        elif window is not None:
            first = max(0, place - window + 1)
        scores = torch.einsum("hd,khd->hk", q[place], k[first : place + 1]) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)

        values = v[first : place + 1]
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], -1)
            values = torch.cat([values, torch.zeros_like(values[:1])])
        out[place] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)

    return out


def alone(tree, q, k, v, *how):
    """[N, H, D]: every node's output as its own sequence has it."""
    out = torch.empty_like(q)
    for path in map(torch.as_tensor, tree.paths):
        out = out.index_copy(0, path, attention_alone(q[path], k[path], v[path], *how))
    return out


def random_heads(tree, dim=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tree.num_nodes)
    return [
        torch.randn(tree.num_nodes, heads, dim, generator=generator, dtype=dtype).requires_grad_()
        for heads in (4, 2, 2, 4)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("block", [5, *soak(128, 1)])
@pytest.mark.parametrize(
    ("window", "softcap"),
    [
        (17, None),
        (None, 1.5),
        (4, 2.0),
        (Chunk(3), None),
        pytest.param(None, None, marks=pytest.mark.soak),
        pytest.param(3, None, marks=pytest.mark.soak),
        pytest.param(Chunk(17), 2.0, marks=pytest.mark.soak),
    ],
)
def test_each_node_sees_what_its_sequence_sees(monkeypatch, window, softcap, block):
    """block: queries at once, so that every kind of kernel call is taken."""
    monkeypatch.setattr(tree_attention, "BLOCK", block)
    monkeypatch.setattr(attention_kernels, "MATH_ROWS", 7)

    @settings(max_examples=examples(12), deadline=None, derandomize=True)
    @given(sequences_of_few_letters, st.booleans())
    @example(LONG, True)
    @example(LONG, False)
    def any_tree(sequences, merge):
        tree = build_tree(sequences, merge=merge)
        q, k, v, above = random_heads(tree)
        found = TreeAttention(tree, CPU).attend(q, k, v, 0.4, window, softcap)
        expected = alone(tree, q, k, v, 0.4, window, softcap)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

        for ours, theirs in zip(
            *(torch.autograd.grad(out, (q, k, v), above) for out in (found, expected)), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    any_tree()


@pytest.mark.slow
@pytest.mark.parametrize("block", [5, *soak(128)])
@pytest.mark.parametrize("window", [4, *soak(None, Chunk(9))])
def test_a_sink_is_a_key_without_a_value(monkeypatch, window, block):
    """With the gradient of its score; a large sink leaves little for the keys."""
    monkeypatch.setattr(tree_attention, "BLOCK", block)
    sinks = torch.tensor([0.3, -2.0, 4.0, 0.0], requires_grad=True)
    for merge in (True, False):
        tree = build_tree(LONG, merge=merge)
        q, k, v, above = random_heads(tree)
        found = TreeAttention(tree, CPU).attend(q, k, v, 0.4, window, None, sinks)
        expected = alone(tree, q, k, v, 0.4, window, None, sinks)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

        for ours, theirs in zip(
            *(torch.autograd.grad(o, (q, k, v, sinks), above) for o in (found, expected)),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [(None, None, False), (None, 1.5, False), (Chunk(9), None, True)],
)
def test_bfloat16_rounds_no_more_than_bfloat16_must(monkeypatch, window, softcap, with_sinks):
    monkeypatch.setattr(tree_attention, "BLOCK", 8)
    tree = build_tree(LONG)
    sinks = torch.tensor([0.3, -2.0, 4.0, 0.0], requires_grad=True)
    exact = [*random_heads(tree, dim=16), sinks]
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    results = []
    for q, k, v, above, sink in (exact, rounded):
        how = (sink,) if with_sinks else ()
        out = TreeAttention(tree, CPU).attend(q, k, v, 0.25, window, softcap, *how)
        results.append([out, *torch.autograd.grad(out, (q, k, v, *how), above)])

    for full, half in zip(*results, strict=True):
        assert half.dtype is torch.bfloat16
        torch.testing.assert_close(half.float(), full, rtol=0.05, atol=0.05)


def cells(layout):
    """Query-key pairs that the kernels compute."""
    rows = [
        (part, part.rows.stop - part.rows.start if isinstance(part.rows, slice) else len(part.rows))
        for part in (*layout.within, *layout.below)
    ]
    return sum(batch.visible.numel() for batch in layout.batches) + sum(
        n * (part.keys.stop - part.keys.start) for part, n in rows
    )


@pytest.mark.parametrize("lengths", [[1, 2, 5, 30, 100, 400, 401, 3], [700], [16] * 20])
def test_sequences_of_very_different_sizes_do_not_pad_each_other(lengths):
    sequences = [[index, *range(length)] for index, length in enumerate(lengths)]
    layout = lay_out(build_tree(sequences), None, CPU)
    assert cells(layout) < 1.5 * sum((length + 1) ** 2 for length in lengths) + 200


def test_a_shared_beginning_is_computed_once():
    prompt = list(range(1024))
    layout = lay_out(build_tree([[*prompt, 2000 + n, *range(99)] for n in range(8)]), None, CPU)
    assert cells(layout) == 128 * 128 * sum(range(1, 9)) + 8 * 100 * 100 + 8 * 100 * 1024
    assert len(layout.within) == 8 and len(layout.batches) == 1 and len(layout.below) == 1


def test_a_long_sequence_costs_half_its_square():
    assert cells(lay_out(build_tree([list(range(4096))]), None, CPU)) < 0.52 * 4096 * 4096


@pytest.mark.parametrize("window", [256, Chunk(256)])
def test_with_a_window_the_work_grows_with_the_length_and_not_its_square(window):
    short, long = (
        cells(lay_out(build_tree([list(range(length))]), window, CPU)) for length in (2048, 8192)
    )
    assert long < 4.2 * short
    assert long < 1.6 * 8192 * 256
