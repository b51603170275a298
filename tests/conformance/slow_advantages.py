"""Every advantage estimator again, in plain loops over float64 numbers, from the equations that the
entries name.

Slow on purpose and without a line in common with `agentevo.algorithms`: what both say is right, or
both are wrong in the same way.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

Token = tuple[int, int]
PerToken = dict[Token, float]


@dataclass(frozen=True)
class Batch:
    """[S, T] arrays, lists of S ids. What stands where `mask` is False is never read here."""

    rewards: np.ndarray
    mask: np.ndarray
    groups: list[Hashable]
    trajectories: list[Hashable] | None
    turns: np.ndarray | None
    values: np.ndarray
    baseline: np.ndarray
    parts: dict[str, np.ndarray]
    weights: dict[str, float]
    logp: np.ndarray
    squares: np.ndarray
    process: np.ndarray
    parents: np.ndarray | None


def slow_advantage(
    name: str, batch: Batch, hyper: dict[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns, [S, T], 0 at untrained tokens."""
    if name in PER_TRAJECTORY:
        numbers = PER_TRAJECTORY[name](batch, **hyper)
        advantages = {
            token: numbers[owner] for owner, tokens in owned(batch).items() for token in tokens
        }
        found: tuple[PerToken, PerToken] = (advantages, advantages)
    else:
        found = PER_TOKEN[name](batch, **hyper)

    placed = []
    for part in found:
        array = np.zeros(batch.mask.shape)
        for token, number in part.items():
            array[token] = number
        placed.append(array)

    return placed[0], placed[1]


def owned(batch: Batch) -> dict[Hashable, list[Token]]:
    """Trained tokens of each trajectory that has any, in the order of turns if those are known."""
    tokens: dict[Hashable, list[Token]] = defaultdict(list)
    for row in range(batch.mask.shape[0]):
        for column in range(batch.mask.shape[1]):
            if batch.mask[row, column]:
                tokens[row if batch.trajectories is None else batch.trajectories[row]].append(
                    (row, column)
                )

    if batch.turns is not None:
        for listed in tokens.values():
            listed.sort(key=lambda token: (batch.turns[token], *token))

    return dict(tokens)


def streams(batch: Batch) -> list[list[Token]]:
    if batch.turns is not None:
        return list(owned(batch).values())
    rows: dict[int, list[Token]] = defaultdict(list)
    for tokens in owned(batch).values():
        for token in tokens:
            rows[token[0]].append(token)
    return list(rows.values())


def turns_of(batch: Batch, tokens: list[Token]) -> list[list[Token]]:
    found: dict[int, list[Token]] = {}
    for token in tokens:
        found.setdefault(int(batch.turns[token]), []).append(token)
    return [found[number] for number in sorted(found)]


def scores(batch: Batch) -> dict[Hashable, float]:
    return {
        owner: math.fsum(batch.rewards[token] for token in tokens)
        for owner, tokens in owned(batch).items()
    }


def group_of(batch: Batch, owner: Hashable) -> Hashable:
    return batch.groups[owned(batch)[owner][0][0]]


def by_group(batch: Batch) -> list[list[Hashable]]:
    found: dict[Hashable, list[Hashable]] = defaultdict(list)
    for owner, tokens in owned(batch).items():
        found[batch.groups[tokens[0][0]]].append(owner)
    return list(found.values())


def equal(numbers: list[float]) -> bool:
    return max(numbers) - min(numbers) <= 1e-12 * max(abs(number) for number in numbers)


def mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def std(numbers: list[float]) -> float:
    middle = mean(numbers)
    return math.sqrt(math.fsum((number - middle) ** 2 for number in numbers) / (len(numbers) - 1))


def normalised(numbers: list[float], scale_by_std: bool, epsilon: float) -> list[float]:
    if len(numbers) == 1 or equal(numbers):
        return [0.0] * len(numbers)
    divisor = std(numbers) + epsilon if scale_by_std else 1.0
    return [(number - mean(numbers)) / divisor for number in numbers]


def whitened(numbers: list[float]) -> list[float]:
    if len(numbers) < 2 or equal(numbers):
        return [0.0] * len(numbers)
    return [(number - mean(numbers)) / math.sqrt(std(numbers) ** 2 + 1e-8) for number in numbers]


def whitened_tokens(tokens: PerToken) -> PerToken:
    return dict(zip(tokens, whitened(list(tokens.values())), strict=True))


