"""On the first of several processes that train together: the policy's trainers. Each is an ordinary
trainer to the loop; all processes make its calls together.

If the processes hold the model in parts and the first process's own engine serves, the first
process also has a whole model, into which the parts are gathered after every update, tensor by
tensor. If other engines serve, it has no whole model: weights are gathered tensor by tensor to
publish and save them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentevo.config import RunConfig, SFTSection
from agentevo.models.compute.sharded import skeleton_of
from agentevo.models.files.split_models import InParts, register_in_parts
from agentevo.runs.orchestration.components import load_policy
from agentevo.runs.orchestration.learners import (
    LocalTrainers,
    TrainerName,
    saved_state,
)
from agentevo.runs.orchestration.rank_commands import (
    BeginTraining,
    ContributeState,
    GatherWeights,
    LoadPolicy,
    LoadTrainerState,
    MakeTrainer,
    MeasureHeldOut,
    PrepareAttempts,
    ShowImages,
    TakeOptimizer,
    TrainerCall,
    TrainStep,
    title_of,
)
from agentevo.runs.orchestration.ranks import RunRanks, contribution_of
from agentevo.training.batching.credit import TurnCredits
from agentevo.training.checkpoint_parts import Contribution
from agentevo.training.learner import Learner, PreparedBatch
from agentevo.training.optimization import Optimization
from agentevo.training.pairs import Demonstrations
from agentevo.training.preference import PreferenceTrainer
from agentevo.training.sharding.layouts import gather_trained
from agentevo.training.sharding.saving import weight_parts
from agentevo.training.state_parts import split_state
from agentevo.training.supervised import SupervisedTrainer
from agentevo.training.token_numbers import TokenNumbers
from agentevo.training.trainer import Trainer
from agentevo.types import Sample, Trajectory
from agentevo.types.images import ImageFile

L = TypeVar("L", bound=Trainer | PreferenceTrainer | SupervisedTrainer)


class RankTrainers:
    """As LocalTrainers, of all processes; see the module."""

    def __init__(
        self,
        ranks: RunRanks,
        config: RunConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        checkpoint: Path | None,
        *,
        serves: bool,
    ) -> None:
        """`model` serves, unless other engines do (`serves=False`); in that case it becomes this
        process's part. `checkpoint`: the one from which the model was loaded."""
        self.ranks = ranks
        self.checkpoint = checkpoint
        self._serving = model
        self._config = config
        ranks.send(LoadPolicy(checkpoint))
        self.log = ranks.log(config.run_dir)
        self.reads_parts = config.trainer.parallel.is_spread
        self._has_whole = serves or not self.reads_parts
        """Whether this process also has the whole model."""

        self._model = model
        if self.reads_parts:
            part_of = load_policy(config, checkpoint, for_part=True).model if serves else model
            self._model = ranks.share(part_of)

        self._local = ranks.trainers(config, self._model, tokenizer)
        if not self._has_whole:
            register_in_parts(
                model,
                InParts(
                    skeleton_of(model),
                    lambda only_trained: weight_parts(model, only_trained),
                    ranks.send,
                    ranks.weights,
                ),
            )

    def policy(self) -> RankRolloutTrainer:
        self.ranks.send(MakeTrainer("policy"))
        return RankRolloutTrainer(self, "policy", self._local.policy())

    def preferences(self, demonstrations: Demonstrations | None) -> RankRolloutTrainer:
        """Only this process makes pairs, so the others need no demonstrations."""
        self.ranks.send(MakeTrainer("preferences"))
        return RankRolloutTrainer(self, "preferences", self._local.preferences(demonstrations))

    def conversations(self, total_steps: int) -> RankSupervisedTrainer:
        self.ranks.send(MakeTrainer("sft", total_steps))
        return RankSupervisedTrainer(self, "sft", self._local.conversations(total_steps))

    def cold_start(self, settings: SFTSection, total_steps: int) -> RankSupervisedTrainer:
        self.ranks.send(MakeTrainer("cold_start", total_steps, settings))
        trainer = self._local.cold_start(settings, total_steps)
        return RankSupervisedTrainer(self, "cold_start", trainer)

    def state_of(self, trainer: Learner, *, copied: bool) -> tuple[dict[str, Any], Contribution]:
        """The trainer's state for a checkpoint, and what all processes add to it: of the state as
        it is now, whenever it is written, if `copied`. The other processes begin now."""
        assert isinstance(trainer, RankTrainer), "several processes train one policy"

        command = ContributeState(trainer.name, with_weights=not self._has_whole, copied=copied)
        self.ranks.send(command)
        state = trainer.state_dict()
        shared = contribution_of(self._model, state, self.ranks.saves, command)
        return split_state(state)[0], shared  # `shared` has the parts

    def take_optimizer(self, trainer: Learner, checkpoint: Path) -> None:
        """The trainer continues with the optimizer's state of another run's checkpoint."""
        assert isinstance(trainer, RankTrainer), "several processes train one policy"

        self.ranks.send(TakeOptimizer(trainer.name, checkpoint))
        state = saved_state(self._config, checkpoint, in_parts=self.reads_parts)
        trainer.optimization.carry_on(state["optimization"])

    def gather(self) -> None:
        """Copies the trained weights into the model that serves."""
        if self.reads_parts and self._has_whole:
            self.ranks.send(GatherWeights())
            gather_trained(self._model, self._serving)


