"""The protocol between the loop and its trainers: `Trainer` learns from advantages,
`PreferenceTrainer` from comparisons of answers, `SupervisedTrainer` from likelihood."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentevo.training.batching.credit import TurnCredits
from agentevo.training.optimization import Optimization
from agentevo.training.token_numbers import TokenNumbers
from agentevo.types import Trajectory
from agentevo.types.images import ImageFile


@dataclass
class PreparedBatch:
    """The training data of a step."""

    samples: Sequence[Any]
    """The input of `step`: samples, or pairs of answers. It is empty if nothing can be learnt."""
    metrics: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    """Trajectory id -> the reason why that trajectory is not trained on after all."""
    warnings: list[str] = field(default_factory=list)
    """Messages about the step for the user."""
    images: Mapping[str, ImageFile] = field(default_factory=dict)
    """The files of the samples' images, by digest, unless the trainer was shown them before."""


class Learner(Protocol):
    """A model's trainer: `begin` is called once, then `step` repeatedly."""

    @property
    def optimization(self) -> Optimization: ...

    @property
    def steps(self) -> int:
        """The number of updates so far."""

    @property
    def numbers(self) -> TokenNumbers | None:
        """The measurements of each token of the last step; None if they are not kept."""

    def begin(self) -> None:
        """Starts training: models that start as copies of the policy take its present weights."""

    def show(self, images: Mapping[str, ImageFile]) -> None:
        """Gives the files of the images of the next calls, by digest, instead of those before.
        Nothing if the policy reads text only."""

    def step(self, samples: Sequence[Any]) -> dict[str, float]:
        """Makes one update and returns its metrics. Raises TrainingError, before the weights
        change, if a number is not finite."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs in addition to the model's weights."""

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
        turn_credits: TurnCredits = ...,
        replayed: Collection[str] = ...,
    ) -> PreparedBatch:
        """Makes the samples for `step`. With `version`, the number of committed steps, nothing
        older than `bound` is trained on, except the `replayed` trajectories (ids); see
        `staleness.py`. `turn_credits`: the reward of each turn, where a function of the user gives
        it."""
