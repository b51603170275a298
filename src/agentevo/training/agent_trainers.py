"""Trains several policies in one run, each with its own trainer: an agent's trajectories train only
the policy that it plays with.

Metrics have the names of a run with one policy, and are those of the main policy, the first;
metrics of the others begin with `agents/POLICY/`. Counts of tokens or work are sums over all
policies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from agentevo.training.batching.credit import TurnCredits
from agentevo.training.learner import PreparedBatch, RolloutTrainer
from agentevo.training.optimization import Optimization
from agentevo.training.token_numbers import TokenNumbers
from agentevo.types import Trajectory
from agentevo.types.images import ImageFile

SUMMED = ("trainer/", "perf/", "staleness/masked_tokens")
"""Prefixes of the metrics that are summed."""


class PolicySamples(NamedTuple):
    """The training data of one policy in a step."""

    policy: str
    samples: Sequence[Any]


class AgentTrainers:
    """See the module: a RolloutTrainer."""

    def __init__(
        self, trainers: Mapping[str, RolloutTrainer], policy_of: Callable[[str], str]
    ) -> None:
        """Trainers by the name of their policy, the main one first; `policy_of` maps an agent to
        its policy."""
        self.trainers = dict(trainers)
        self._policy_of = policy_of
        self._main = next(iter(self.trainers))

    @property
    def optimization(self) -> Optimization:
        return self.trainers[self._main].optimization

    @property
    def steps(self) -> int:
        return max(trainer.steps for trainer in self.trainers.values())

    @property
    def numbers(self) -> TokenNumbers | None:
        """See Learner.numbers."""
        trainer_numbers = [
            trainer.numbers for trainer in self.trainers.values() if trainer.numbers is not None
        ]
        if not trainer_numbers:
            return None
        together = TokenNumbers()
        for numbers in trainer_numbers:
            together.add(numbers.items())
        return together

    def begin(self) -> None:
        """See Learner.begin."""
        for trainer in self.trainers.values():
            trainer.begin()

    def show(self, images: Mapping[str, ImageFile]) -> None:
        """See Learner.show."""
        for trainer in self.trainers.values():
            trainer.show(images)

    def prepare(
        self,
        trajectories: Sequence[Trajectory],
        baselines: Mapping[str, float] = MappingProxyType({}),
        *,
        version: int | None = None,
        bound: int | None = None,
        turn_credits: TurnCredits = MappingProxyType({}),
        replayed: Collection[str] = (),
    ) -> PreparedBatch:
        """See RolloutTrainer.prepare; `samples` are PolicySamples."""
        parts = {
            name: trainer.prepare(
                [t for t in trajectories if self._policy_of(t.agent) == name],
                baselines,
                version=version,
                bound=bound,
                turn_credits=turn_credits,
                replayed=replayed,
            )
            for name, trainer in self.trainers.items()
        }
        return PreparedBatch(
            [PolicySamples(name, part.samples) for name, part in parts.items() if part.samples],
            self._together({name: part.metrics for name, part in parts.items()}),
            {name: reason for part in parts.values() for name, reason in part.dropped.items()},
            [f"policy {name}: {text}" for name, part in parts.items() for text in part.warnings],
        )

    def step(self, samples: Sequence[PolicySamples]) -> dict[str, float]:
        """See Learner.step. Every policy is updated, or the run ends if a number is not finite."""
        return self._together(
            {sample.policy: self.trainers[sample.policy].step(sample.samples) for sample in samples}
        )

    def _together(self, metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        together: dict[str, float] = {}
        for policy, metric in metrics.items():
            for name, value in metric.items():
                if name.startswith(SUMMED):
                    together[name] = together.get(name, 0.0) + value
                else:
                    together[name if policy == self._main else f"agents/{policy}/{name}"] = value

        return together

    def state_dict(self) -> dict[str, Any]:
        """See Learner.state_dict."""
        return {name: trainer.state_dict() for name, trainer in self.trainers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Learner.load_state_dict."""
        for name, trainer in self.trainers.items():
            trainer.load_state_dict(state[name])