class RankTrainer(Generic[L]):
    """The first process's trainer, of any kind: a Learner."""

    def __init__(self, trainers: RankTrainers, name: TrainerName, local: L) -> None:
        self.name = name
        self._trainers = trainers
        self._ranks = trainers.ranks
        self._local: L = local

    @property
    def optimization(self) -> Optimization:
        return self._local.optimization

    @property
    def steps(self) -> int:
        return self._local.steps

    @property
    def numbers(self) -> TokenNumbers | None:
        return self._local.numbers

    def begin(self) -> None:
        """See Learner.begin."""
        self._call(BeginTraining(self.name))

    def show(self, images: Mapping[str, ImageFile]) -> None:
        """See Learner.show."""
        self._call(ShowImages(self.name, dict(images)))

    def step(self, samples: Sequence[Any]) -> dict[str, float]:
        """See Learner.step."""
        metrics: dict[str, float] = self._call(TrainStep(self.name, samples))
        self._trainers.gather()
        return metrics

    def _call(self, command: TrainerCall) -> Any:
        """Makes the call on all processes. Returns this process's result."""
        with self._trainers.log.call(title_of(command)):
            self._ranks.send(command)
            return command.apply(self._local)

    def state_dict(self) -> dict[str, Any]:
        """This process's part of the state; RankTrainers.state_of is of all processes."""
        return self._local.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Learner.load_state_dict."""
        checkpoint = self._trainers.checkpoint
        assert checkpoint is not None, "the others read the state that the model was loaded with"

        command = LoadTrainerState(self.name, checkpoint)
        with self._trainers.log.call(title_of(command)):
            self._ranks.send(command)
            self._local.load_state_dict(state)


class RankRolloutTrainer(RankTrainer[Trainer | PreferenceTrainer]):
    """A RolloutTrainer."""

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
        """See RolloutTrainer.prepare."""
        command = PrepareAttempts(
            self.name,
            list(trajectories),
            dict(baselines),
            version,
            bound,
            dict(turn_credits),
            frozenset(replayed),
        )
        if isinstance(self._local, PreferenceTrainer):
            return command.apply(self._local)  # making pairs needs no model, so no other process

        batch: PreparedBatch = self._call(command)
        return batch


class RankSupervisedTrainer(RankTrainer[SupervisedTrainer]):
    def held_out(
        self, samples: Sequence[Sample], *, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """See SupervisedTrainer.held_out. Only this process can stop it."""
        command = MeasureHeldOut(self.name, samples)
        self._ranks.send(command)
        return command.apply(self._local, stop)


PolicyTrainers: TypeAlias = LocalTrainers | RankTrainers
