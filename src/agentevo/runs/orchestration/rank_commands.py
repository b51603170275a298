"""What the first of several processes that train together sends the others to carry out
(ranks.py). A command is pickled data; each one is carried out by `match`, never by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from agentevo.models.files.split_models import PartsCommand
from agentevo.runs.orchestration.learners import TrainerKind
from agentevo.training.batching.credit import TurnCredits
from agentevo.training.learner import PreparedBatch
from agentevo.training.trainer import Trainer
from agentevo.types import Sample, Trajectory


@dataclass(frozen=True)
class LoadPolicy:
    """Load the policy, from a checkpoint or as the recipe says. It is the first command."""

    checkpoint: Path | None


@dataclass(frozen=True)
class StopFollowing:
    """The run has ended."""


@dataclass(frozen=True)
class MakeTrainer:
    """Make a trainer of the policy. Later commands name its kind."""

    kind: TrainerKind


@dataclass(frozen=True)
class BeginTraining:
    """See Learner.begin."""

    name: str


@dataclass(frozen=True)
class PrepareAttempts:
    """See Trainer.prepare."""

    name: str
    trajectories: Sequence[Trajectory]
    baselines: Mapping[str, float]
    version: int | None
    bound: int | None
    turn_credits: TurnCredits

    def apply(self, trainer: Trainer) -> PreparedBatch:
        """Makes the call on this process."""
        return trainer.prepare(
            self.trajectories,
            self.baselines,
            version=self.version,
            bound=self.bound,
            turn_credits=self.turn_credits,
        )


@dataclass(frozen=True)
class TrainStep:
    """See Learner.step."""

    name: str
    samples: Sequence[Any]


@dataclass(frozen=True)
class MeasureHeldOut:
    """See SupervisedTrainer.held_out. Only the first process can stop it."""

    name: str
    samples: Sequence[Sample]


@dataclass(frozen=True)
class LoadTrainerState:
    """See Learner.load_state_dict: the others read the checkpoint themselves."""

    name: str
    checkpoint: Path


@dataclass(frozen=True)
class TakeOptimizer:
    """See Optimization.carry_on: every process reads the other run's checkpoint."""

    name: str
    checkpoint: Path


@dataclass(frozen=True)
class GatherWeights:
    """Send the trained weights to the first process, whose whole model serves."""


@dataclass(frozen=True)
class ContributeState:
    """Add this process's part to a checkpoint. `with_weights`: no process has the whole model.
    `copied`: the state as it is now, although training continues before it is written."""

    name: str
    with_weights: bool
    copied: bool


TrainerCommand: TypeAlias = (
    BeginTraining
    | PrepareAttempts
    | TrainStep
    | MeasureHeldOut
    | LoadTrainerState
    | TakeOptimizer
    | ContributeState
)
"""Commands to one trainer, by its name."""
FollowerCommand: TypeAlias = MakeTrainer | GatherWeights | TrainerCommand | PartsCommand
"""Commands to a process that has loaded the policy."""
RankCommand: TypeAlias = LoadPolicy | StopFollowing | FollowerCommand


def title_of(command: RankCommand) -> str:
    """The command's line in the log of a process."""
    kind = type(command).__name__
    return f"{command.name} {kind}" if isinstance(command, TrainerCommand) else kind
