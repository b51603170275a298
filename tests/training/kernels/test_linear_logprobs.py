"""Log-probs and entropies from hidden states, and their gradients, against autograd on the whole
logits; and the memory that it takes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slow import soak

from agentevo.training.kernels import cells, score_function
from agentevo.training.kernels import linear_logprobs as module
from agentevo.training.kernels.linear_logprobs import linear_logprobs, linear_logprobs_and_squares
from examples import examples


@pytest.fixture(scope="module", autouse=True)
def small_cells():
    """Cells of at most 5 rows and about a hundred scores, of which the first two or so are kept:
    small matrices have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "CELL_ROWS", {"cpu": 5})
        patch.setattr(cells, "CELL_BYTES", {"cpu": 4 * 100})
        patch.setattr(cells, "COLUMN_STEP", 4)
        patch.setattr(module, "KEPT_BYTES", 4 * 250)
        yield


def dense(hidden, weight, bias, rows, targets, temperature=1.0, softcap=None, logit_scale=1.0):
    logits = (
        hidden @ weight.T * logit_scale
        if bias is None
        else (hidden @ weight.T + bias) * logit_scale
    )
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, -1)
    return logp[rows, targets], -(logp.exp() * logp).sum(-1)


class Problem:
    """Random inputs, and what is asked of the outputs."""

    def __init__(
        self, seed, num_rows, num_tokens, num_targets, width=6, dtype=torch.float32, with_bias=False
    ):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.inputs = [
            normal(num_rows, width),
            normal(num_tokens, width),
            normal(num_tokens) if with_bias else None,
        ]
        self.rows = torch.randint(max(1, num_rows), (num_targets,), generator=generator)
        self.targets = torch.randint(num_tokens, (num_targets,), generator=generator)
        self.of_logp = normal(num_targets)
        self.of_entropy = normal(num_rows)

    def solved(self, function, entropy=True, **tail):
        """Log-probs, entropies, and the gradients of hidden states, weight and bias."""
        leaves = [None if one is None else one.clone().requires_grad_() for one in self.inputs]
        logp, entropies = function(*leaves, self.rows, self.targets, **tail)
        loss = (self.of_logp * logp).sum()
        (loss + (self.of_entropy * entropies).sum() if entropy else loss).backward()
        return [
            logp.detach(),
            entropies.detach(),
            *(leaf.grad for leaf in leaves if leaf is not None),
        ]


@contextmanager
def one_kernel_per_cell(*, compiled=False):
    """As on a GPU; without the compiler, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_function, "compiles", lambda kind: True)
        if not compiled:
            patch.setattr(module, "_compile", lambda function: function)
        yield


def assert_same(ours, theirs, tolerance):
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@settings(max_examples=examples(60), derandomize=True)
@given(
    shape=st.tuples(st.integers(0, 13), st.integers(1, 90), st.integers(0, 30)),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    softcap=st.sampled_from([None, 2.5]),
    logit_scale=st.sampled_from([1.0, 0.4]),
    with_bias=st.booleans(),
    entropy=st.booleans(),
)
@example((13, 90, 30), 0.6, 2.5, 0.4, True, True)
@example((13, 90, 30), 1.0, None, 1.0, False, False)
@example((0, 90, 0), 1.0, None, 1.0, True, True)
@example((5, 1, 7), 1.0, None, 1.0, False, True)
def test_any_shape_and_tail(shape, temperature, softcap, logit_scale, with_bias, entropy):
    num_rows, num_tokens, num_targets = shape
    tail = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        problem = Problem(
            num_tokens,
            num_rows,
            num_tokens,
            num_targets if num_rows else 0,
            dtype=dtype,
            with_bias=with_bias,
        )
        assert_same(
            problem.solved(linear_logprobs, entropy, **tail),
            wanted := problem.solved(dense, entropy, **tail),
            tolerance,
        )
        with one_kernel_per_cell():
            assert_same(problem.solved(linear_logprobs, entropy, **tail), wanted, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("entropy", [True, *soak(False)])
def test_one_compiled_kernel_per_cell(entropy):
    problem = Problem(3, 23, 170, 40)
    with one_kernel_per_cell(compiled=True):
        found = problem.solved(linear_logprobs, entropy, temperature=0.7)
    assert_same(found, problem.solved(dense, entropy, temperature=0.7), 1e-5)


def test_targets_keep_their_digits_where_products_are_rounded():
    """A sure token's gradient is what is left of two numbers that are almost alike."""
    hidden = torch.zeros(2, 8, dtype=torch.bfloat16)
    hidden[:, 0] = 8.0
    weight = torch.zeros(40, 8, dtype=torch.bfloat16)
    weight[7, 0] = 1.0
    rows = torch.tensor([0, 0, 1])
    targets = torch.tensor([7, 7, 7])

    def gradient(dtype):
        leaf = weight.to(dtype, copy=True).requires_grad_()
        logp, _ = linear_logprobs(hidden.to(dtype), leaf, None, rows, targets)
        logp.sum().backward()
        return float(leaf.grad[7, 0])

    with one_kernel_per_cell():
        assert gradient(torch.bfloat16) == pytest.approx(gradient(torch.float64), rel=0.02)


