"""Early signs that a run is collapsing, each with a remedy.

Multi-turn RL often dies without an error. RAGEN (arXiv 2504.20073, "echo trap") finds that the
spread of rewards inside groups and the entropy change tens of steps before the reward does. When
the gradient norm spikes, the policy is usually lost. `CollapseSigns` watches running means of these
metrics, because single steps are noisy. finding_monitor.py says each sign once.

It is a pure function of the metrics that it has received: no clock, no randomness.
`state` restores it exactly (also through JSON), so a resumed run gives the same warnings as an
uninterrupted one. A missing metric disables only the signs that need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import msgspec

from agentevo.observability.remedies import Remedies

SCORE = "critic/score/mean"
SUCCESS = "train/success"
SPREAD = "group/reward_std/mean"
ZERO_SPREAD = "group/zero_std_ratio"
GRAD_NORM = "actor/grad_norm"
ENTROPY = "actor/entropy"
LOSS = "actor/pg_loss"
FAULT_REASONS = ("failed", "cancelled", "deadline", "no-tokens", "no-baseline")
"""The drop reasons that are faults, unlike the filters of a recipe."""
FAILED_PREFIX = "rollout/failed/"
"""The prefix of the counts of failed attempts, by kind."""
REWARD_FAILURE_PREFIX = "scorer_"
"""The prefix of the kinds of attempts whose reward failed."""
SMOOTHED = (SCORE, SUCCESS, SPREAD, ZERO_SPREAD, GRAD_NORM, ENTROPY)


class CollapseLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The thresholds of the warnings. Steps are RL steps."""

    smoothing: float = 0.2
    """The weight of the newest step in a running mean."""
    warmup_steps: int = 5
    """The number of steps before a running mean is used."""
    patience_steps: int = 10
    """The number of steps without a better reward after which the run counts as stalled."""
    gain: float = 0.05
    """The smallest improvement of a reward that counts, as a share of the distance between the
    lowest and the highest running mean."""
    solved_success: float = 0.9
    """The success rate from which low entropy and equal rewards are the goal and not a fault."""
    zero_spread_ratio: float = 0.8
    """Warn from this share of groups in which every attempt has the same reward."""
    spread_drop: float = 0.2
    """Warn if the spread of rewards in groups falls to this share of its highest running mean."""
    gradient_factor: float = 5.0
    """Warn if the gradient norm exceeds this multiple of its running mean."""
    entropy_drop: float = 0.1
    """Warn if the entropy falls to this share of its level after the warm-up."""
    entropy_rise: float = 0.5
    """Warn if the entropy rises this many nats above its lowest running mean, and has at least
    doubled."""
    reward_drop: float = 0.5
    """Warn if the reward has lost this share of its gain since the start."""
    reward_noise: float = 2.0
    """A fall of the reward counts only from this multiple of the running mean deviation."""
    reward_share: float = 0.02
    """A fall below this share of the reward's size, or of its spread in groups if that is larger,
    is ignored."""
    lost_rollouts: float = 0.25
    """Warn from this share of a step's trajectories that were dropped because of a fault."""


