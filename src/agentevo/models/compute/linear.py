"""Computes the matrix products of linear layers with oneDNN where it is the faster library: in
float32 on an x86 CPU.

PyTorch computes float32 `F.linear` with MKL. On CPUs that are not Intel's, MKL may run at less than
half the speed of oneDNN (2 cores of an AMD EPYC, 64 rows of SmolLM2's MLP: 125 against 280 GFLOP/s;
`benchmarks/linear.py` prints it for this machine). oneDNN is part of PyTorch, but its operators
have private names, so only this file uses them.

`FastLinear` differs from `nn.Linear` only in the library that multiplies. It has the same
parameters (shared, not copied), the same state dict, and the same gradients up to float32 rounding.

Without gradients a row of a product does not depend on the other rows, to the last bit. oneDNN sums
over the inputs in one order for any number of rows except one. This module sums a single row in
that order (`_of_one_row`), or multiplies two copies of it. `available()` checks whether this
machine's kernels use that order.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from agentevo.models.compute.cpu_kernels import BLOCK as BLOCK_OUT
from agentevo.models.compute.cpu_kernels import FEW_ROWS, CpuKernels, Matrix, cpu_kernels
from agentevo.models.vision.parts import language_modules

PACKED_FOR_ROWS = 64
"""The number of rows for which the packed layout is optimised. It is also good for other numbers,
except a single row."""
ORDERED = 256
"""For at most this many numbers, every kernel used here adds one product after the other, without
rounding the product. For more numbers, oneDNN adds up the sums of stretches, whose lengths depend
on the shape."""
STRETCHES = (512, 1024)
"""The known lengths of these stretches."""
_HAS_BITS_OF_ONEDNN: dict[tuple[object, ...], bool] = {}
"""(kernels, shape, number of threads) -> whether PackedMatrix multiplies few rows with the
kernels."""
SWISH_WIDTH = 16
"""The number of elements in a row with which `_swish` calls oneDNN."""


@cache
def available() -> bool:
    """Whether this build of PyTorch has oneDNN's linear operator on an x86 CPU, and the operator
    sums in the order described at ORDERED and computes the same activation for any number of
    rows."""
    return _has_operators() and _sums_in_order() and _has_one_swish()


def _has_operators() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}
        and all(
            hasattr(torch.ops.mkldnn, name)
            for name in ("_linear_pointwise", "_reorder_linear_weight", "_nbytes", "data_ptr")
        )
    )


@torch.inference_mode()
def _sums_in_order() -> bool:
    """Compares one row that is summed number by number with the same row among others in oneDNN."""
    numbers = torch.Generator().manual_seed(0)
    for num_inputs, num_outputs in ((64, 200), (ORDERED, 64), (ORDERED, 96)):
        weight = torch.randn(num_outputs, num_inputs, generator=numbers, dtype=torch.float32)
        x = torch.randn(67, num_inputs, generator=numbers, dtype=torch.float32)
        rows = torch.arange(num_inputs, dtype=torch.int32)
        ordered_sum = weighted_sums(weight.t().contiguous(), rows, rows[:1], x[0])
        if any(
            not torch.equal(ordered_sum, product(x[:count], weight)[:1]) for count in (2, 17, 67)
        ):
            return False

    return True


@torch.inference_mode()
def _has_one_swish() -> bool:
    """Compares the fused activation of a product with `_swish` of the product."""
    numbers = torch.Generator().manual_seed(0)
    weight = torch.randn(BLOCK_OUT, 64, generator=numbers, dtype=torch.float32)
    x = torch.randn(67, 64, generator=numbers, dtype=torch.float32)
    expected = _swish(product(x, weight).view(1, -1)).view(67, -1)
    return torch.equal(expected, product(x, weight, None, "swish"))


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Literal["none", "swish"] = "none",
) -> torch.Tensor:
    """activation(x @ weight.T + bias) for x [rows, in], weight [out, in], any strides; float32 on
    the CPU. A single row may be summed in another order than several rows."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")


