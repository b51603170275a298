"""Log-probs and entropies of chosen tokens, and their gradients, against autograd on a plain
log-softmax."""

from __future__ import annotations

import pytest
import torch

from agentevo.training.kernels.logprobs import BLOCK_ROWS, selected_logprobs


def plain(logits, rows, targets, temperature):
    logp = torch.log_softmax(logits / temperature, -1)
    return logp[rows, targets], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_values_and_gradients(temperature, with_entropy):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 11, generator=generator)

    rows = torch.tensor(
        [0, 4, 4, 2, 4]
    )  # one row is asked thrice, two of them for the same token, others not at all
    targets = torch.tensor([10, 3, 3, 0, 7])
    weights = torch.randn(5, generator=generator)
    entropy_weights = torch.randn(5, generator=generator) if with_entropy else torch.zeros(5)
    found = []
    for function in (selected_logprobs, plain):
        leaf = logits.clone().requires_grad_()
        logp, entropy = function(leaf, rows, targets, temperature)
        ((weights * logp).sum() + (entropy_weights * entropy).sum()).backward()
        found.append((logp.detach(), entropy.detach(), leaf.grad))

    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS - 1])
def test_more_rows_than_a_block_holds(num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    logits = 3 * torch.randn(num_rows, 11, generator=generator)

    rows = torch.randperm(num_rows, generator=generator)
    targets = torch.randint(11, (num_rows,), generator=generator)
    weights = torch.randn(num_rows, generator=generator)
    found = []
    for function in (selected_logprobs, plain):
        leaf = logits.clone().requires_grad_()
        logp, entropy = function(leaf, rows, targets, 0.7)
        (weights * (logp - 0.5 * entropy)).sum().backward()
        found.append((logp.detach(), entropy.detach(), leaf.grad))

    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("height", [0.0, 300.0])
def test_a_sure_model_far_from_zero_keeps_its_digits(height):
    """What a gradient is made of is 1 - p of the target: with one number for the log of the
    partition, logits around 300 left 1e-5 of it, a hundredth where p is 0.999."""
    logits = torch.full((3, 5), height)
    logits[:, 2] += 8.0
    rows = torch.arange(3)
    targets = torch.tensor([2, 2, 2])
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaf = logits.to(dtype, copy=True).requires_grad_()
        if dtype == torch.float32:
            logp, entropy = selected_logprobs(leaf, rows, targets)
        else:
            table = leaf.log_softmax(-1)
            logp = table[rows, targets]
            entropy = -(table.exp() * table).sum(-1)

        (logp.sum() + 0.1 * entropy.sum()).backward()
        gradients.append((logp.double(), entropy.double(), leaf.grad.double()))

    for ours, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, exact, rtol=2e-4, atol=1e-9)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1000.0, 0.0, -1000.0]], requires_grad=True)
    logp, entropy = selected_logprobs(logits, torch.tensor([0, 0]), torch.tensor([0, 2]))
    assert logp.tolist() == [0.0, -2000.0]
    (logp.sum() + entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all()
    assert torch.isfinite(entropy).all()


def test_half_precision_logits_are_computed_in_float32():
    logits = (
        torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    )
    rows = torch.tensor([0, 1])
    targets = torch.tensor([3, 4])
    logp, _ = selected_logprobs(logits, rows, targets)
    expected, _ = plain(logits.detach().float(), rows, targets, 1.0)
    torch.testing.assert_close(logp.detach(), expected)
    logp.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
