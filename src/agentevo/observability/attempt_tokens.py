"""The tokens of an attempt with their numbers, in parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from agentevo.observability.attempt_view import select_turns
from agentevo.observability.pages.text import shown
from agentevo.types import Trajectory, Turn

TOKENS = 1_500
"""The number of sampled tokens in a part of the page."""
PROMPT = 4_000
"""The maximum number of characters of the prompt that are shown before the tokens."""
LEVELS = (0.9, 0.5, 0.2, 0.05, 0.01)
"""Probabilities. The level of a token is the number of these that its probability is below."""


NONE: Mapping[int, np.ndarray] = MappingProxyType({})


class TokenBlock(NamedTuple):
    """Sampled tokens of a turn. If they begin with the turn's first token, the prompt comes before
    them."""

    turn: int
    note: str
    is_shared: bool
    prompt: str
    num_prompt: int
    tokens: list[tuple[str, int]]
    """(text, level of surprise) pairs."""
    numbers: dict[str, Any]
    """For the page's script: each token's id, log-prob, version, advantage, entropy, log-prob
    change, and whether it was trained."""
    start: int


class TurnTokens(NamedTuple):
    """A part, and the start of the next one as (place among the turns, token)."""

    blocks: list[TokenBlock]
    next: tuple[int, int] | None


class Training(NamedTuple):
    """The training of an attempt's tokens by a step."""

    step: int | None
    """The step that the attempt was committed to."""
    bound: int | None
    """The oldest age that the step trained on. None if the step's plan does not have it."""
    advantages: dict[int, np.ndarray] | float | None
    """The advantages by turn, or a single advantage for all tokens."""
    moved: Mapping[int, np.ndarray] = NONE
    """Maps a turn to the log-prob change of each token by the end of the update. NaN for untrained
    tokens."""
    entropies: Mapping[int, np.ndarray] = NONE
    """Maps a turn to the entropy at each sampled token, in nats."""


def level(logprob: float) -> int:
    """0 for an almost certain token, 5 for a very unlikely one."""
    probability = math.exp(min(logprob, 0.0)) if math.isfinite(logprob) else 0.0
    return next((n for n, lowest in enumerate(LEVELS) if probability >= lowest), len(LEVELS))


def tokens_part(
    trajectory: Trajectory,
    decode: Callable[[Sequence[int]], str] | None,
    training: Training,
    *,
    start: tuple[int, int] = (0, 0),
    leaf: int | None = None,
    most: int = TOKENS,
) -> TurnTokens:
    """About `most` tokens from `start`. Without `decode`, tokens are shown as their ids."""
    order, shared = select_turns(trajectory.turns, leaf)
    blocks: list[TokenBlock] = []
    budget = most
    for index in range(start[0], len(order)):
        turn = trajectory.turns[order[index]]
        first = start[1] if index == start[0] else 0
        if budget <= 0:
            return TurnTokens(blocks, (index, 0))

        size = min(budget, len(turn.completion_ids) - first)
        before = order[index - 1] if index else None
        blocks.append(block_of(turn, first, size, before, order[index] in shared, decode, training))
        budget -= size + 20

        if first + size < len(turn.completion_ids):
            return TurnTokens(blocks, (index, first + size))

    return TurnTokens(blocks, None)


def block_of(
    turn: Turn,
    first: int,
    size: int,
    before: int | None,
    is_shared: bool,
    decode: Callable[[Sequence[int]], str] | None,
    training: Training,
) -> TokenBlock:
    place = slice(first, first + size)
    ids = list(turn.completion_ids[place])
    logprobs = list(turn.logprobs[place])
    versions = list(turn.versions[place])
    is_greedy = turn.temperature == 0

    note = ""
    if turn.parent != before:
        note = "new context" if turn.parent is None else f"continues turn {turn.parent}"

    prompt = "" if first else _text(list(turn.prompt_ids[: 4 * PROMPT]), decode)
    return TokenBlock(
        turn.index,
        note,
        is_shared,
        prompt,
        0 if first else len(turn.prompt_ids),
        [
            (_token(token, decode), 0 if is_greedy else level(logprob))
            for token, logprob in zip(ids, logprobs, strict=True)
        ],
        {
            "turn": turn.index,
            "at": first,
            "id": ids,
            "lp": None if is_greedy else [round(value, 5) for value in logprobs],
            "ver": versions,
            "adv": _advantages(turn, place, training),
            "ent": _token_numbers(training.entropies, turn, place),
            "mov": _token_numbers(training.moved, turn, place),
            "on": [_is_trained(turn, version, training) for version in versions],
        },
        first,
    )


def _advantages(turn: Turn, place: slice, training: Training) -> list[float] | None:
    of = training.advantages
    if of is None or turn.overrides is not None:
        return None
    if isinstance(of, float):
        return [round(of, 6)] * len(turn.completion_ids[place])
    values = of.get(turn.index)
    return None if values is None else [round(float(v), 6) for v in values[place]]


def _token_numbers(
    of: Mapping[int, np.ndarray], turn: Turn, place: slice
) -> list[float | None] | None:
    values = of.get(turn.index)
    if values is None:
        return None
    return [round(float(v), 4) if math.isfinite(v) else None for v in values[place]]


def _is_trained(turn: Turn, version: int, training: Training) -> int:
    if training.step is None or turn.overrides is not None:
        return 0
    age = training.step - 1 - version
    return int(training.bound is None or age <= training.bound)


def _token(token: int, decode: Callable[[Sequence[int]], str] | None) -> str:
    if decode is None:
        return f"{token} "
    return shown(decode([token]).replace("\n", "↵\n").replace("\t", "⇥\t"), 200) or "∅"


def _text(ids: list[int], decode: Callable[[Sequence[int]], str] | None) -> str:
    text = " ".join(map(str, ids)) if decode is None else decode(ids)
    return shown(text, PROMPT)
