"""KL estimates per token from Schulman's definitions with the ratio r = ref / policy, and Ziegler's
controller; scalar float64."""

from __future__ import annotations

import math


def value(name: str, logp: float, ref: float) -> float:
    d = max(-20.0, min(20.0, logp - ref))
    r = math.exp(-d)
    return {
        "k1": -math.log(r),
        "k2": math.log(r) ** 2 / 2,
        "k3": (r - 1) - math.log(r),
        "abs": abs(math.log(r)),
    }[name.removesuffix("+")]


def gradient(name: str, logp: float, ref: float) -> float:
    """In logp; beyond the bound that of the bound."""
    d = max(-20.0, min(20.0, logp - ref))
    sign = (d > 0) - (d < 0)
    return (
        d
        if name.endswith("+")
        else {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d), "abs": float(sign)}[name]
    )


def adaptive(coef: float, target: float, horizon: float, steps) -> float:
    for measured, n in steps:
        proportional = measured / target - 1
        proportional = 0.2 if proportional > 0.2 else -0.2 if proportional < -0.2 else proportional
        coef = coef * (1 + proportional * (n / horizon if n < horizon else 1))
    return coef