def whitened_trajectories(batch: Batch, numbers: dict[Hashable, float]) -> dict[Hashable, float]:
    tokens: PerToken = {}
    compared = [owner for group in by_group(batch) if len(group) > 1 for owner in group]
    for owner in compared:
        tokens.update(dict.fromkeys(owned(batch)[owner], numbers[owner]))
    white = whitened_tokens(tokens)
    return {owner: white[owned(batch)[owner][0]] if owner in compared else 0.0 for owner in numbers}


def in_groups(batch: Batch, rule) -> dict[Hashable, float]:
    """`rule` turns the scores of one group into its advantages; groups of one and equal scores are
    0."""
    score = scores(batch)
    found = {}
    for group in by_group(batch):
        numbers = [score[owner] for owner in group]
        given = [0.0] * len(group) if len(group) == 1 or equal(numbers) else rule(numbers, group)
        found.update(zip(group, given, strict=True))
    return found


def raw(batch: Batch) -> dict[Hashable, float]:
    return scores(batch)


def batch_norm(batch: Batch, epsilon: float) -> dict[Hashable, float]:
    score = scores(batch)
    return (
        dict(zip(score, normalised(list(score.values()), True, epsilon), strict=True))
        if score
        else {}
    )


def grpo(batch: Batch, scale_by_std: bool, epsilon: float) -> dict[Hashable, float]:
    return in_groups(batch, lambda numbers, group: normalised(numbers, scale_by_std, epsilon))


def grpo_passk(batch: Batch, scale_by_std: bool, epsilon: float) -> dict[Hashable, float]:
    def rule(numbers: list[float], group: list[Hashable]) -> list[float]:
        first, second = sorted(numbers, reverse=True)[:2]
        lead = (first - second) / (std(numbers) + epsilon if scale_by_std else 1.0)
        return [lead if number == first else 0.0 for number in numbers]

    return in_groups(batch, rule)


def rloo(batch: Batch) -> dict[Hashable, float]:
    def rule(numbers: list[float], group: list[Hashable]) -> list[float]:
        return [
            number - mean(numbers[:at] + numbers[at + 1 :]) for at, number in enumerate(numbers)
        ]

    return in_groups(batch, rule)


def opo(batch: Batch) -> dict[Hashable, float]:
    def rule(numbers: list[float], group: list[Hashable]) -> list[float]:
        lengths = [len(owned(batch)[owner]) for owner in group]
        baseline = math.fsum(
            length * number for length, number in zip(lengths, numbers, strict=True)
        ) / sum(lengths)
        return [number - baseline for number in numbers]

    return in_groups(batch, rule)


def gpg(batch: Batch) -> dict[Hashable, float]:
    score = scores(batch)
    useful = sum(
        len(group)
        for group in by_group(batch)
        if len(group) > 1 and not equal([score[owner] for owner in group])
    )
    return in_groups(
        batch,
        lambda numbers, group: [
            len(score) / useful * (number - mean(numbers)) for number in numbers
        ],
    )


def maxrl(batch: Batch, epsilon: float) -> dict[Hashable, float]:
    return in_groups(
        batch,
        lambda numbers, group: [
            (number - mean(numbers)) / (mean(numbers) + epsilon) for number in numbers
        ],
    )


def gdpo(batch: Batch, epsilon: float, whiten: bool) -> dict[Hashable, float]:
    total = dict.fromkeys(scores(batch), 0.0)
    for name, part in batch.parts.items():
        for group in by_group(batch):
            numbers = [float(part[owned(batch)[owner][0][0]]) for owner in group]
            for owner, number in zip(group, normalised(numbers, True, epsilon), strict=True):
                total[owner] += batch.weights[name] * number
    return whitened_trajectories(batch, total) if whiten else total


def reinforce_pp_baseline(batch: Batch) -> dict[Hashable, float]:
    return whitened_trajectories(batch, grpo(batch, False, 0.0))


def to_go(rewards: list[float], gamma: float) -> list[float]:
    """From the definition: every future reward, discounted by its distance."""
    return [
        math.fsum(gamma ** (later - now) * rewards[later] for later in range(now, len(rewards)))
        for now in range(len(rewards))
    ]


