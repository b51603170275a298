"""Preference losses of one pair (or one answer), straight from the papers' formulas; scalars, math
only."""

from __future__ import annotations

import math


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


def dpo(chosen, rejected, ref_chosen, ref_rejected, beta, label_smoothing=0.0):
    h = beta * math.fsum([chosen, -ref_chosen, -rejected, ref_rejected])
    return -(1 - label_smoothing) * log_sigmoid(h) - label_smoothing * log_sigmoid(-h)


def ipo(chosen, rejected, ref_chosen, ref_rejected, beta):
    h = math.fsum([chosen, -rejected, -ref_chosen, ref_rejected])
    return (h - 1 / (2 * beta)) ** 2


def kto(logp, ref, desirable, baseline, beta, desirable_weight, undesirable_weight):
    z = baseline if baseline > 0 else 0.0
    if desirable:
        return desirable_weight * (1 - sigmoid(beta * (logp - ref - z)))
    return undesirable_weight * (1 - sigmoid(beta * (z - (logp - ref))))


def orpo(chosen, rejected, chosen_length, rejected_length, coef):
    def log_odds(logp, length):
        mean = min(logp / length, -1e-6)
        return mean - math.log(1 - math.exp(mean))  # of p/(1 - p), which underflows where p does

    return -chosen / chosen_length - coef * log_sigmoid(
        log_odds(chosen, chosen_length) - log_odds(rejected, rejected_length)
    )


def spin(chosen, rejected, opponent_chosen, opponent_rejected, beta):
    t = beta * ((chosen - opponent_chosen) - (rejected - opponent_rejected))
    return math.log1p(math.exp(-t)) if t > -30 else -t


def sppo(chosen, rejected, ref_chosen, ref_rejected, beta, win=1.0, lose=None):
    eta = 1 / beta
    lose = 1 - win if lose is None else lose
    return (chosen - ref_chosen - eta * (win - 0.5)) ** 2 + (
        rejected - ref_rejected - eta * (lose - 0.5)
    ) ** 2


def rft(chosen, length):
    return -chosen / length
