"""FastLinear is nn.Linear in all but the library that multiplies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from agentevo.models.compute.linear import (
    FastLinear,
    PackedMatrix,
    available,
    drop_packed,
    use_fast_linear,
    weighted_sums,
)

pytestmark = pytest.mark.skipif(
    not available(),
    reason="oneDNN's linear operator is not in this build of PyTorch, or this is no x86 CPU",
)


def grown(layer: nn.Linear, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Output and all gradients."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    out.backward(grad)
    return [out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("shape", [(40,), (7, 40), (1, 40), (2, 5, 40), (3, 1, 4, 40)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients(shape, bias):
    torch.manual_seed(0)
    linear = nn.Linear(40, 24, bias=bias)
    fast = FastLinear.sharing(copy.deepcopy(linear))
    x = torch.randn(shape)
    grad = torch.randn(*shape[:-1], 24)
    for ours, theirs in zip(grown(fast, x, grad), grown(linear, x, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert ours.shape == theirs.shape


def test_inputs_and_gradients_that_are_not_contiguous():
    torch.manual_seed(1)
    linear = nn.Linear(12, 6)
    fast = FastLinear.sharing(copy.deepcopy(linear))
    x = torch.randn(12, 9).t()
    grad = torch.randn(6, 9).t()
    for ours, theirs in zip(grown(fast, x, grad), grown(linear, x, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_only_what_needs_a_gradient_gets_one(frozen):
    torch.manual_seed(2)
    fast = FastLinear.sharing(nn.Linear(5, 3))
    x = torch.randn(4, 5, requires_grad=frozen != "input")

    if frozen != "input":
        getattr(fast, frozen).requires_grad_(False)

    fast(x).sum().backward()
    found = {"weight": fast.weight.grad, "bias": fast.bias.grad, "input": x.grad}
    assert [name for name, grad in found.items() if grad is None] == [frozen]


def test_without_gradients_and_for_other_types_and_for_nothing_at_all():
    torch.manual_seed(3)
    linear = nn.Linear(5, 3)
    fast = FastLinear.sharing(linear)
    x = torch.randn(4, 5)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), linear(x))
    assert fast(torch.empty(0, 5)).shape == (0, 3)
    half = FastLinear.sharing(copy.deepcopy(linear).bfloat16())
    assert half(x.bfloat16()).dtype == torch.bfloat16


def test_parameters_are_shared_and_the_state_dict_is_the_same():
    linear = nn.Linear(5, 3)
    fast = FastLinear.sharing(linear)
    assert fast.weight is linear.weight
    assert fast.bias is linear.bias
    assert list(fast.state_dict()) == list(linear.state_dict())


def test_a_whole_model_keeps_names_ties_and_gradients(random_model):
    """The tied embedding gets the sum of what it earns as input and as output."""
    one = random_model("llama")
    model = copy.deepcopy(one.alone)
    alone = copy.deepcopy(one.alone)
    names = list(model.state_dict())
    num_linear = sum(type(module) is nn.Linear for module in model.modules())
    assert use_fast_linear(model) == num_linear == 2 * 7 + 1
    assert use_fast_linear(model) == 0, "a second time there is nothing left to replace"
    assert list(model.state_dict()) == names
    assert model.lm_head.weight is model.model.embed_tokens.weight

    ids = torch.tensor([[5, 9, 60, 60, 3, 41]])
    for module in (model, alone):
        module.zero_grad()
        module(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(
            1, ids[0, 1:, None]
        ).sum().backward()

    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("change", ["fused-update", "copy", "dropped"])
def test_generation_never_multiplies_by_weights_of_the_past(change):
    """Without gradients a packed copy of the weight is used: whatever changes the weight must be
    seen."""
    torch.manual_seed(4)
    fast = FastLinear.sharing(nn.Linear(40, 24))
    x = torch.randn(3, 40)
    with torch.no_grad():
        torch.testing.assert_close(
            fast(x), nn.functional.linear(x, fast.weight, fast.bias), rtol=1e-5, atol=1e-5
        )

    if change == "fused-update":
        optimizer = torch.optim.AdamW(fast.parameters(), lr=0.1, fused=True)
        fast(x).sum().backward()
        optimizer.step()
    elif change == "copy":
        with torch.no_grad():
            fast.weight.copy_(torch.randn(24, 40))
    else:
        fast.weight.data = torch.randn(24, 40)
        drop_packed(nn.Sequential(fast))

    with torch.inference_mode():
        torch.testing.assert_close(
            fast(x), nn.functional.linear(x, fast.weight, fast.bias), rtol=1e-5, atol=1e-5
        )


def test_a_copy_of_a_layer_has_weights_of_its_own():
    fast = FastLinear.sharing(nn.Linear(5, 3))
    x = torch.randn(2, 5)
    with torch.no_grad():
        fast(x)
        twin = copy.deepcopy(fast)
        fast.weight.zero_()
        torch.testing.assert_close(twin(x), nn.functional.linear(x, twin.weight, twin.bias))

    assert twin.weight is not fast.weight
    assert twin.weight.abs().sum() > 0


@pytest.mark.usefixtures("with_and_without_kernels")
@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("outputs", [128, 100])  # whole blocks of the packed layout, and not
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_packed_matrix_multiplies_any_number_of_rows(rows, outputs, with_bias):
    torch.manual_seed(5)
    weight = torch.randn(outputs, 96)
    bias = torch.randn(outputs) if with_bias else None
    x = torch.randn(rows, 96)
    other = torch.randn(rows, outputs)
    packed = PackedMatrix(weight, bias)
    plain = nn.functional.linear(x, weight, bias)
    kept = other.clone()

    with torch.inference_mode():
        found = [
            packed.product(x),
            packed.product(x, "swish"),
            packed.product_plus(x, other),
            packed.product_times(x, other),
        ]

    for ours, theirs in zip(
        found, [plain, nn.functional.silu(plain), plain + other, plain * other], strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    assert torch.equal(other, kept)


def test_whole_blocks_are_read_where_they_are():
    """The table of a packed matrix is the packed matrix: a layout that changed would show here as a
    slow path."""
    assert PackedMatrix(torch.randn(128, 96))._tables.shape == (2 * 96, 64)
    assert PackedMatrix(torch.randn(100, 40))._tables is None


def test_weighted_sums():
    table = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    rows = torch.tensor([0, 1, 2, 2])
    starts = torch.tensor([0, 3])
    weights = torch.tensor([[1.0, 2.0, 3.0, 0.5]])
    assert weighted_sums(table, rows, starts, weights).tolist() == [[321.0, 642.0], [50.0, 100.0]]
