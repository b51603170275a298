"""What the loop asks of whoever trains the policy: `Trainer` by advantages, `PreferenceTrainer` by
comparing answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentevo.training.optimization import Optimization
from agentevo.types import Trajectory


class Made(Protocol):
    """What `prepare` finds."""

    @property
    def samples(self) -> Sequence[Any]:
        """For `step`; none where nothing can be learnt."""

    @property
    def metrics(self) -> dict[str, float]: ...

    @property
    def dropped(self) -> dict[str, str]:
        """Id of each trajectory that is not trained on after all -> why."""


class Learner(Protocol):
    """`begin` once, then `prepare` and `step` in turn."""

    optimization: Optimization
    steps: int
    """Updates so far."""

    def begin(self) -> None: ...

    def prepare(
        self,
        trajectories: Sequence[Trajectory],
        baselines: Mapping[str, float] = ...,
        *,
        version: int | None = None,
        bound: int | None = None,
    ) -> Made:
        """With `version`, the number of committed steps: nothing older than `bound` is trained on;
        see `staleness.py`."""

    def step(self, samples: Sequence[Any]) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
