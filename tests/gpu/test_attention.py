"""The compiled FlexAttention of a GPU against the CPU's kernels: outputs and gradients, in every
form that models ask for."""

from __future__ import annotations

import pytest
import torch

from agentevo.training.kernels.tree_attention import TreeAttention
from agentevo.training.tree import build_tree

CPU = torch.device("cpu")
PROMPT = list(range(150))
GROUP = [PROMPT + [1000 + n] * (90 * n + 1) for n in range(5)] + [[7] * 300]


def both(tree, device, heads, groups, dim, dtype, window=None, softcap=None):
    """(found on the device in `dtype`, wanted from the CPU in float32): each an output and three
    gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, up = (
        torch.randn(tree.num_nodes, count, dim, generator=generator).to(dtype).float()
        for count in (heads, groups, groups, heads)
    )

    def run(where, kind):
        tensors = [x.to(where, kind).requires_grad_() for x in (q, k, v)]
        out = TreeAttention(tree, where).attend(*tensors, dim**-0.5, window, softcap)
        out.backward(up.to(where, kind))
        return [x.detach().float().cpu() for x in (out, *(x.grad for x in tensors))]

    return run(device, dtype), run(CPU, torch.float32)


def distance(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dim", [8, 64, 128])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (9, 3), (14, 2)])
def test_heads(gpu, heads, groups, dim):
    for found, wanted in zip(
        *both(build_tree(GROUP), gpu, heads, groups, dim, torch.float32), strict=True
    ):
        assert distance(found, wanted) < 1e-5


@pytest.mark.parametrize(("window", "softcap"), [(60, None), (None, 2.0), (24, 30.0)])
def test_windows_and_caps(gpu, window, softcap):
    for found, wanted in zip(
        *both(build_tree(GROUP), gpu, 4, 2, 64, torch.float32, window, softcap), strict=True
    ):
        assert distance(found, wanted) < 1e-5


def test_bfloat16(gpu):
    for found, wanted in zip(
        *both(build_tree(GROUP), gpu, 16, 8, 128, torch.bfloat16), strict=True
    ):
        assert distance(found, wanted) < 1e-2


def test_many_shapes_are_not_compiled_anew(gpu):
    """PyTorch gives up after a few shapes, and would then compute all scores."""
    torch._dynamo.reset()
    for count in range(1, 20):
        tree = build_tree([sequence[: 37 * count] for sequence in GROUP])
        for found, wanted in zip(*both(tree, gpu, 4, 2, 64, torch.float32), strict=True):
            assert distance(found, wanted) < 1e-5
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled <= 4


def test_long_texts_take_memory_in_proportion(gpu):
    def peak(length):
        tree = build_tree([list(range(length))])
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        tensors = [
            torch.randn(length, heads, 64, device=gpu, dtype=torch.bfloat16, requires_grad=True)
            for heads in (8, 2, 2)
        ]
        TreeAttention(tree, gpu).attend(*tensors, 0.125, None, None).sum().backward()
        return torch.cuda.max_memory_allocated()

    peak(16384)
    assert peak(65536) < 5 * peak(16384)