@pytest.mark.parametrize("kept", [0, 10**9])
def test_what_is_kept_changes_nothing(kept, monkeypatch):
    problem = Problem(3, 23, 170, 40, with_bias=True)
    some = problem.solved(linear_logprobs, softcap=2.0)
    monkeypatch.setattr(module, "KEPT_BYTES", kept)
    assert_same(problem.solved(linear_logprobs, softcap=2.0), some, 1e-7)


@pytest.mark.parametrize("num_rows", [1, 600, 1100])
def test_cells_of_the_real_size(num_rows, monkeypatch):
    monkeypatch.setattr(cells, "CELL_ROWS", {"cpu": 1024})
    monkeypatch.setattr(cells, "CELL_BYTES", {"cpu": 8 * 2**20})
    problem = Problem(4, num_rows, 2500, 700)
    assert_same(problem.solved(linear_logprobs), problem.solved(dense), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_are_finite_differences(softcap):
    problem = Problem(5, 7, 30, 9, width=3, dtype=torch.float64, with_bias=True)
    leaves = [leaf.requires_grad_() for leaf in problem.inputs]

    def function(*leaves):
        return linear_logprobs(*leaves, problem.rows, problem.targets, 0.8, softcap, 1.3)

    assert torch.autograd.gradcheck(function, leaves)


def test_one_gradient_alone():
    problem = Problem(6, 9, 60, 12)
    wanted = problem.solved(dense)
    for place in (0, 1):
        leaves = [
            one.clone().requires_grad_(number == place)
            for number, one in enumerate(problem.inputs[:2])
        ]
        logp, entropy = linear_logprobs(*leaves, None, problem.rows, problem.targets)
        ((problem.of_logp * logp).sum() + (problem.of_entropy * entropy).sum()).backward()
        assert_same([leaves[place].grad], [wanted[2 + place]], 1e-5)
        assert leaves[1 - place].grad is None

    leaves = [one.clone().requires_grad_() for one in problem.inputs[:2]]
    (
        problem.of_entropy * linear_logprobs(*leaves, None, problem.rows, problem.targets)[1]
    ).sum().backward()
    other = [one.clone().requires_grad_() for one in problem.inputs[:2]]
    (problem.of_entropy * dense(*other, None, problem.rows, problem.targets)[1]).sum().backward()
    assert_same([leaf.grad for leaf in leaves], [leaf.grad for leaf in other], 1e-5)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_output_layer(dtype, softcap, entropy):
    """The gradient is made in the forward pass; the dense one comes from the same products, rounded
    as they are."""
    problem = Problem(10, 17, 150, 40, with_bias=True, dtype=dtype)
    found = []
    for function in (linear_logprobs, dense):
        hidden = problem.inputs[0].clone().requires_grad_()
        given = (
            (hidden, *problem.inputs[1:])
            if function is linear_logprobs
            else (hidden.float(), *(x.float() for x in problem.inputs[1:]))
        )
        logp, entropies = function(*given, problem.rows, problem.targets, 0.7, softcap, 1.2)
        loss = (problem.of_logp * logp).sum()
        (loss + (problem.of_entropy * entropies).sum() if entropy else loss).backward()
        found.append((logp.detach(), entropies.detach(), hidden.grad.float()))

    assert_same(*found, 1e-5 if dtype == torch.float32 else 0.05)


def test_a_sure_model_far_from_zero_keeps_its_digits():
    """As in test_logprobs.py; the products are whole numbers, so they have no rounding."""
    hidden = torch.ones(2, 1)
    weight = torch.full((5, 1), 300.0)
    weight[2] += 8.0
    rows = torch.arange(2)
    targets = torch.tensor([2, 2])
    gradients = []
    for dtype in (torch.float32, torch.float64):
        matrix = weight.to(dtype, copy=True).requires_grad_()
        if dtype == torch.float32:
            logp, entropy = linear_logprobs(hidden, matrix, None, rows, targets)
        else:
            table = (hidden.double() @ matrix.t()).log_softmax(-1)
            logp = table[rows, targets]
            entropy = -(table.exp() * table).sum(-1)

        (logp.sum() + 0.1 * entropy.sum()).backward()
        gradients.append((logp.double(), entropy.double(), matrix.grad.double()))

    for ours, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, exact, rtol=2e-4, atol=1e-9)