def weighted_sums(
    table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Computes many small products of a vector and a matrix in one call. Sum i is weights @
    table[rows] over the indices from starts[i] to the next start.

    table [N, D], rows [n] and starts [m] integers, weights n numbers of any shape -> [m, D].
    """
    return torch.embedding_bag(table, rows, starts, False, 0, False, weights.reshape(-1))[0]


@cache
def _identity() -> torch.Tensor:
    return torch.eye(SWISH_WIDTH, dtype=torch.float32)


def _swish(row: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) of a row [1, out] of whole blocks, with the same bits as oneDNN's result for
    many rows. PyTorch's SiLU has other bits, so this computes a product with the identity and its
    activation."""
    return product(row.view(-1, SWISH_WIDTH), _identity(), None, "swish").view(1, -1)


class PackedMatrix:
    """A copy of a float32 weight [out, in] and its bias [out], laid out for products without
    gradients.

    oneDNN's kernels multiply many rows. A product of few rows could be as fast as reading memory,
    but oneDNN's kernels are slower. `cpu_kernels`, if available, reach this speed on the same bytes
    [out / BLOCK_OUT, in, BLOCK_OUT]. Without them, a single row is a weighted sum of embeddings
    (`benchmarks/linear.py`): a block of the layout is a table of `in` rows of BLOCK_OUT numbers,
    and x has the weight of each row.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self.num_outputs, self.num_inputs = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)

        self._tables = self._as_tables(weight)
        if self._tables is not None:
            self._rows = torch.arange(len(self._tables), dtype=torch.int32)
            self._blocks = weight.new_ones(self.num_outputs // BLOCK_OUT, 1)
            self._find_stretches()

        self._few = self._for_few_rows()

    def product(
        self, x: torch.Tensor, activation: Literal["none", "swish"] = "none"
    ) -> torch.Tensor:
        """activation(x @ weight.T + bias) for x [rows, in]."""
        if activation == "none" and (few := self._of_few_rows(x)) is not None:
            return few
        if (out := self._of_one_row(x)) is not None:
            return _swish(out) if activation == "swish" else out
        if x.shape[0] == 1:  # oneDNN sums a single row in another order
            return self._multiply(x.expand(2, -1), activation)[:1]
        return self._multiply(x, activation)

    def _multiply(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, activation, [], "")

    def product_plus(self, x: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias + addend, for addend [rows, out]."""
        if (few := self._of_few_rows(x, addend)) is not None:
            return few
        if x.shape[0] == 1:
            return self.product(x).add_(addend)
        return torch.ops.mkldnn._linear_pointwise(x, addend, self._packed, self.bias, "add")

    def product_times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """(x @ weight.T + bias) * factor, for factor [rows, out]."""
        if x.shape[0] == 1:
            return self.product(x).mul_(factor)
        return torch.ops.mkldnn._linear_pointwise(x, factor, self._packed, self.bias, "mul")

    def _of_one_row(self, x: torch.Tensor) -> torch.Tensor | None:
        """x @ weight.T + bias for a single row; None for more rows, or without tables."""
        if x.shape[0] != 1 or self._tables is None:
            return None

        # x repeated for each block; a product with ones is faster than a copy of an expanded row.
        sums = weighted_sums(self._tables, self._rows, self._starts, x * self._blocks)
        if sums.shape[0] > self._blocks.shape[0]:
            sums = sums.view(self._blocks.shape[0], -1, BLOCK_OUT).sum(1)

        out = sums.view(1, -1)
        return out if self.bias is None else out + self.bias

    def _of_few_rows(
        self, x: torch.Tensor, addend: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """x @ weight.T + bias + addend by our own kernel; None for many rows, or without the
        kernel."""
        kernels = cpu_kernels()
        if kernels is None or self._few is None or x.shape[0] > FEW_ROWS:
            return None
        return kernels.product(self._few, x, addend)

    def _for_few_rows(self) -> Matrix | None:
        """The matrix in the form that AgentEvo's kernel needs. None if there is no kernel, or if
        its results differ in any bit from oneDNN's for many rows. This depends only on the shape,
        so it is checked once per shape: every publish packs the model again."""
        kernels = cpu_kernels()
        if kernels is None or self._tables is None:
            return None

        bias = None if self.bias is None else self.bias.data_ptr()
        shape = self.num_inputs, self.num_outputs, self._stretch
        matrix = Matrix(self._tables.data_ptr(), bias, *shape)
        key = kernels, *shape, bias is None, torch.get_num_threads()
        if key not in _HAS_BITS_OF_ONEDNN:
            _HAS_BITS_OF_ONEDNN[key] = self._has_bits_of_onednn(kernels, matrix)

        return matrix if _HAS_BITS_OF_ONEDNN[key] else None

    def _has_bits_of_onednn(self, kernels: CpuKernels, matrix: Matrix) -> bool:
        numbers = torch.Generator().manual_seed(1)
        x = torch.randn(FEW_ROWS + 1, self.num_inputs, generator=numbers, dtype=torch.float32)
        addend = torch.randn(len(x), self.num_outputs, generator=numbers, dtype=torch.float32)
        expected = torch.ops.mkldnn._linear_pointwise(x, addend, self._packed, self.bias, "add")
        return all(
            torch.equal(kernels.product(matrix, x[:count], addend[:count]), expected[:count])
            for count in (1, 2, 17)
        )

    def _find_stretches(self) -> None:
        """Sets where sums start, so that a single row is summed in oneDNN's order. Drops the tables
        if no known order fits."""
        assert self._tables is not None

        numbers = torch.Generator().manual_seed(0)
        x = torch.randn(2, self.num_inputs, generator=numbers, dtype=torch.float32)
        expected = self._multiply(x, "none")[:1]
        for stretch in (*STRETCHES, self.num_inputs):
            starts = torch.arange(0, self.num_inputs, stretch)
            blocks = torch.arange(0, len(self._tables), self.num_inputs)
            self._stretch = stretch
            self._starts = (blocks[:, None] + starts).to(torch.int32).view(-1)
            if torch.equal(cast(torch.Tensor, self._of_one_row(x[:1])), expected):
                return

        self._tables = None

    def _as_tables(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The packed numbers as [out / BLOCK_OUT * in, BLOCK_OUT]. None if oneDNN uses another
        layout, which this function sees in the first and the last block.

        The result is a view of oneDNN's memory, which PackedMatrix keeps alive. A copy would need
        the weight's size in memory once more, and without tables one request generates at 0.8 of
        the speed (docs/lab-notebook.md, 2026-11-22).
        """
        if (
            self.num_outputs % BLOCK_OUT
            or torch.ops.mkldnn._nbytes(self._packed) != 4 * weight.numel()
        ):
            return None

        numbers = (ctypes.c_float * weight.numel()).from_address(
            torch.ops.mkldnn.data_ptr(self._packed)
        )
        tables = torch.frombuffer(numbers, dtype=torch.float32).view(-1, self.num_inputs, BLOCK_OUT)
        for block in (0, len(tables) - 1):
            if not torch.equal(
                tables[block], weight[block * BLOCK_OUT : (block + 1) * BLOCK_OUT].t()
            ):
                return None

        return tables.view(-1, BLOCK_OUT)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(
            x if weight.requires_grad else None, weight
        )  # a frozen base needs no activations
        ctx.has_bias = bias is not None
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0]  # [rows, out]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(grad, weight.t()) if needs_x else None,
            product(grad.t(), x.t()) if needs_weight else None,
            grad.sum(0) if ctx.has_bias and needs_bias else None,
        )


class PackedWeights(ABC):
    """A layer that has a packed copy of its weights."""

    @abstractmethod
    def drop(self) -> None:
        """Discards the copy, which is packed again when needed."""


class FastLinear(nn.Linear, PackedWeights):
    """`nn.Linear` whose float32 CPU products run in oneDNN.

    Without gradients (generation) it multiplies by a copy of the weight in oneDNN's own layout, up
    to 1.5 times faster for few rows, at the cost of the weight's size in memory. The copy is
    dropped by every pass with gradients, because an update follows and fused optimizers don't
    increase the weight's version counter. It is also dropped when the version counter changes, and
    by `drop_packed`.
    """

    _packed: PackedMatrix | None
    _packed_of: list[tuple[int, int]]

    @classmethod
    def sharing(cls, linear: nn.Linear) -> FastLinear:
        """A layer that shares the parameters of `linear`."""
        fast = cls.__new__(cls)
        nn.Module.__init__(fast)
        fast.in_features = linear.in_features
        fast.out_features = linear.out_features
        fast.weight = linear.weight
        fast.bias = linear.bias
        fast.training = linear.training
        fast._packed = None
        fast._packed_of = []
        return fast

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if (
            input.device.type != "cpu"
            or input.dtype != torch.float32
            or self.weight.dtype != torch.float32
            or input.numel() == 0
        ):
            return super().forward(input)

        rows = input.reshape(-1, self.in_features)
        trained = self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)
        if torch.is_grad_enabled() and (rows.requires_grad or trained):
            self.drop()
            out = _LinearFunction.apply(rows, self.weight, self.bias)
        else:
            out = self._packed_weight().product(rows)

        return out.view(*input.shape[:-1], self.out_features)

    def drop(self) -> None:
        """See PackedWeights.drop."""
        self._packed = None

    def _packed_weight(self) -> PackedMatrix:
        parameters = [self.weight] if self.bias is None else [self.weight, self.bias]
        state = [(tensor.data_ptr(), tensor._version) for tensor in parameters]
        if self._packed is None or self._packed_of != state:
            # The trial is not part of the pass: a checkpointed layer repeats the pass without it.
            with _disable_current_modes():
                self._packed = PackedMatrix(*(tensor.detach() for tensor in parameters))
            self._packed_of = state
        return self._packed

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies. It leaves out the packed weight, which can't be copied and is
        packed again when needed."""
        return {**self.__dict__, "_packed": None}


def drop_packed(model: nn.Module) -> None:
    """Discards all packed copies in `model`, after a change of its weights that this module can't
    detect."""
    for module in model.modules():
        for holder in (module, vars(module).get("forward")):
            if isinstance(holder, PackedWeights):
                holder.drop()


def use_fast_linear(model: nn.Module) -> int:
    """Replaces every plain `nn.Linear` of `model` in place, except in a vision tower and its
    projector, and returns their number. Does nothing if `available()` is false."""
    if not available():
        return 0

    replaced = 0
    for parent in language_modules(model):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, FastLinear.sharing(child))
                replaced += 1

    return replaced
