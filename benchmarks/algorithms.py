"""What the maths costs: advantages and losses of 1,024 sequences x 4,096 tokens, as a share of the
forward pass of a 0.5B model.

Each advantage is timed on the whole table, and each policy loss (to the gradient in logp) on it in
micro-batches, as training calls them; so is each preset, advantage and loss together. Rows are
ragged, with several turns each, in groups of 8.

The forward pass is that of Qwen2.5-0.5B's shape with random weights, plain transformers, on the
same threads. The whole of it would take hours on a few cores, so one sequence is timed and
multiplied by 1,024. Everything else is counted so that the share comes out large: the sequence has
the rows' mean length (attention costs more than that on rows of different length), no output layer
(none of the logits that log-probs need), no autograd; float32 or bfloat16, whichever is faster in
the first round.

Memory is the peak of resident memory over what the process held before, in tables of [1024, 4096]
float32; it counts what is handed back (two tables for an advantage, one for a gradient) and what
the allocator wastes, so it is an upper bound. Linux with glibc only.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2Model

from agentevo.algorithms.advantage_inputs import AdvantageTables
from agentevo.algorithms.aggregation import bind_aggregation
from agentevo.algorithms.blocks import row_blocks
from agentevo.algorithms.entries import FUNCTION
from agentevo.algorithms.estimators import ADVANTAGES, bind_advantage
from agentevo.algorithms.loss_inputs import LossTables
from agentevo.algorithms.losses import POLICY_LOSSES, bind_policy_loss, required_aggregation
from agentevo.algorithms.presets import POLICY_PRESETS, Algorithm, resolve_preset
from figures import Figure
from memory import peak_bytes

NUM_SEQUENCES = 1024
NUM_TOKENS = 4096
GROUP_SIZE = 8
NUM_TURNS = 6
LIMIT = 0.02
"""What the share may be at most."""
FORWARD = "forward of one sequence"


@dataclasses.dataclass(frozen=True)
class Table:
    """The inputs, [S, T] float32 unless said otherwise."""

    mask: torch.Tensor
    """bool: the second half of each turn is trained."""
    turn_ids: torch.Tensor
    """int64."""
    group_ids: list[str]
    floats: Mapping[str, torch.Tensor]
    """By the name of the argument; baseline_rewards [S], reward_parts [2, S]."""
    mean_length: int
    """Tokens of a row without its padding."""


def make_table(seed: int = 0) -> Table:
    rng = torch.Generator().manual_seed(seed)
    shape = (NUM_SEQUENCES, NUM_TOKENS)
    lengths = torch.randint(NUM_TOKENS // 2, NUM_TOKENS + 1, (NUM_SEQUENCES, 1), generator=rng)
    place = torch.arange(NUM_TOKENS)
    cuts = (torch.rand(NUM_SEQUENCES, NUM_TURNS - 1, generator=rng) * lengths).sort().values
    turn_ids = torch.searchsorted(cuts, place.expand(shape).float().contiguous())
    starts = torch.cat([torch.zeros(NUM_SEQUENCES, 1), cuts], 1).gather(1, turn_ids)
    ends = torch.cat([cuts, lengths.float()], 1).gather(1, turn_ids)
    mask = (place >= (starts + ends) / 2) & (place < lengths)
    logp = -torch.rand(shape, generator=rng).mul_(3.0)

    return Table(
        mask,
        turn_ids,
        [f"task-{row // GROUP_SIZE}" for row in range(NUM_SEQUENCES)],
        {
            "token_rewards": torch.zeros(shape).scatter_(
                1, lengths - 1, torch.randint(0, 2, (NUM_SEQUENCES, 1), generator=rng).float()
            ),
            "values": torch.rand(shape, generator=rng),
            "baseline_rewards": torch.rand(NUM_SEQUENCES, generator=rng),
            "reward_parts": torch.rand(2, NUM_SEQUENCES, generator=rng),
            "sum_pi_squared": torch.rand(shape, generator=rng),
            "process_rewards": 0.05 * torch.randn(shape, generator=rng),
            "logp": logp,
            "old_logp": logp + 0.1 * torch.randn(shape, generator=rng),
            "rollout_logp": logp + 0.1 * torch.randn(shape, generator=rng),
            "proximal_logp": logp + 0.1 * torch.randn(shape, generator=rng),
            "advantages": torch.randn(NUM_SEQUENCES, 1, generator=rng).expand(shape).contiguous(),
            "turn_credit": torch.rand(shape, generator=rng),
        },
        int(lengths.float().mean()),
    )


def run_advantage(table: Table, name: str, hyper: Mapping[str, Any]) -> torch.Tensor:
    needs = ADVANTAGES[name].needs
    tensors = {**table.floats, "turn_ids": table.turn_ids, "turn_parents": table.turn_ids - 1}
    given = {key: tensors[key] for key in ("token_rewards", *needs)}
    tables = AdvantageTables(mask=table.mask, group_ids=table.group_ids, **given)
    return bind_advantage(name, hyper)(tables)[0]


def run_loss(
    table: Table,
    name: str,
    hyper: Mapping[str, Any],
    advantages: torch.Tensor,
    aggregation: str,
    aggregation_hyper: Mapping[str, Any],
) -> None:
    """To the gradient in logp, which is then dropped: in micro-batches of rows, as in training."""
    needed = ("old_logp", *POLICY_LOSSES[name].needs)
    columns = {
        "logp": table.floats["logp"],
        "advantages": advantages,
        "mask": table.mask,
        **{key: table.floats[key] for key in needed},
    }

    loss = bind_policy_loss(name, hyper, aggregation=aggregation)
    lengths = table.mask.sum(1)
    rows = range(len(table.mask))
    weights = bind_aggregation(aggregation, aggregation_hyper)(lengths, rows).float()[:, None]
    statistics = loss.statistics(LossTables(**columns))
    gradient = torch.empty_like(columns["logp"])
    for *parts, of_row, into in row_blocks(*columns.values(), weights, gradient):
        part = dict(zip(columns, parts, strict=True))
        logp = part["logp"].detach().requires_grad_()
        token_losses, _ = loss(LossTables(**{**part, "logp": logp}), statistics)
        (of_row * part["mask"] * token_losses).sum().backward()
        into.copy_(logp.grad)


def run_loss_alone(table: Table, name: str) -> None:
    required = {one.name: 1.0 for one in POLICY_LOSSES[name].hyper if one.default is None}
    hyper = POLICY_LOSSES.resolve(name, required)
    run_loss(
        table,
        name,
        hyper,
        table.floats["advantages"],
        required_aggregation(name, hyper) or "token-mean",
        {},
    )


def run_algorithm(table: Table, algorithm: Algorithm) -> None:
    advantages = run_advantage(table, algorithm.advantage, algorithm.advantage_hyper)
    run_loss(
        table,
        algorithm.policy_loss,
        algorithm.loss_hyper,
        advantages,
        algorithm.aggregation,
        algorithm.aggregation_hyper,
    )


def make_forward(length: int, dtype: torch.dtype) -> Callable[[], object]:
    config = Qwen2Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=151936,
        max_position_embeddings=NUM_TOKENS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2Model(config).to(dtype).eval()

    ids = torch.randint(0, config.vocab_size, (1, length))

    @torch.inference_mode()
    def forward() -> None:
        model(input_ids=ids, use_cache=False)

    return forward


def make_parts(table: Table) -> dict[str, Callable[[], object]]:
    return {
        **{
            f"advantage_{name}": partial(run_advantage, table, name, {})
            for name in ADVANTAGES
            if name != FUNCTION
        },
        **{
            f"policy_loss_{name}": partial(run_loss_alone, table, name)
            for name in POLICY_LOSSES
            if name != FUNCTION
        },
        **{
            f"preset_{name}": partial(run_algorithm, table, resolve_preset(name, {}))
            for name in POLICY_PRESETS
        },
    }


def peak_tables(part: Callable[[], object]) -> float:
    """Peak of resident memory during `part` above what was there before, in tables."""
    return peak_bytes(part) / (4 * NUM_SEQUENCES * NUM_TOKENS)


def timed(part: Callable[[], object]) -> float:
    started = time.perf_counter()
    part()
    return time.perf_counter() - started


def share_of_forward(repeats: int) -> list[Figure]:
    """The headline (GRPO: advantages, loss, gradient), then every preset, advantage and loss. The
    parts take turns."""
    table = make_table()
    parts = make_parts(table)
    memory = {name: peak_tables(part) for name, part in parts.items()}  # this round also warms up
    forwards = {
        f"{FORWARD}, {str(dtype)[6:]}": make_forward(table.mean_length, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    warm = {name: timed(forward) for name, forward in forwards.items()}
    fastest = min(warm, key=lambda name: warm[name])
    rounds = [
        {name: timed(part) for name, part in {**parts, fastest: forwards[fastest]}.items()}
        for _ in range(repeats)
    ]
    medians = {name: median(taken[name] for taken in rounds) for name in rounds[0]}
    whole = NUM_SEQUENCES * medians[fastest]
    print(
        f"    {table.mean_length} tokens, {fastest}: {medians[fastest]:.3f} s, so {whole:.0f} s "
        f"for {NUM_SEQUENCES}",
        file=sys.stderr,
    )

    for name in parts:
        line = (
            f"{1e3 * medians[name]:6.0f} ms {medians[name] / whole:8.4%} of the forward pass, "
            f"{memory[name]:4.1f} tables"
        )
        print(f"    {name:35s} {line}", file=sys.stderr)

    def figure(name: str, part: str) -> Figure:
        meaning = f"seconds of {part} over those of the forward pass; at most {LIMIT}"
        raw = {
            "unit": "s",
            "medians": {part: medians[part], "forward": whole},
            "repeats": [taken[part] for taken in rounds],
            "peak_tables": memory[part],
        }
        return Figure(name, medians[part] / whole, meaning, raw)

    return [
        figure("algorithms_share_of_forward", "preset_grpo"),
        *(figure(f"{name}_share_of_forward", name) for name in parts),
    ]