def test_scores_far_apart_stay_finite():
    hidden = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    weight = torch.linspace(-1000.0, 1000.0, 201).unsqueeze(1).requires_grad_()
    logp, entropy = linear_logprobs(
        hidden, weight, None, torch.tensor([0, 0, 1]), torch.tensor([200, 0, 200])
    )
    assert logp.tolist() == pytest.approx([-4.54e-5, -2000.0, -2000.0], abs=1e-6, rel=1e-6)
    assert entropy.tolist() == pytest.approx([5e-4, 5e-4], abs=1e-5)

    (logp.sum() + entropy.sum()).backward()
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


@pytest.mark.slow
def test_half_precision_is_summed_in_float32():
    """4,000 rows that each add a little to the same weights: summed up in bfloat16 block by block,
    the end of them would be lost."""
    problem = Problem(7, 4000, 40, 4000, dtype=torch.bfloat16)
    problem.of_logp = torch.full((4000,), 1 / 64)
    problem.of_entropy = torch.zeros(4000)
    problem.inputs[0] = problem.inputs[0].abs()
    problem.targets = torch.zeros_like(problem.targets)
    ours = problem.solved(linear_logprobs, entropy=False)
    assert [our.dtype for our in ours] == [
        torch.float32,
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    ]

    products = (
        problem.inputs[0] @ problem.inputs[1].T
    )  # rounded to bfloat16, as the model's own output layer does
    logp = torch.log_softmax(products.float(), -1)
    assert_same(ours[:1], [logp[problem.rows, problem.targets]], 1e-5)

    exact = Problem(7, 4000, 40, 4000)
    exact.inputs = [problem.inputs[0].float(), problem.inputs[1].float(), None]
    exact.rows = problem.rows
    exact.targets = problem.targets
    exact.of_logp = problem.of_logp
    wanted = exact.solved(dense, entropy=False)[3]
    assert float((ours[3].float() - wanted).norm() / wanted.norm()) < 4e-3


def test_squares_of_probabilities():
    problem = Problem(8, 12, 90, 15, with_bias=True)
    logp, squares = linear_logprobs_and_squares(
        *problem.inputs, problem.rows, problem.targets, 0.7, 3.0, 1.2
    )
    hidden, weight, bias = problem.inputs
    probabilities = torch.softmax(
        3.0 * torch.tanh((hidden @ weight.T + bias) * (1.2 / 3.0)) / 0.7, -1
    )
    assert_same(
        [logp.exp(), squares],
        [probabilities[problem.rows, problem.targets], probabilities.square().sum(-1)],
        1e-5,
    )


def saved_bytes(num_rows, num_tokens):
    """What autograd keeps beside the inputs."""
    problem = Problem(9, num_rows, num_tokens, num_rows)
    leaves = [one.requires_grad_() for one in problem.inputs[:2]]
    given_to = {tensor.data_ptr() for tensor in (*leaves, problem.rows)}
    sizes: list[int] = []

    def pack(tensor):
        if tensor.data_ptr() not in given_to:
            sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_logprobs(*leaves, None, problem.rows, problem.targets)

    return sum(sizes)


@pytest.mark.soak
def test_what_is_saved_does_not_grow_with_the_vocabulary():
    of_rows = saved_bytes(40, 2000) - module.KEPT_BYTES
    assert of_rows <= 40 * 4 * 10, "a few numbers a row"
    assert abs(saved_bytes(40, 32000) - saved_bytes(40, 2000)) <= 4 * 100, "one cell more or less"
    assert saved_bytes(160, 2000) - module.KEPT_BYTES <= 4 * 40 * 4 * 10


PEAK = """
import re, sys, torch
from pathlib import Path
from agentevo.training.kernels import cells, linear_logprobs as module

def resident(name):
    status = Path("/proc/self/status").read_text()
    return int(re.search(name + r":\\s+(\\d+) kB", status).group(1)) / 1024

module.KEPT_BYTES, cells.CELL_BYTES = 8 * 2**20, {"cpu": 2 * 2**20}
num_rows, num_tokens, width = 1000, 40000, 16
hidden = torch.randn(num_rows, width, requires_grad=True)
weight = torch.randn(num_tokens, width, requires_grad=True)
rows, targets = torch.arange(num_rows), torch.randint(num_tokens, (num_rows,))

def once(num_rows):
    part = slice(num_rows)
    logp, entropy = module.linear_logprobs(hidden[part], weight, None, rows[part], targets[part])
    (logp.sum() + entropy.sum()).backward()

once(10)
before = resident("VmRSS")
once(num_rows)
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.cold_start
def test_peak_memory_is_far_below_the_logits():
    """160 MB of logits, by an update that may keep 8 MB."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 50
