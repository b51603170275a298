"""The CPU's kernels compute what they say, and every row by the same operations whatever is
computed beside it: for AVX2 and, where the processor has it, AVX-512."""

from __future__ import annotations

import ctypes

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from agentevo.inference.embedded.kv_cache import KEY_BLOCK
from agentevo.models.compute import cpu_kernels as module
from agentevo.models.compute.cpu_kernels import (
    FEW_ROWS,
    INSTRUCTIONS,
    CpuKernels,
    KernelCache,
    KernelsUnavailableError,
    Matrix,
    Prefix,
    _openmp,
    load_library,
    why_not,
)
from agentevo.models.compute.linear import PackedMatrix
from agentevo.models.compute.windows import Chunk, Window

HERE = torch.backends.cpu.get_cpu_capability()
SETS = [name for name in INSTRUCTIONS if name == HERE or HERE == "AVX512"]

pytestmark = pytest.mark.skipif(bool(why_not()[0]), reason=f"no kernels here: {why_not()[0]}")


@pytest.fixture(scope="module", params=SETS)
def kernels(request) -> CpuKernels:
    return CpuKernels(load_library(request.param))


@pytest.fixture(autouse=True)
def without_gradients():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture
def one_thread():
    """oneDNN may divide a product otherwise among several, and then does not round as one does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def packed(weight: torch.Tensor, bias: torch.Tensor | None, stretch: int) -> Matrix:
    """The caller keeps `weight` and what this lays out alive: both are tensors of the test."""
    outputs, inputs = weight.shape
    laid = weight.view(outputs // 64, 64, inputs).transpose(1, 2).contiguous()
    matrix = Matrix(
        laid.data_ptr(), None if bias is None else bias.data_ptr(), inputs, outputs, stretch
    )
    matrix.laid = laid
    matrix.added = bias
    return matrix


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (576, 960), (1536, 576), (2560, 192)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("one_thread")
def test_products_have_the_bits_of_onednn(inputs, outputs, with_bias):
    """For every number of rows, through the matrix that layers multiply by."""
    bias = torch.randn(outputs) if with_bias else None
    matrix = PackedMatrix(torch.randn(outputs, inputs), bias)
    assert matrix._few is not None

    x = torch.randn(FEW_ROWS + 1, inputs)
    more = torch.randn(FEW_ROWS + 1, outputs)
    alone = matrix._multiply(x, "none")
    plus = matrix.product_plus(x, more)
    for rows in range(1, FEW_ROWS + 1):
        assert torch.equal(matrix.product(x[:rows]), alone[:rows]), rows
        assert torch.equal(matrix.product_plus(x[:rows], more[:rows]), plus[:rows]), rows

    assert torch.equal(matrix.product(x[7:8]), alone[7:8])


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 12, 13, 16, 17, 33, 64, 100])
def test_products_are_those_of_float64(kernels, rows):
    weight = torch.randn(192, 300)
    bias = torch.randn(192)
    x = torch.randn(rows, 300)
    plus = torch.randn(rows, 192)
    wanted = x.double() @ weight.double().t() + bias + plus
    found = kernels.product(packed(weight, bias, 128), x, plus)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_threads_change_nothing(kernels, threads):
    matrix = packed(torch.randn(320, 576), None, 512)
    x = torch.randn(17, 576)
    before = torch.get_num_threads()
    wanted = kernels.product(matrix, x)

    torch.set_num_threads(threads)
    try:
        assert torch.equal(kernels.product(matrix, x), wanted)
        assert torch.equal(kernels.product(matrix, x[5:6]), wanted[5:6])
    finally:
        torch.set_num_threads(before)


def test_all_is_computed_inside_a_parallel_region_of_somebody_else(kernels):
    x = torch.randn(7, 64)
    wanted = kernels.rms_norm(x, 1e-5)
    found = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def work(nothing):
        found.append(kernels.rms_norm(x, 1e-5))

    _openmp()[0](work, None, 3, 0)
    assert len(found) == 3 and all(torch.equal(one, wanted) for one in found)


@pytest.mark.parametrize("width", [1, 8, 37, 64, 576])
def test_rows(kernels, width):
    x = 5 * torch.randn(70, width)
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    found = kernels.rms_norm(x, 1e-5)
    torch.testing.assert_close(found.double(), normed, rtol=1e-5, atol=1e-6)
    soft = kernels.softmax_(x.clone())
    wanted = torch.softmax(x.double(), -1)
    torch.testing.assert_close(soft.double(), wanted, rtol=2e-6, atol=1e-9)

    for row in (0, 33, 69):
        assert torch.equal(kernels.rms_norm(x[row : row + 1], 1e-5)[0], found[row])
        assert torch.equal(kernels.softmax_(x[row : row + 1].clone())[0], soft[row])


def test_softmax_does_not_see_what_is_minus_infinity(kernels):
    x = torch.randn(45)
    alone = kernels.softmax_(x[None].clone())[0]
    for more in (3, 19, 32):
        wide = torch.cat([x, torch.full((more,), -torch.inf)])[None]
        found = kernels.softmax_(wide)[0]
        assert torch.equal(found[:45], alone) and not found[45:].any()

    before = torch.cat([torch.full((32,), -torch.inf), x])[None]
    assert torch.equal(kernels.softmax_(before)[0, 32:], alone)


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 200.0])
def test_gate(kernels, size):
    gate = size * torch.randn(9, 4096)
    up = torch.randn(9, 4096)
    wanted = gate.double() * torch.sigmoid(gate.double()) * up
    found = kernels.gate_in_place(gate.clone(), up)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=1e-30)
    assert torch.equal(kernels.gate_in_place(gate[3:4].clone(), up[3:4]), found[3:4])


def test_gate_of_the_largest_numbers(kernels):
    gate = torch.tensor([-torch.inf, -3e38, -1e30, -100.0, 100.0, 3e38] * 8)[None]
    found = kernels.gate_in_place(gate.clone(), torch.ones(1, 48))
    torch.testing.assert_close(found, torch.nn.functional.silu(gate), equal_nan=True)


def test_what_is_no_number_stays_none(kernels):
    """A model whose weights have gone wrong must show it."""
    x = torch.randn(4, 64)
    x[1, 5] = torch.nan
    matrix = packed(torch.randn(64, 64), None, 64)
    for found in (
        kernels.product(matrix, x),
        kernels.rms_norm(x, 1e-5),
        kernels.softmax_(x.clone()),
    ):
        assert found[1].isnan().all() and not found[[0, 2, 3]].isnan().any()

    gated = kernels.gate_in_place(x.clone(), torch.ones(4, 64))
    assert torch.equal(gated.isnan(), x.isnan())


def test_rotary_positions(kernels):
    heads = torch.randn(11, 9, 32)
    angles = torch.randn(11, 16).repeat(1, 2)
    cos = angles.cos()
    sin = angles.sin()
    q, k = kernels.rotate(heads, 5, 2, cos, sin)
    by_head = [part.transpose(0, 1)[None] for part in (heads[:, :5], heads[:, 5:7])]
    wanted = apply_rotary_pos_emb(*by_head, cos[None], sin[None])
    for found, other in zip((q, k), wanted, strict=True):
        torch.testing.assert_close(found, other[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


class Sequences:
    """Keys and values of three sequences of one layer, 3 slots of 2 key-value heads, and of a
    prefix that they may share."""

    groups = 2
    repeat = 3
    dim = 48
    scaling = 0.3

    def __init__(self, kernels: CpuKernels, lengths: list[int], prefix: int) -> None:
        self.kernels = kernels
        self.lengths = lengths
        self.num_prefix = prefix
        whole = [prefix + length for length in lengths]
        shared = torch.randn(2, prefix, self.groups, self.dim)
        self.kv = [
            torch.cat([shared, torch.randn(2, n - prefix, self.groups, self.dim)], 1) for n in whole
        ]
        self.keys, self.values, self.cache = self.empty(len(lengths), max(lengths))
        for slot, kv in enumerate(self.kv):
            self.keep(self.cache, slot, kv[:, prefix:])

        if prefix:
            keys, values, cache = self.empty(1, prefix)
            self.keep(cache, 0, shared)
            self.of_prefix = keys[0], values[0, :, :prefix].contiguous()

        self.prefix = Prefix.of(*self.of_prefix) if prefix else None

    def empty(self, slots: int, places: int) -> tuple[torch.Tensor, torch.Tensor, KernelCache]:
        """Memory that holds no number where nothing was written."""
        blocks = -(-places // KEY_BLOCK)
        keys = torch.full((slots, self.groups, blocks, self.dim, KEY_BLOCK), torch.nan)
        values = torch.full((slots, self.groups, KEY_BLOCK * blocks + 3, self.dim), torch.nan)
        return keys, values, KernelCache.of(keys, values)

    def keep(self, cache: KernelCache, slot: int, kv: torch.Tensor) -> None:
        places = torch.arange(kv.shape[1])
        self.kernels.keep(cache, kv[0], kv[1], torch.full_like(places, slot), places)

    def attend(
        self, counts: list[int], window: Window, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries of the last counts[i] tokens of each sequence, and what they attend to."""
        q = torch.randn(sum(counts), self.groups * self.repeat, self.dim)
        tokens = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        for row, count in enumerate(counts):
            tokens[row, :count] = torch.arange(count) + sum(counts[:row])
        out = torch.full_like(q, torch.nan)
        self.call(q, tokens, list(range(len(counts))), self.lengths, counts, window, out, sinks)
        return q, out

    def call(self, q, tokens, slots, lengths, counts, window, out, sinks=None) -> None:
        self.kernels.attend(
            self.cache,
            q,
            tokens=tokens.contiguous(),
            slots=torch.tensor(slots),
            lengths=torch.tensor(lengths),
            counts=torch.tensor(counts),
            prefix=self.prefix,
            scaling=self.scaling,
            window=window,
            sinks=sinks,
            out=out,
        )

    def wanted(
        self,
        q: torch.Tensor,
        counts: list[int],
        window: Window,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The same in float64."""
        rows = []
        for kv, count, q_of in zip(self.kv, counts, q.double().split(counts), strict=True):
            keys, values = kv.double().repeat_interleave(self.repeat, 2)
            n = len(keys)
            place = torch.arange(n)
            query = torch.arange(n - count, n)[:, None]
            if isinstance(window, Chunk):
                near = place // window.size == query // window.size
            else:
                near = place > query - (window or n)
            seen = (place <= query) & near
            scores = torch.einsum("qhd,khd->hqk", q_of * self.scaling, keys)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                beside = sinks.double().view(-1, 1, 1).expand(-1, count, 1)
                scores = torch.cat([scores, beside], -1)
            weights = torch.softmax(scores, -1)[..., :n]
            rows.append(torch.einsum("hqk,khd->qhd", weights, values))

        return torch.cat(rows)


@pytest.mark.parametrize("window", [None, 1, 40, 300, Chunk(7), Chunk(90)])
@pytest.mark.parametrize("prefix", [0, 33, 300])
@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 0, 7], [5, 70, 20]])
def test_attention(kernels, counts, prefix, window):
    sequences = Sequences(kernels, [70, 300, 33], prefix)
    q, out = sequences.attend(counts, window)
    wanted = sequences.wanted(q, counts, window)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("prefix", [0, 33])
def test_sinks(kernels, prefix, window):
    """A score for each head; some far above those of the keys, and some far below."""
    sequences = Sequences(kernels, [70, 300, 33], prefix)
    sinks = torch.linspace(-20, 20, sequences.groups * sequences.repeat)
    sinks = sinks.view(sequences.groups, sequences.repeat)
    q, out = sequences.attend([5, 70, 20], window, sinks)
    wanted = sequences.wanted(q, [5, 70, 20], window, sinks)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 50, Chunk(50)])
def test_attention_does_not_depend_on_company_nor_on_where_a_prefix_lies(kernels, window):
    lengths = [70, 300, 33]
    counts = [20, 40, 9]
    shared = Sequences(kernels, lengths, 150)
    q, out = shared.attend(counts, window)

    own = Sequences(kernels, [150 + length for length in lengths], 0)
    for slot, kv in enumerate(shared.kv):
        own.keep(own.cache, slot, kv)

    starts = [0, 20, 60]
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for token in (0, count - 1):  # alone, in a slot that has all of it
            one = torch.full_like(q[:1], torch.nan)
            seen = 150 + lengths[row] - count + token + 1
            place = torch.zeros(1, 1, dtype=torch.int64)
            at = start + token
            own.call(q[at : at + 1].contiguous(), place, [row], [seen], [1], window, one)
            assert torch.equal(one[0], out[at])


def test_a_function_that_computes_something_else_is_found(monkeypatch):
    """So that a compiler's mistake does no harm."""

    class Wrong(CpuKernels):
        def rms_norm(self, x: torch.Tensor, epsilon: float) -> torch.Tensor:
            return super().rms_norm(x, epsilon) * 1.001

    with pytest.raises(KernelsUnavailableError, match="rms_norm gives other results"):
        module._compare(Wrong(load_library()))


def test_they_are_compared_in_float32_whatever_the_default_is():
    torch.set_default_dtype(torch.float64)
    try:
        module._compare(CpuKernels(load_library()))
        assert PackedMatrix(torch.randn(64, 64, dtype=torch.float32))._few is not None
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_matrix_whose_bits_are_not_onednns_is_multiplied_by_onednn(monkeypatch):
    class Wrong(CpuKernels):
        def product(self, weight, x, plus=None):
            return super().product(weight, x, plus) * (1 + 2**-23)

    monkeypatch.setattr(module, "_load_kernels", lambda: (Wrong(load_library()), "", ""))
    matrix = PackedMatrix(torch.randn(64, 64))
    x = torch.randn(8, 64)
    assert matrix._few is None
    assert torch.equal(matrix.product(x), matrix._multiply(x, "none"))


def test_the_threads_are_pytorchs():
    """One OpenMP in the process: two pools of threads would wait for one another's processors."""
    load_library()
    with open("/proc/self/maps") as lines:
        files = {line.split()[-1] for line in lines}
    assert len({file for file in files if "/libgomp" in file or "/libiomp" in file}) == 1
