"""Policy losses as their papers write them: float64 NumPy, one Python loop per sum, nothing shared
with the library.

Each function takes `now` (log-probs now) and `c` (the same numbers where the paper stops the
gradient), so central differences in `now` alone give the gradient that the paper means. Rows are
sequences; m is the mask; results are token losses [S, T].
"""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def bound(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def ratio(x: float) -> float:
    return math.exp(bound(x))


def tokens(m: Array) -> list[tuple[int, int]]:
    return [(s, t) for s in range(m.shape[0]) for t in range(m.shape[1]) if m[s, t]]


def row_tokens(m: Array, s: int) -> list[int]:
    return [t for t in range(m.shape[1]) if m[s, t]]


def clipped(r: float, a: float, low: float, high: float) -> float:
    return max(-a * r, -a * min(max(r, 1 - low), 1 + high))


def per_token(m: Array, loss) -> Array:
    out = np.zeros(m.shape)
    for s, t in tokens(m):
        out[s, t] = loss(s, t)
    return out


def ppo_clip(now, c, o, a, m, *, clip_low, clip_high, dual_clip=0.0, **_) -> Array:
    def loss(s, t):
        value = clipped(ratio(now[s, t] - o[s, t]), a[s, t], clip_low, clip_high)
        return min(value, -a[s, t] * dual_clip) if dual_clip and a[s, t] < 0 else value

    return per_token(m, loss)


def decoupled_ppo(  # noqa: PLR0913 (the letters of the formula)
    now, c, o, a, m, *, p, q, clip_low, clip_high, cap, mode, **_
) -> Array:
    def loss(s, t):
        w = ratio(p[s, t] - q[s, t])
        if w > cap:
            w = cap if mode == "clamp" else 0.0
        return w * clipped(ratio(now[s, t] - p[s, t]), a[s, t], clip_low, clip_high)

    return per_token(m, loss)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def gspo(now, c, o, a, m, *, clip_low, clip_high, **_) -> Array:
    out = np.zeros(m.shape)
    for s in range(m.shape[0]):
        ts = row_tokens(m, s)
        for t in ts:
            r = ratio(mean([now[s, u] - o[s, u] for u in ts]))
            out[s, t] = clipped(r, mean([a[s, u] for u in ts]), clip_low, clip_high)
    return out


def gspo_token(now, c, o, a, m, *, clip_low, clip_high, **_) -> Array:
    def loss(s, t):
        r = ratio(mean([c[s, u] - o[s, u] for u in row_tokens(m, s)]))
        return clipped(r * math.exp(now[s, t]) / math.exp(c[s, t]), a[s, t], clip_low, clip_high)

    return per_token(m, loss)


def gmpo(now, c, o, a, m, *, clip_low, clip_high, **_) -> Array:
    """Written with the sign as in the paper: sgn(A) min(sgn(A) x, sgn(A) clip(x))."""
    out = np.zeros(m.shape)
    for s in range(m.shape[0]):
        ts = row_tokens(m, s)
        if not ts:
            continue

        advantage = mean([a[s, u] for u in ts])
        sign = float(np.sign(advantage))
        logs = []
        for u in ts:
            x = now[s, u] - o[s, u]
            logs.append(sign * min(sign * x, sign * min(max(x, -clip_low), clip_high)))

        for t in ts:
            out[s, t] = -advantage * ratio(mean(logs))

    return out


def cispo(now, c, o, a, m, *, clip_low, clip_high, **_) -> Array:
    return per_token(
        m,
        lambda s, t: (
            -min(max(ratio(c[s, t] - o[s, t]), 1 - clip_low), 1 + clip_high) * a[s, t] * now[s, t]
        ),
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def sapo(now, c, o, a, m, *, tau_pos, tau_neg, **_) -> Array:
    def loss(s, t):
        tau = tau_pos if a[s, t] > 0 else tau_neg
        return -a[s, t] * sigmoid(tau * (ratio(now[s, t] - o[s, t]) - 1)) * 4 / tau

    return per_token(m, loss)


def dppo_tv(now, c, o, a, m, *, clip_low, clip_high, cap, **_) -> Array:
    def loss(s, t):
        change = math.exp(c[s, t]) - math.exp(o[s, t])
        good = change <= clip_high if a[s, t] > 0 else change >= -clip_low
        return -a[s, t] * min(ratio(c[s, t] - o[s, t]), cap) * now[s, t] if good else 0.0

    return per_token(m, loss)


def dppo_kl(now, c, o, a, m, *, clip_low, clip_high, cap, **_) -> Array:
    def loss(s, t):
        new = math.exp(c[s, t])
        old = math.exp(o[s, t])
        kl = old * (o[s, t] - c[s, t]) + (1 - old) * math.log((1 - old + 1e-8) / (1 - new + 1e-8))
        good = kl <= clip_high or new <= old if a[s, t] > 0 else kl <= clip_low or new >= old
        return -a[s, t] * min(ratio(c[s, t] - o[s, t]), cap) * now[s, t] if good else 0.0

    return per_token(m, loss)


def dro(now, c, o, a, m, *, beta, **_) -> Array:
    return per_token(
        m, lambda s, t: -(a[s, t] * now[s, t] - 0.5 * beta * (now[s, t] - o[s, t]) ** 2)
    )


def reinforce(now, c, o, a, m, **_) -> Array:
    return per_token(m, lambda s, t: -a[s, t] * now[s, t])


def chosen(c, a, m, candidates, fraction, low, high) -> set[tuple[int, int]]:
    """The candidates of largest covariance, with all ties of the last."""
    every = tokens(m)
    if not every:
        return set()

    mean_a = mean([a[i] for i in every])
    mean_l = mean([c[i] for i in every])

    def centred(x: float, around: float) -> float:
        return 0.0 if math.isclose(x, around, rel_tol=1e-12) else x - around

    scored = sorted(
        ((centred(a[i], mean_a) * centred(c[i], mean_l), i) for i in candidates), reverse=True
    )
    scored = [(value, i) for value, i in scored if low < value < high and value != 0]
    count = max(1, int(fraction * len(every)))

    if not scored:
        return set()

    last = scored[min(count, len(scored)) - 1][0]
    return {i for value, i in scored if value >= last - 1e-12 * abs(last)}


def clip_cov(now, c, o, a, m, *, clip_low, clip_high, fraction, low, high, **_) -> Array:
    def is_clipped(i):
        r = ratio(c[i] - o[i])
        return -a[i] * min(max(r, 1 - clip_low), 1 + clip_high) > -a[i] * r

    out = chosen(c, a, m, [i for i in tokens(m) if not is_clipped(i)], fraction, low, high)
    return per_token(
        m,
        lambda s, t: (
            0.0
            if (s, t) in out
            else clipped(ratio(now[s, t] - o[s, t]), a[s, t], clip_low, clip_high)
        ),
    )


def kl_cov(now, c, o, a, m, *, fraction, coef, **_) -> Array:
    pulled = chosen(c, a, m, tokens(m), fraction, -math.inf, math.inf)

    def loss(s, t):
        x = now[s, t] - o[s, t]
        return -a[s, t] * ratio(x) + (coef * abs(x) if (s, t) in pulled else 0.0)

    return per_token(m, loss)


def minirl_keeps(
    c, o, a, m, *, strict_in_bound, clip_low, clip_high, cap_ratio, **_
) -> set[tuple[int, int]]:
    k = 1.0 if strict_in_bound else cap_ratio
    kept = set()
    for i in tokens(m):
        r = ratio(c[i] - o[i])
        if not (r > 1 + (clip_low + clip_high) * k and a[i] > 0) and not (
            r < 1 - clip_low * k and a[i] < 0
        ):
            kept.add(i)

    return kept


def minirl_total(now, c, o, a, m, *, token_level_loss, skip_length_normalization, **band) -> float:
    """The whole loss: MINIRL brings its own denominators, over kept tokens."""
    kept = minirl_keeps(c, o, a, m, **band)
    losses = {i: -ratio(c[i] - o[i]) * a[i] * now[i] for i in kept}
    if token_level_loss:
        return mean(list(losses.values())) if kept else 0.0

    rows = [s for s in range(m.shape[0]) if row_tokens(m, s)]
    if not rows:
        return 0.0

    per_row = []
    for s in rows:
        mine = [losses[i] for i in kept if i[0] == s]
        per_row.append(sum(mine) if skip_length_normalization or not mine else mean(mine))

    return mean(per_row)


LOSSES = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "gpg": reinforce,
    "reinforce": reinforce,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "decoupled_ppo": decoupled_ppo,
}


def importance_weights(name: str, o: Array, q: Array, m: Array, cap: float, floor: float) -> Array:
    out = np.zeros(m.shape)
    for s, t in tokens(m):
        gaps = [o[s, u] - q[s, u] for u in row_tokens(m, s)]
        total = {"token": o[s, t] - q[s, t], "sequence": sum(gaps), "geometric": mean(gaps)}[
            name.split("_")[0]
        ]
        w = ratio(total)
        out[s, t] = min(w, cap) if name.endswith("tis") else (w if floor <= w <= cap else 0.0)

    return out


def effective_sample_size(w: Array, m: Array) -> float:
    values = [w[i] for i in tokens(m)]
    if not values or sum(values) == 0:
        return 0.0
    return 1 / mean([(v / mean(values)) ** 2 for v in values])


def seq_mean_token_mean(losses: Array, m: Array) -> float:
    rows = [s for s in range(m.shape[0]) if row_tokens(m, s)]
    return mean([mean([losses[s, t] for t in row_tokens(m, s)]) for s in rows]) if rows else 0.0


def token_mean(losses: Array, m: Array) -> float:
    return mean([losses[i] for i in tokens(m)]) if tokens(m) else 0.0