class RunningMean(msgspec.Struct):
    """The plain mean of the first values, and an exponential mean afterwards. `deviation` is the
    running mean of the values' distance from that mean."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0

    def add(self, value: float, smoothing: float) -> None:
        self.count += 1
        weight = max(smoothing, 1.0 / self.count)
        if self.count > 1:
            self.deviation += max(smoothing, 1.0 / (self.count - 1)) * (
                abs(value - self.mean) - self.deviation
            )
        self.mean += weight * (value - self.mean)


class CollapseState(msgspec.Struct):
    """The state of the monitor."""

    step: int = 0
    means: dict[str, RunningMean] = msgspec.field(default_factory=dict)
    first_score: float | None = None
    best_score: float | None = None
    best_score_step: int = 0
    lowest_score: float | None = None
    highest_spread: float = 0.0
    usual_gradient: float | None = None
    """The running mean of the gradient norm before the newest step. None during the warm-up."""
    start_entropy: float | None = None
    lowest_entropy: float | None = None


class CollapseSigns:
    """Receives every step's metrics, once and in order, and returns the signs of the step."""

    def __init__(self, remedies: Remedies) -> None:
        self.limits = CollapseLimits()
        self.remedies = remedies
        self.state = CollapseState()
        self._signs: dict[str, Callable[[Mapping[str, float | None]], str | None]] = {
            "not_finite": self._not_finite,
            "rollouts_lost": self._rollouts_lost,
            "gradient_spike": self._gradient_spike,
            "spread_vanished": self._spread_vanished,
            "entropy_collapsed": self._entropy_collapsed,
            "entropy_exploded": self._entropy_exploded,
            "reward_fell": self._reward_fell,
        }

    def observe(self, step: int, metrics: Mapping[str, float | None]) -> dict[str, str]:
        """Code -> observation, meaning and remedy of the signs of this step, the worst first."""
        self._update_state(step, metrics)
        texts = {code: find_sign(metrics) for code, find_sign in self._signs.items()}
        return {code: text for code, text in texts.items() if text is not None}

    def _update_state(self, step: int, metrics: Mapping[str, float | None]) -> None:
        state = self.state
        limits = self.limits
        state.step = step
        state.usual_gradient = self._expected_mean(GRAD_NORM)
        for key in SMOOTHED:
            value = _finite(metrics, key)
            if value is None or (
                key == GRAD_NORM and value == 0.0
            ):  # a step whose groups were all dropped has no information about gradients
                continue

            running = state.means.setdefault(key, RunningMean())
            if key == GRAD_NORM and running.count >= limits.warmup_steps:
                value = min(
                    value, limits.gradient_factor * running.mean
                )  # a spike must not hide the next one

            running.add(value, limits.smoothing)

        score = self._mean(SCORE)
        if score is not None:
            state.first_score = score if state.first_score is None else state.first_score
            state.lowest_score = (
                score if state.lowest_score is None else min(state.lowest_score, score)
            )
            gain = limits.gain * (
                (state.best_score if state.best_score is not None else score) - state.lowest_score
            )
            if state.best_score is None or score > state.best_score + gain:
                state.best_score = score
                state.best_score_step = step

        state.highest_spread = max(state.highest_spread, self._expected_mean(SPREAD) or 0.0)
        entropy = self._expected_mean(ENTROPY)
        if entropy is not None:
            state.start_entropy = entropy if state.start_entropy is None else state.start_entropy
            state.lowest_entropy = (
                entropy if state.lowest_entropy is None else min(state.lowest_entropy, entropy)
            )

    def _mean(self, key: str) -> float | None:
        running = self.state.means.get(key)
        return None if running is None or running.count == 0 else running.mean

    def _expected_mean(self, key: str) -> float | None:
        running = self.state.means.get(key)
        return None if running is None or running.count < self.limits.warmup_steps else running.mean

    def _is_solved(self) -> bool:
        success = self._mean(SUCCESS)
        return success is not None and success >= self.limits.solved_success

    def _is_stalled(self) -> bool:
        return self.state.step - self.state.best_score_step >= self.limits.patience_steps

    def _success_text(self) -> str:
        success = self._mean(SUCCESS)
        score = self._mean(SCORE)
        return (
            f"success is {success:.0%}"
            if success is not None
            else f"the mean reward is {0.0 if score is None else score:.3g}"
        )

    def _not_finite(self, metrics: Mapping[str, float | None]) -> str | None:
        not_finite = [
            key
            for key in (LOSS, GRAD_NORM, ENTROPY, SCORE)
            if key in metrics and _finite(metrics, key) is None
        ]
        if not not_finite:
            return None

        return (
            f"{' and '.join(not_finite)} is not a finite number: the update overflowed and later "
            "steps can't be trusted. "
            "Resume from the last checkpoint with a lower trainer.learning_rate"
            + (f", and {self.remedies.raise_precision}." if self.remedies.raise_precision else ".")
        )

    def _rollouts_lost(self, metrics: Mapping[str, float | None]) -> str | None:
        total = _finite(metrics, "rollout/in") or 0.0
        prefix = "rollout/dropped/"
        lost_counts = {
            reason: count
            for reason in sorted(FAULT_REASONS)
            if (count := _finite(metrics, f"{prefix}{reason}"))
        }
        if total == 0 or sum(lost_counts.values()) < self.limits.lost_rollouts * total:
            return None

        reasons = ", ".join(f"{count:.0f} {reason}" for reason, count in lost_counts.items())
        kinds = {
            key.removeprefix(FAILED_PREFIX): f"{count:.0f} {key.removeprefix(FAILED_PREFIX)}"
            for key in sorted(metrics)
            if key.startswith(FAILED_PREFIX) and (count := _finite(metrics, key))
        }
        has_timeouts = any(kind.endswith("timeout") for kind in kinds)

        return (
            f"{sum(lost_counts.values()):.0f} of {total:.0f} trajectories were dropped "
            f"({reasons}): {_suspects(kinds)} is at fault rather than the policy. "
            + (f"Those that failed: {', '.join(kinds.values())}. " if kinds else "")
            + "`agentevo trajectories show` gives the error of each"
            + ("; raise agent.timeout_s for those that ran out of time." if has_timeouts else ".")
        )

    def _gradient_spike(self, metrics: Mapping[str, float | None]) -> str | None:
        value = _finite(metrics, GRAD_NORM)
        usual = self.state.usual_gradient
        if value is None or not usual or value <= self.limits.gradient_factor * usual:
            return None

        return (
            f"The gradient norm jumped to {value:.3g}, {value / usual:.0f} times its running "
            f"mean of {usual:.3g}. If it happens again the "
            "policy is likely to collapse and not recover: lower trainer.learning_rate or "
            "trainer.max_grad_norm, or resume from an "
            "earlier checkpoint."
        )

    def _spread_vanished(self, metrics: Mapping[str, float | None]) -> str | None:
        spread = self._expected_mean(SPREAD)
        ratio = self._expected_mean(ZERO_SPREAD)
        peak = self.state.highest_spread

        has_equal_rewards = ratio is not None and ratio >= self.limits.zero_spread_ratio
        has_small_spread = (
            spread is not None and peak > 0 and spread <= self.limits.spread_drop * peak
        )
        if (
            not (has_equal_rewards or has_small_spread)
            or self._is_solved()
            or not self._is_stalled()
        ):
            return None

        findings = [f"their spread is {spread:.2g}, was {peak:.2g}"] if spread is not None else []
        findings += [f"{ratio:.0%} of groups have none at all"] if ratio is not None else []
        return (
            f"Attempts at the same task now earn nearly the same reward ({'; '.join(findings)}) "
            f"while {self._success_text()}: such groups "
            "teach nothing, and the agent may be repeating one answer everywhere. Raise "
            f"sampling.temperature or trainer.group_size, {self.remedies.raise_entropy}, or "
            "choose tasks "
            f"of more mixed difficulty {self.remedies.tasks}."
        )

    def _entropy_collapsed(self, metrics: Mapping[str, float | None]) -> str | None:
        entropy = self._expected_mean(ENTROPY)
        start = self.state.start_entropy
        if (
            entropy is None
            or not start
            or entropy > self.limits.entropy_drop * start
            or self._is_solved()
            or not self._is_stalled()
        ):
            return None

        remedies = self.remedies
        advice = [remedies.raise_entropy, remedies.widen_clipping, remedies.keep_groups]
        advice += ["raise sampling.temperature", "or lower trainer.learning_rate"]
        return (
            f"The policy has stopped exploring: its entropy is {entropy:.2g} nats a token, "
            f"{entropy / start:.0%} of the {start:.2g} it "
            f"started with, while {self._success_text()} and no longer rising. "
            f"{_sentence(', '.join(filter(None, advice)))}"
        )

    def _entropy_exploded(self, metrics: Mapping[str, float | None]) -> str | None:
        entropy = self._expected_mean(ENTROPY)
        lowest = self.state.lowest_entropy
        if (
            entropy is None
            or lowest is None
            or entropy < lowest + self.limits.entropy_rise
            or entropy < 2 * lowest
            or self._is_solved()
        ):
            return None

        return (
            f"The policy's tokens are turning random: entropy rose from {lowest:.2g} to "
            f"{entropy:.2g} nats a token. {_sentence(self.remedies.lower_entropy)[:-1]}, tie the "
            "policy to "
            f"its start ({self.remedies.limit_drift}), or resume from an earlier checkpoint."
        )

    def _reward_fell(self, metrics: Mapping[str, float | None]) -> str | None:
        state = self.state
        score = self._expected_mean(SCORE)
        if score is None or state.best_score is None or state.first_score is None:
            return None

        gained = state.best_score - state.first_score
        drop = state.best_score - score
        size = max(abs(state.best_score), abs(score), state.highest_spread)
        if (
            gained <= 0
            or drop < self.limits.reward_share * size
            or drop < self.limits.reward_drop * gained
            or drop < self.limits.reward_noise * state.means[SCORE].deviation
        ):
            return None

        return (
            f"The reward fell from {state.best_score:.3g} (about step {state.best_score_step}) "
            f"to {score:.3g}. The best checkpoint is "
            "kept: resume from it with a lower trainer.learning_rate, or "
            f"{self.remedies.limit_drift}."
        )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _suspects(kinds: Iterable[str]) -> str:
    """The parts of the run that may have caused these kinds of failures (rollout/failures.py)."""
    is_reward_failure = [kind.startswith(REWARD_FAILURE_PREFIX) for kind in kinds]
    if is_reward_failure and all(is_reward_failure):
        return "a reward function"
    return (
        f"the environment, the agent{', a reward function' * any(is_reward_failure)} or the engine"
    )


def _finite(metrics: Mapping[str, float | None], key: str) -> float | None:
    value = metrics.get(key)
    return None if value is None or not math.isfinite(value) else float(value)
