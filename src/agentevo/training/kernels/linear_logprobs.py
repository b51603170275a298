"""Computes log-probs and entropies directly from hidden states: output layer and softmax, without
the whole logits [R, V].

Scores are computed in cells of CELL_BYTES. For each row, the forward pass keeps a running maximum
a, s = sum e^(z - a) and t = sum e^(z - a) (z - a). Then log Z = a + log s, and the entropy is log s
- t / s (the online softmax of arXiv 1805.02867, with a first moment). The three numbers are kept
separate, because a large a would remove the digits of log Z that express the model's certainty. The
backward pass computes each cell's scores again, and adds the cell's contribution to the gradients
of the hidden states and of the weight. Columns are the outer loop, so a column's weight gradient is
complete, in float32, before the next one begins.

The first KEPT_BYTES of products are kept for the backward pass, because keeping them is faster than
recomputing them (a write instead of 2 H operations per score). The other products are recomputed,
which is a fourth product in addition to the three that every method needs. So a small batch runs at
the dense speed, and the memory of a large batch depends neither on R nor on V. If the output layer
is frozen (adapters elsewhere), large batches need no fourth product either: the gradient of log Z
in the hidden states [R, H] does not depend on the loss, so the forward pass computes it. Only an
entropy bonus then needs recomputed products. benchmarks/logprobs.py measures this. oneDNN computes
float32 products on a CPU (models/compute/linear.py), and PyTorch all others. On a GPU, a cell's
arithmetic is one kernel if the logits are the products times a number. The kernel computes the
softmax of a cell as fast as it reads and writes the cell. Separate operations would need about ten
passes over memory, of four bytes a number, instead of one of two bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import distributed

from agentevo.models.compute.linear import available, product
from agentevo.models.token_rows import LOWEST
from agentevo.training.kernels.cells import Cell, Cells
from agentevo.training.kernels.score_function import ScoreFunction, sum_dtype
from agentevo.training.kernels.token_penalties import PenaltyTable
from agentevo.training.kernels.vocabulary import VocabularySlice

KEPT_BYTES = 256 * 2**20
"""The size of the products that are kept for the backward pass, in bytes."""


def linear_logprobs(  # noqa: PLR0913 (the factors of a score, and what bounds it)
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    *,
    masks: torch.Tensor | None = None,
    penalties: PenaltyTable | None = None,
    vocabulary_slice: VocabularySlice | None = None,
    num_tokens: int | None = None,
    banned: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [R, H], weight [V, H], bias [V], rows [M] and targets [M] int64 -> log-probs [M] of
    token targets[m] under softmax(z[rows[m]] / temperature), and the entropy [R] of each row, in
    nats.

    z = s or softcap * tanh(s / softcap), with s = logit_scale * (hidden @ weight.T + bias). `masks`
    [R, W]: the tokens that a row may predict (token_masks.py); the others have no probability.
    `penalties`: changes of z before the softmax (token_penalties.py). `vocabulary_slice`: the
    tokens of weight and bias, if other processes have the other tokens; then all processes must
    call this. `num_tokens`: only this many first ids have a probability; None for all V. `banned`:
    ids among them that have none, either. Once differentiable in hidden, weight and bias. Products
    are computed in their dtype, everything else in at least float32. Memory on top of the
    gradients: KEPT_BYTES and a few cells.
    """
    score_function = ScoreFunction(
        temperature, softcap, logit_scale, masks, penalties, num_tokens, _on(hidden, banned)
    ).within(vocabulary_slice)
    targets, outside = score_function.within_tokens(targets)
    trained = torch.is_grad_enabled() and (
        weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    needed = trained or (torch.is_grad_enabled() and hidden.requires_grad)
    ahead = (
        needed
        and not trained
        and penalties is None
        and vocabulary_slice is None
        and len(hidden) * len(weight) * hidden.element_size() > KEPT_BYTES
    )
    room = KEPT_BYTES if needed and not ahead else 0
    logp, entropy = _LinearLogprobs.apply(
        hidden, weight, bias, rows, targets, score_function, room, ahead
    )
    return (logp if outside is None else logp.masked_fill(outside, LOWEST)), entropy


@torch.no_grad()
def linear_logprobs_and_squares(  # noqa: PLR0913 (those of linear_logprobs)
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    *,
    masks: torch.Tensor | None = None,
    penalties: PenaltyTable | None = None,
    vocabulary_slice: VocabularySlice | None = None,
    num_tokens: int | None = None,
    banned: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `linear_logprobs`, without gradient. Returns log-probs [M], and for each row the sum of
    p^2 over the vocabulary [R], which is the probability that two samples agree."""
    score_function = ScoreFunction(
        temperature, softcap, logit_scale, masks, penalties, num_tokens, _on(hidden, banned)
    ).within(vocabulary_slice)
    targets, outside = score_function.within_tokens(targets)
    cells, local_targets = score_function.divide(hidden, weight, rows, targets)
    sums = _sweep(hidden, weight, bias, cells, score_function, 0, squares=True)
    sums.combine(score_function.vocabulary_slice, local_targets, len(targets))
    logp = sums.logprobs(rows)
    chance = sums.squares / sums.total.square()
    return (logp if outside is None else logp.masked_fill(outside, LOWEST)), chance


@dataclass(eq=False)
class _Sums:
    """The running sums over each row's scores, see the module. All are [R], except `picked` [M],
    which has the targets' scores."""

    top: torch.Tensor
    total: torch.Tensor
    moment: torch.Tensor
    squares: torch.Tensor
    picked: torch.Tensor
    pull: torch.Tensor | None
    """[R, H] sum of e^(z - a) dz/dhidden, without the constant slope of the scores."""
    kept_products: list[torch.Tensor]
    """The products of the first cells."""

    @classmethod
    def empty(cls, hidden: torch.Tensor, num_targets: int, ahead: bool) -> _Sums:
        zeros = hidden.new_zeros(len(hidden), dtype=sum_dtype(hidden))
        pull = torch.zeros_like(hidden, dtype=zeros.dtype) if ahead else None
        return cls(
            zeros + LOWEST,
            zeros,
            zeros.clone(),
            zeros.clone(),
            zeros.new_empty(num_targets),
            pull,
            [],
        )

    def logprobs(self, rows: torch.Tensor) -> torch.Tensor:
        """The log-probs [M]. They are exact even if one score is far above all others."""
        return (self.picked - self.top[rows]) - self.total.log()[rows]

    def combine(
        self,
        vocabulary_slice: VocabularySlice | None,
        local_targets: torch.Tensor | slice,
        num_targets: int,
    ) -> None:
        """Combines the sums over the whole vocabulary, if other processes have parts of it.
        `local_targets` are the targets whose scores this process has."""
        if vocabulary_slice is None:
            return
        assert isinstance(local_targets, torch.Tensor)
        self.top, self.total, self.moment, self.squares, self.picked = vocabulary_slice.combine(
            self.top,
            (self.total, self.moment, self.squares),
            self.picked,
            local_targets,
            num_targets,
        )

    def absorb_products(self, rows: slice, products: torch.Tensor, slope: float) -> None:
        """As `absorb`, in one kernel, for scores that are the products times a number."""
        updated = _compile(_absorb_cell)(
            products, slope, self.top[rows], self.total[rows], self.moment[rows]
        )
        self.top[rows], self.total[rows], self.moment[rows] = updated

    def absorb(
        self, rows: slice, scores: torch.Tensor, squares: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds one cell's scores. Returns their e^(z - a), and the factor by which the new a has
        scaled the earlier sums."""
        # Step 1: the new maximum a, and the factor by which it scales down the earlier sums.
        top = torch.maximum(self.top[rows], scores.amax(1))
        fall = self.top[rows] - top
        fade = fall.exp()

        # Step 2: this cell's e^(z - a), added to the scaled sums s and t (t moves with a as well).
        below = scores - top.unsqueeze(1)
        weights = below.exp()
        self.moment[rows] = (self.moment[rows] + self.total[rows] * fall) * fade + below.mul_(
            weights
        ).sum(1)
        self.total[rows] = self.total[rows] * fade + weights.sum(1)
        if squares:
            self.squares[rows] = self.squares[rows] * fade.square() + weights.square().sum(1)

        self.top[rows] = top
        return weights, fade


def _sweep(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cells: Cells,
    score_function: ScoreFunction,
    room: int,
    *,
    squares: bool = False,
    ahead: bool = False,
) -> _Sums:
    """Runs one pass over all cells. Keeps up to `room` bytes of products."""
    sums = _Sums.empty(hidden, len(cells.order), ahead)
    fused = score_function.is_plain(hidden) and not squares and not ahead
    for index in range(len(cells.columns)):
        for cell in cells.in_column(index):
            # Step 1: the cell's products, which are kept while there is room.
            products = _products(hidden, weight, bias, cell)
            room -= products.nbytes
            if room >= 0:
                sums.kept_products.append(products)

            if fused:
                sums.picked[cell.chosen] = score_function.plain_scores(products[cell.places], None)
                sums.absorb_products(cell.rows, products, score_function.slope)
                continue

            # Step 2: the targets' scores, and the running sums of every row.
            bent = None if score_function.softcap is None else score_function.bend(products)
            scores = score_function.scores(products, cell, bent)
            sums.picked[cell.chosen] = scores[cell.places]
            weights, fade = sums.absorb(cell.rows, scores, squares)

            # Step 3 (frozen output layer, large batch): the gradient of log Z, ahead of the loss.
            if sums.pull is not None:
                slope = weights if bent is None else weights.mul_(_slope_of(bent))
                pulled = _multiply(slope.to(weight.dtype), weight[cell.columns].t())
                sums.pull[cell.rows] = sums.pull[cell.rows].mul_(fade.unsqueeze(1)).add_(pulled)

    return sums


class _LinearLogprobs(torch.autograd.Function):
    """With scores z, p = softmax(z), H its entropy: dlogp_y/dz = e_y - p and dH/dz = -p (log p +
    H)."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd calls it by position)
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: torch.Tensor,
        targets: torch.Tensor,
        score_function: ScoreFunction,
        room: int,
        ahead: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cells, local_targets = score_function.divide(hidden, weight, rows, targets)
        sums = _sweep(hidden, weight, bias, cells, score_function, room, ahead=ahead)
        sums.combine(score_function.vocabulary_slice, local_targets, len(targets))
        mean = sums.moment / sums.total
        pull = None if sums.pull is None else sums.pull.div_(sums.total.unsqueeze(1))
        ctx.save_for_backward(
            hidden, weight, bias, sums.top, sums.total, mean, sums.picked, pull, *sums.kept_products
        )
        ctx.cells = cells
        ctx.score_function = score_function
        ctx.rows = rows
        ctx.local_targets = local_targets
        ctx.set_materialize_grads(False)

        return sums.logprobs(rows), sums.total.log() - mean

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, top, total, mean, picked, pull, *kept_products = ctx.saved_tensors
        slopes = _Slopes.of(grads, ctx.rows, top, total, mean, ctx.score_function)
        fused = bias is None and pull is None and ctx.score_function.is_plain(hidden)
        slopes = slopes.of_targets(ctx.local_targets, ctx.cells, fused)
        if pull is not None and slopes.of_entropy is None:
            return slopes.of_hidden(pull, weight, picked, ctx.cells.places).to(hidden.dtype), *[
                None
            ] * 7

        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # The outer loop is over columns, so a column's weight gradient is complete before the next
        # begins.
        of_hidden = torch.zeros_like(hidden, dtype=sum_dtype(hidden)) if needs_hidden else None
        of_weight = torch.zeros_like(weight) if needs_weight else None
        of_bias = torch.zeros_like(bias, dtype=sum_dtype(bias)) if needs_bias else None

        kept_products.reverse()
        for index, columns in enumerate(ctx.cells.columns):
            column: torch.Tensor | None = None
            for cell in ctx.cells.in_column(index):
                products = (
                    kept_products.pop() if kept_products else _products(hidden, weight, bias, cell)
                )
                slope = slopes.of_products(products, cell)
                if of_bias is not None:
                    of_bias[columns] += slope.sum(0)

                slope = slope.to(weight.dtype)
                if of_hidden is not None:
                    of_hidden[cell.rows] += _multiply(slope, weight[columns].t())

                if of_weight is not None:
                    part = _multiply(slope.t(), hidden[cell.rows].t()).to(sum_dtype(weight))
                    column = part if column is None else column.add_(part)

            if of_weight is not None and column is not None:
                of_weight[columns] = column

        if of_hidden is not None and ctx.score_function.vocabulary_slice is not None:
            distributed.all_reduce(of_hidden, group=ctx.score_function.vocabulary_slice.ranks.group)

        gradients = (of_hidden, of_weight, of_bias)
        return *(None if g is None else g.to(hidden.dtype) for g in gradients), *[None] * 5


class _Slopes(NamedTuple):
    """The incoming gradient, times the derivative of the scores."""

    of_logp: torch.Tensor
    """[M]"""
    of_row: torch.Tensor
    """[R] the sum of `of_logp` in each row."""
    of_entropy: torch.Tensor | None
    """[R]"""
    together: torch.Tensor | None
    """[M] the sum of `of_logp` over all targets that are the same token of the same row. Only if a
    cell is one kernel."""
    top: torch.Tensor
    total: torch.Tensor
    mean: torch.Tensor
    """[R] each: a, s and t / s of the module's docstring."""
    score_function: ScoreFunction

    @classmethod
    def of(
        cls,
        grads: tuple[torch.Tensor | None, ...],
        rows: torch.Tensor,
        top: torch.Tensor,
        total: torch.Tensor,
        mean: torch.Tensor,
        score_function: ScoreFunction,
    ) -> _Slopes:
        grad_logp, grad_entropy = grads
        slope = score_function.slope
        of_logp = total.new_zeros(len(rows)) if grad_logp is None else grad_logp * slope
        of_row = torch.zeros_like(total).index_add_(0, rows, of_logp)
        of_entropy = None if grad_entropy is None else grad_entropy * slope
        return cls(of_logp, of_row, of_entropy, None, top, total, mean, score_function)

    def of_targets(self, local_targets: torch.Tensor | slice, cells: Cells, fused: bool) -> _Slopes:
        """The same slopes, with `of_logp` restricted to the targets whose scores this process
        has."""
        of_logp = self.of_logp[local_targets]
        together = cells.together(of_logp) if fused and len(of_logp) else None
        return self._replace(of_logp=of_logp, together=together)

    def of_products(self, products: torch.Tensor, cell: Cell) -> torch.Tensor:
        """The gradient with respect to one cell's products."""
        if self.together is not None:
            return self._in_one_kernel(products, cell, self.together[cell.chosen])

        bent = None if self.score_function.softcap is None else self.score_function.bend(products)

        # Step 1: the part of every token of the vocabulary: -p times the incoming gradient, where p
        # is e^(z - a) / s, and log p + H is z - a - t / s.
        rows = cell.rows
        below = self.score_function.scores(products, cell, bent) - self.top[rows].unsqueeze(1)
        slope = below.exp()
        if self.of_entropy is None:
            slope.mul_((-self.of_row[rows] / self.total[rows]).unsqueeze(1))
        else:
            factor = below.sub_(self.mean[rows].unsqueeze(1)).mul_(
                -(self.of_entropy[rows] / self.total[rows]).unsqueeze(1)
            )
            slope.mul_(factor.sub_((self.of_row[rows] / self.total[rows]).unsqueeze(1)))

        # Step 2: the part of the targets only, then through penalties and cap.
        slope.index_put_(cell.places, self.of_logp[cell.chosen], accumulate=True)
        if self.score_function.penalties is not None:
            cell_penalties = self.score_function.penalties.within(rows, cell.columns)
            slope[cell_penalties.rows, cell_penalties.tokens] *= cell_penalties.slopes(
                self.score_function.plain_scores(products, bent)
            )

        return slope if bent is None else slope.mul_(_slope_of(bent))

    def _in_one_kernel(
        self, products: torch.Tensor, cell: Cell, of_targets: torch.Tensor
    ) -> torch.Tensor:
        """`of_products` in the products' dtype; the contribution of the targets is added in
        float32."""
        top = self.top[cell.rows]
        total = self.total[cell.rows]
        mean = self.mean[cell.rows]
        of_row = self.of_row[cell.rows]
        of_entropy = None if self.of_entropy is None else self.of_entropy[cell.rows]
        slope: torch.Tensor = _compile(_round_slopes)(
            products, self.score_function.slope, top, total, mean, of_row, of_entropy
        )
        rows = cell.places[0]
        at_targets = _compute_slopes(
            products[cell.places].unsqueeze(1),
            self.score_function.slope,
            top[rows],
            total[rows],
            mean[rows],
            of_row[rows],
            None if of_entropy is None else of_entropy[rows],
        )
        slope[cell.places] = (at_targets.squeeze(1) + of_targets).to(slope.dtype)
        return slope

    def of_hidden(
        self,
        pull: torch.Tensor,
        weight: torch.Tensor,
        picked: torch.Tensor,
        places: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """The gradient [R, H] with respect to the hidden states, given the gradient of log Z
        without the constant slope."""
        rows, targets = places
        slope = self.of_logp
        softcap = self.score_function.softcap
        if softcap is not None:
            slope = slope * _slope_of(picked * (self.score_function.temperature / softcap))
        gradient = pull * -self.of_row.unsqueeze(1)
        return gradient.index_add_(0, rows, weight[targets] * slope.unsqueeze(1))


def _on(hidden: torch.Tensor, ids: Sequence[int]) -> torch.Tensor | None:
    """The ids [K] on the device of the hidden states; None if there are none."""
    return torch.tensor(ids, device=hidden.device) if ids else None


def _slope_of(bent: torch.Tensor) -> torch.Tensor:
    """The derivative of tanh from its values `bent`, which are overwritten."""
    return bent.square_().neg_().add_(1.0)


def _products(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cell: Cell
) -> torch.Tensor:
    """The products of one cell, [rows, columns]."""
    return _multiply(
        hidden[cell.rows], weight[cell.columns], None if bias is None else bias[cell.columns]
    )


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias, computed by the fastest library."""
    if x.device.type == "cpu" and x.dtype == torch.float32 and available():
        return product(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def _absorb_cell(
    products: torch.Tensor,
    slope: float,
    top: torch.Tensor,
    total: torch.Tensor,
    moment: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Adds a cell's scores, slope * products [R, C], to the running sums [R] of `_Sums`, in
    float32."""
    scores = products.float() * slope
    highest = torch.maximum(top, scores.amax(1))
    below = scores - highest.unsqueeze(1)
    weights = below.exp()
    fall = top - highest
    fade = fall.exp()
    moment = (moment + total * fall) * fade + (below * weights).sum(1)
    return highest, total * fade + weights.sum(1), moment


def _compute_slopes(
    products: torch.Tensor,
    slope: float,
    top: torch.Tensor,
    total: torch.Tensor,
    mean: torch.Tensor,
    of_row: torch.Tensor,
    of_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient with respect to the products [R, C] in float32, without the targets' own
    contribution. It is computed from the gradients with respect to a row's log-probs and entropy
    [R]. See `_Slopes`."""
    below = products.float() * slope - top.unsqueeze(1)
    shares = below.exp() / total.unsqueeze(1)
    if of_entropy is None:
        return shares * -of_row.unsqueeze(1)
    further = (below - mean.unsqueeze(1)) * of_entropy.unsqueeze(1)
    return -shares * (further + of_row.unsqueeze(1))


def _round_slopes(products: torch.Tensor, *numbers: Any) -> torch.Tensor:
    """`_compute_slopes` in the products' dtype."""
    return _compute_slopes(products, *numbers).to(products.dtype)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles the function with PyTorch into one kernel for cells of any size, on devices for
    which the compiler creates kernels."""
    kernel: Callable[..., Any] = torch.compile(function, dynamic=True)
    return kernel
