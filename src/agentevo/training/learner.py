"""The protocol between the loop and its trainers: `Trainer` learns by advantages,
`PreferenceTrainer` by comparing answers, `SupervisedTrainer` by likelihood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentevo.training.optimization import Optimization
from agentevo.types import Trajectory


@dataclass
class PreparedBatch:
    """What a step trains on."""

    samples: Sequence[Any]
    """For `step`: samples, or pairs of answers; none where nothing can be learnt."""
    metrics: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    """Id of each trajectory that is not trained on after all -> why."""


class Learner(Protocol):
    """`begin` once, then `step` after `step`."""

    @property
    def optimization(self) -> Optimization: ...

    @property
    def steps(self) -> int:
        """Updates so far."""

    def begin(self) -> None:
        """Training begins: models that start as copies of the policy become what it is now."""

    def step(self, samples: Sequence[Any]) -> dict[str, float]:
        """One update; its metrics. Raises TrainingError, before the weights change, if a number is
        not finite."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the model's weights."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, for a model whose weights are already loaded."""


class RolloutTrainer(Learner, Protocol):
    """A trainer that learns from attempts."""

    def prepare(
        self,
        trajectories: Sequence[Trajectory],
        baselines: Mapping[str, float] = ...,
        *,
        version: int | None = None,
        bound: int | None = None,
    ) -> PreparedBatch:
        """Samples for `step`. With `version`, the number of committed steps, nothing older than
        `bound` is trained on; see `staleness.py`."""
