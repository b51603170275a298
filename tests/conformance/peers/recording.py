"""The inputs both peers are run on, and the file that keeps what they answered. Imported by
`record_trl.py` and `record_verl.py` only.

A recording is {"peer", "versions", "command", "batches": {name: {tensor: nested lists}}, "cases":
{name: {...}}}. A case names the function that was called, its batch and arguments, and holds what
came back; where that is not float64 it says which dtype it is. Batches:

- groups: groups of 4, 3 and 3 with ties (one group all equal), rows ragged with holes in the mask,
  one reward at the last trained token.
- contiguous: groups without the holes. single: a group of one beside a group of three. empty: a row
  without trained tokens inside a group.
- loss: log-ratios from 1e-4 to 0.9. extreme: log-ratios to +-30 with valid log-probs. loss_empty: a
  row without trained tokens.
- pairs: summed log-probs of chosen and rejected answers with their lengths.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
Batch = dict[str, torch.Tensor]


def ragged(generator: torch.Generator, rows: int, tokens: int) -> torch.Tensor:
    """Masks with one hole each and lengths from 3 on, the first row full. [rows, tokens] int64"""
    lengths = torch.randint(4, tokens + 1, (rows,), generator=generator)
    lengths[0] = tokens
    holes = (
        torch.rand(rows, generator=generator) * (lengths - 2)
    ).long() + 1  # neither the first nor the last token
    places = torch.arange(tokens)
    return ((places < lengths[:, None]) & (places != holes[:, None])).long()


def at_last_token(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rewards that are `scores` at the last trained token of each row and 0 elsewhere; nothing in a
    row without trained tokens."""
    last = (mask.cumsum(1) == mask.sum(1, keepdim=True)) & (mask == 1)
    return torch.where(last, scores[:, None], 0.0)


def score_batch(
    generator: torch.Generator, scores: list[float], groups: list[int], empty_row: int | None = None
) -> Batch:
    rows = len(scores)
    tokens = 8
    mask = ragged(generator, rows, tokens)
    if empty_row is not None:
        mask[empty_row] = 0

    def normal() -> torch.Tensor:
        return torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

    logp = -normal().abs() - 0.01
    probability = logp.exp()
    rest = torch.rand(rows, tokens, generator=generator, dtype=torch.float64)
    return {
        "token_rewards": at_last_token(torch.tensor(scores, dtype=torch.float64), mask),
        "dense_rewards": normal() * mask,
        "mask": mask,
        "group_ids": torch.tensor(groups),
        "values": normal(),
        "baseline_rewards": normal()[:, 0],
        "logp": logp,
        "sum_pi_squared": probability**2 + rest * (1 - probability) ** 2,
        "reward_parts": normal()[:, :3].T.contiguous(),
    }


def loss_batch(generator: torch.Generator, gaps: torch.Tensor, mask: torch.Tensor) -> Batch:
    """Log-probs that differ by `gaps` and are at most -0.01; one advantage per row and one per
    token."""
    rows, tokens = mask.shape
    base = -torch.rand(rows, tokens, generator=generator, dtype=torch.float64) * 2.0 - 0.01
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(rows)[:rows]
    size = torch.rand(rows, generator=generator, dtype=torch.float64) + 0.5

    return {
        "logp": base + gaps.clamp(max=0.0),
        "old_logp": base - gaps.clamp(min=0.0),
        "rollout_logp": base
        - gaps.clamp(min=0.0)
        + torch.randn(rows, tokens, generator=generator, dtype=torch.float64) * 0.4,
        "ref_logp": base
        + torch.randn(rows, tokens, generator=generator, dtype=torch.float64) * 0.5
        - 1.0,
        "advantages": (signs * size)[:, None] * mask,
        "token_advantages": torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
        * mask,
        "mask": mask,
    }


def batches(seed: int = 20261121) -> dict[str, Batch]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scores = [1.0, 0.25, 0.0, 0.5, 1.0, 1.0, -0.5, 0.5, 0.5, 0.5]
    made = {
        "groups": score_batch(generator, scores, [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]),
        "single": score_batch(generator, [1.0, 0.0, 0.5, 0.75], [0, 0, 0, 1]),
        "empty": score_batch(generator, [1.0, 0.25, 0.0, 1.0, 0.5], [0, 0, 0, 1, 1], empty_row=2),
    }
    whole = (made["groups"]["mask"].flip(1).cumsum(1).flip(1) > 0).long()  # the holes closed
    made["contiguous"] = made["groups"] | {
        "mask": whole,
        "dense_rewards": made["groups"]["values"].flip(0) * whole,
    }

    scale = torch.tensor([0.6, 0.3, 1e-3, 0.05, 0.9, 1e-4], dtype=torch.float64)[:, None]
    made["loss"] = loss_batch(generator, normal(6, 7).clamp(-2, 2) * scale, ragged(generator, 6, 7))
    far = torch.tensor(
        [
            [-30.0, -12.0, 0.1, 12.0, 30.0],
            [30.0, 12.0, 0.1, -12.0, -30.0],
            [30, 30, 30, 30, 30],
            [30, 30, 30, 30, 30],
        ]
    )
    made["extreme"] = loss_batch(generator, far.double(), torch.ones(4, 5, dtype=torch.int64))
    short = ragged(generator, 3, 6)
    short[2] = 0
    made["loss_empty"] = loss_batch(generator, normal(3, 6) * 0.3, short)
    chosen = -normal(6).abs() * 10 - 3
    rejected = -normal(6).abs() * 10 - 3
    made["pairs"] = {
        "chosen_logp": chosen,
        "rejected_logp": rejected,
        "ref_chosen_logp": chosen + normal(6) * 2,
        "ref_rejected_logp": rejected + normal(6) * 2,
        "chosen_lengths": torch.tensor([3, 5, 2, 7, 4, 6]),
        "rejected_lengths": torch.tensor([4, 4, 6, 2, 3, 7]),
        "desirable": torch.tensor([True, False, True, True, False, True]),
        "kl_gap": normal(6) * 0.5 + 0.4,
    }
    return made


def plain(value: Any) -> Any:
    """Tensors as nested lists, at any depth."""
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value


def write(
    peer: str, versions: dict[str, str], made: dict[str, Batch], cases: dict[str, dict[str, Any]]
) -> None:
    """tests/conformance/peers/PEER.json: one line per batch and case."""
    lines = [
        f'"{key}": {json.dumps(value)}' for key, value in (("peer", peer), ("versions", versions))
    ]
    lines.append(
        '"command": '
        f"{json.dumps(f'PEER/bin/python tests/conformance/peers/{Path(sys.argv[0]).name}')}"
    )
    for part, entries in (("batches", made), ("cases", cases)):
        rows = [
            f" {json.dumps(name)}: {json.dumps(plain(entry), separators=(',', ':'))}"
            for name, entry in entries.items()
        ]
        lines.append(f'"{part}": {{\n' + ",\n".join(rows) + "\n}")

    path = HERE / f"{peer.lower()}.json"
    path.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
    print(f"{path}: {len(cases)} cases, {path.stat().st_size:,} bytes")