def estimate(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """GAE from its definition (eq. 16): A_t = sum_l (gamma lam)^l delta_{t+l}."""
    after = [*values[1:], 0.0]
    deltas = [
        reward + gamma * later - value
        for reward, later, value in zip(rewards, after, values, strict=True)
    ]
    return to_go(deltas, gamma * lam)


def reinforce_pp(batch: Batch, gamma: float) -> tuple[PerToken, PerToken]:
    returns: PerToken = {}
    for tokens in streams(batch):
        returns.update(
            zip(tokens, to_go([batch.rewards[token] for token in tokens], gamma), strict=True)
        )
    return whitened_tokens(returns), returns


def remax(batch: Batch, gamma: float) -> tuple[PerToken, PerToken]:
    _, returns = reinforce_pp(batch, gamma)
    return {
        token: number - float(batch.baseline[token[0]]) for token, number in returns.items()
    }, returns


def finish(batch: Batch, advantages: PerToken, whiten: bool) -> tuple[PerToken, PerToken]:
    returns = {token: number + batch.values[token] for token, number in advantages.items()}
    return whitened_tokens(advantages) if whiten else advantages, returns


def gae(batch: Batch, gamma: float, lam: float, whiten: bool) -> tuple[PerToken, PerToken]:
    advantages: PerToken = {}
    for tokens in streams(batch):
        found = estimate(
            [batch.rewards[token] for token in tokens],
            [batch.values[token] for token in tokens],
            gamma,
            lam,
        )
        advantages.update(zip(tokens, found, strict=True))

    return finish(batch, advantages, whiten)


def turn_gae(batch: Batch, gamma: float, lam: float, whiten: bool) -> tuple[PerToken, PerToken]:
    advantages: PerToken = {}
    returns: PerToken = {}
    for tokens in streams(batch):
        turns = turns_of(batch, tokens)
        rewards = [math.fsum(batch.rewards[token] for token in turn) for turn in turns]
        values = [float(batch.values[turn[0]]) for turn in turns]
        for turn, number, value in zip(
            turns, estimate(rewards, values, gamma, lam), values, strict=True
        ):
            advantages.update(dict.fromkeys(turn, number))
            returns.update(dict.fromkeys(turn, number + value))

    return whitened_tokens(advantages) if whiten else advantages, returns


def bi_level_gae(
    batch: Batch, gamma: float, lam: float, turn_gamma: float, turn_lam: float, whiten: bool
) -> tuple[PerToken, PerToken]:
    advantages: PerToken = {}
    for tokens in streams(batch):
        turns = turns_of(batch, tokens)
        rewards = [math.fsum(batch.rewards[token] for token in turn) for turn in turns]
        lasts = [float(batch.values[turn[-1]]) for turn in turns]
        for turn, high, last in zip(
            turns, estimate(rewards, lasts, turn_gamma, turn_lam), lasts, strict=True
        ):
            inner = [0.0] * (len(turn) - 1) + [high + last]
            advantages.update(
                zip(
                    turn,
                    estimate(inner, [float(batch.values[token]) for token in turn], gamma, lam),
                    strict=True,
                )
            )

    return finish(batch, advantages, whiten)


def of_turns(
    batch: Batch,
    numbers_of: Callable[[list[list[Token]]], list[float]],
    places_of: Callable[[list[list[Token]]], list[int]],
    scale_by_std: bool,
    epsilon: float,
    turn_baseline: str,
) -> tuple[PerToken, PerToken]:
    """Numbers of turns against those of other turns of their group."""
    advantages: PerToken = {}
    returns: PerToken = {}
    for group in by_group(batch):
        turns = []
        numbers = []
        places = []
        for owner in group:
            own = turns_of(batch, owned(batch)[owner])
            turns += own
            numbers += numbers_of(own)
            places += places_of(own)

        given = [0.0] * len(turns)
        for place in set(places) if turn_baseline == "place" else {None}:
            at = [n for n, one in enumerate(places) if place in (None, one)]
            among = normalised([numbers[n] for n in at], scale_by_std, epsilon)
            for n, value in zip(at, among, strict=True):
                given[n] = 0.0 if len(group) == 1 else value

        if turn_baseline == "none":
            given = numbers

        for turn, number, advantage in zip(turns, numbers, given, strict=True):
            returns.update(dict.fromkeys(turn, number))
            advantages.update(dict.fromkeys(turn, advantage))

    return advantages, returns


def in_order(own: list[list[Token]]) -> list[int]:
    return list(range(len(own)))


def turn_returns(batch: Batch, gamma: float, **comparison: Any) -> tuple[PerToken, PerToken]:
    def numbers(own: list[list[Token]]) -> list[float]:
        return to_go([math.fsum(batch.rewards[token] for token in turn) for turn in own], gamma)

    return of_turns(batch, numbers, in_order, **comparison)


def observations(batch: Batch) -> np.ndarray:
    """[S, T]: what the turn of each token answers, of three observations."""
    return batch.turns % 3


def gigpo(
    batch: Batch, gamma: float, turn_weight: float, scale_by_std: bool, epsilon: float
) -> tuple[PerToken, PerToken]:
    def answered(own: list[list[Token]]) -> list[int]:
        return [int(observations(batch)[turn[0]]) for turn in own]

    def numbers(own: list[list[Token]]) -> list[float]:
        return to_go([math.fsum(batch.rewards[token] for token in turn) for turn in own], gamma)

    of_attempts = grpo(batch, scale_by_std, epsilon)
    compared, returns = of_turns(batch, numbers, answered, scale_by_std, epsilon, "place")
    advantages = {
        token: of_attempts[owner] + turn_weight * compared[token]
        for owner, tokens in owned(batch).items()
        for token in tokens
    }
    return advantages, returns


def credit(batch: Batch, **comparison: Any) -> tuple[PerToken, PerToken]:
    def numbers(own: list[list[Token]]) -> list[float]:
        return [float(batch.process[turn[0]]) for turn in own]

    return of_turns(batch, numbers, in_order, **comparison)


def otb(batch: Batch, handle_zero_tail: bool) -> tuple[PerToken, PerToken]:
    _, returns = reinforce_pp(batch, 1.0)
    weights: PerToken = {}
    for tokens in streams(batch):
        total = 0.0
        for token in tokens:
            total += 1.0 - 2.0 * math.exp(batch.logp[token]) + batch.squares[token]
            weights[token] = total

    advantages: PerToken = {}
    for group in by_group(batch):
        rows = {row for owner in group for row, _ in owned(batch)[owner]}
        members = [tokens for tokens in streams(batch) if tokens[0][0] in rows]
        for time in range(max(len(tokens) for tokens in members)):
            left = [tokens[time] for tokens in members if len(tokens) > time]
            baseline = math.fsum(weights[token] * returns[token] for token in left) / math.fsum(
                weights[token] for token in left
            )
            if len(left) == 1 and handle_zero_tail:
                baseline = 0.0

            for token in left:
                advantages[token] = 0.0 if len(group) == 1 else returns[token] - baseline

    return advantages, returns


PER_TRAJECTORY = {
    function.__name__: function
    for function in (
        raw,
        batch_norm,
        grpo,
        grpo_passk,
        rloo,
        opo,
        gpg,
        maxrl,
        gdpo,
        reinforce_pp_baseline,
    )
}


def prime(
    batch: Batch, gamma: float, process_coef: float, whiten: bool
) -> tuple[PerToken, PerToken]:
    outcome = rloo(batch)
    advantages = {}
    means = {
        owner: mean([float(batch.process[token]) for token in tokens])
        for owner, tokens in owned(batch).items()
    }
    for group in by_group(batch):
        for owner in group:
            others = [means[one] for one in group if one != owner]
            for tokens in streams(batch):
                if tokens[0] not in owned(batch)[owner]:
                    continue
                total = 0.0
                for token in reversed(tokens):
                    total = gamma * total + (batch.process[token] - mean(others) if others else 0.0)
                    advantages[token] = outcome[owner] + process_coef * total if others else 0.0

    white = whitened_tokens(advantages) if whiten else advantages
    return white, advantages


def tree_returns(batch: Batch, gamma: float, **comparison: Any) -> tuple[PerToken, PerToken]:
    def going_on_from(at: int, own: list[list[Token]]) -> list[int]:
        """Turns whose parent is turn `at`; one without a parent among the earlier turns goes on
        from the one before it."""
        numbers = [int(batch.turns[turn[0]]) for turn in own]
        found = []
        for later in range(at + 1, len(own)):
            parent = int(batch.parents[own[later][0]])
            if parent == numbers[at] if parent in numbers[:later] else at == later - 1:
                found.append(later)
        return found

    def to_come(at: int, own: list[list[Token]]) -> float:
        return math.fsum(batch.rewards[token] for token in own[at]) + gamma * math.fsum(
            to_come(one, own) for one in going_on_from(at, own)
        )

    def depths(own: list[list[Token]]) -> list[int]:
        depth = [0] * len(own)
        for at in range(len(own)):
            for later in going_on_from(at, own):
                depth[later] = depth[at] + 1
        return depth

    def numbers(own: list[list[Token]]) -> list[float]:
        return [to_come(at, own) for at in range(len(own))]

    return of_turns(batch, numbers, depths, **comparison)


PER_TOKEN = {
    function.__name__: function
    for function in (
        reinforce_pp,
        remax,
        gae,
        turn_gae,
        bi_level_gae,
        turn_returns,
        otb,
        tree_returns,
        gigpo,
        credit,
        prime,
    )
}
