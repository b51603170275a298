"""What the first of several processes that train together sends the others to carry out
(ranks.py). A command is pickled data; each one is carried out by `match`, never by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from agentevo.config import SFTSection
from agentevo.models.files.split_models import PartsCommand
from agentevo.runs.orchestration.learners import TrainerName
from agentevo.training.batching.credit import TurnCredits
from agentevo.training.learner import Learner, PreparedBatch
from agentevo.training.preference import PreferenceTrainer
from agentevo.training.supervised import SupervisedTrainer
from agentevo.training.trainer import Trainer
from agentevo.types import Sample, Trajectory
from agentevo.types.images import ImageFile


@dataclass(frozen=True)
class LoadPolicy:
    """Load the policy, from a checkpoint or as the recipe says. It is the first command."""

    checkpoint: Path | None


@dataclass(frozen=True)
class StopFollowing:
    """The run has ended."""


@dataclass(frozen=True)
class MakeTrainer:
    """Make a trainer of the policy (learners.py). Later commands name it."""

    name: TrainerName
    total_steps: int = 0
    """Of supervised training."""
    settings: SFTSection | None = None
    """Of a cold start."""


@dataclass(frozen=True)
class BeginTraining:
    """See Learner.begin."""

    name: TrainerName

    def apply(self, trainer: Learner) -> None:
        """Makes the call on this process."""
        trainer.begin()


@dataclass(frozen=True)
class ShowImages:
    """See Learner.show."""

    name: TrainerName
    images: Mapping[str, ImageFile]

    def apply(self, trainer: Learner) -> None:
        """Makes the call on this process."""
        trainer.show(self.images)


@dataclass(frozen=True)
class PrepareAttempts:
    """See Trainer.prepare."""

    name: TrainerName
    trajectories: Sequence[Trajectory]
    baselines: Mapping[str, float]
    version: int | None
    bound: int | None
    turn_credits: TurnCredits
    replayed: frozenset[str]

    def apply(self, trainer: Learner) -> PreparedBatch:
        """Makes the call on this process."""
        assert isinstance(trainer, (Trainer, PreferenceTrainer))
        return trainer.prepare(
            self.trajectories,
            self.baselines,
            version=self.version,
            bound=self.bound,
            turn_credits=self.turn_credits,
            replayed=self.replayed,
        )


@dataclass(frozen=True)
class TrainStep:
    """See Learner.step."""

    name: TrainerName
    samples: Sequence[Any]

    def apply(self, trainer: Learner) -> dict[str, float]:
        """Makes the call on this process."""
        return trainer.step(self.samples)


@dataclass(frozen=True)
class MeasureHeldOut:
    """See SupervisedTrainer.held_out. Only the first process can stop it."""

    name: TrainerName
    samples: Sequence[Sample]

    def apply(
        self, trainer: Learner, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Makes the call on this process."""
        assert isinstance(trainer, SupervisedTrainer)
        return trainer.held_out(self.samples, stop=stop)


@dataclass(frozen=True)
class LoadTrainerState:
    """See Learner.load_state_dict: the others read the checkpoint themselves."""

    name: TrainerName
    checkpoint: Path


@dataclass(frozen=True)
class TakeOptimizer:
    """See Optimization.carry_on: every process reads the other run's checkpoint."""

    name: TrainerName
    checkpoint: Path


@dataclass(frozen=True)
class GatherWeights:
    """Send the trained weights to the first process, whose whole model serves."""


@dataclass(frozen=True)
class ContributeState:
    """Add this process's part to a checkpoint. `with_weights`: no process has the whole model.
    `copied`: the state as it is now, although training continues before it is written."""

    name: TrainerName
    with_weights: bool
    copied: bool


TrainerCall: TypeAlias = BeginTraining | ShowImages | PrepareAttempts | TrainStep | MeasureHeldOut
"""Commands that are the same call on every process."""
TrainerCommand: TypeAlias = TrainerCall | LoadTrainerState | TakeOptimizer | ContributeState
"""Commands to one trainer, by its name."""
FollowerCommand: TypeAlias = MakeTrainer | GatherWeights | TrainerCommand | PartsCommand
"""Commands to a process that has loaded the policy."""
RankCommand: TypeAlias = LoadPolicy | StopFollowing | FollowerCommand


def title_of(command: RankCommand) -> str:
    """The command's line in the log of a process."""
    kind = type(command).__name__
    return f"{command.name} {kind}" if isinstance(command, TrainerCommand) else kind
