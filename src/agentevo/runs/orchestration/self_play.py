"""A step of self-play: the proposer asks, the solver answers, the proposer is rewarded.

    prompts ──► proposals ──► questions ──► the solver's groups, written
                    └────────────── rewards ◄──┘ then the proposals' groups, written

A proposal is written with its reward, and therefore after the solver's attempts. After a kill in
between, the resumed step proposes again from the same seeds. It does not sample again the groups
that it finds in the store, and a proposal that is rewarded twice gets the same reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from agentevo.data.question_overlap import question_key
from agentevo.rollout.self_play import read_proposals, reward_proposals
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.rollout_sources import RolloutRound, SynchronousRollouts
from agentevo.types import Task


class SelfPlayRollouts(SynchronousRollouts):
    """See the module."""

    def __init__(self, parts: Components) -> None:
        super().__init__(parts)
        section = parts.config.tasks.self_play
        proposals = parts.tasks.proposals
        assert section is not None and proposals is not None

        self._section = section
        self._group_size = proposals.group_size
        keys = (question_key(task.query or "") for task in parts.tasks.never_trained())
        self._held_out = {key for key in keys if key is not None}

    async def round(self, step: int, tasks: Sequence[Task]) -> RolloutRound:
        """The solver's groups, then the proposer's. `tasks`: the step's prompts."""
        sampler = self._parts.sampler
        config = self._parts.config
        for engine in self._parts.engines:
            await engine.forget_cache()

        sample = partial(
            sampler.sample,
            temperature=config.sampling.temperature,
            split="train",
            step=step,
            label="train",
        )
        proposer_attempts = await sample(tasks, attempts=self._group_size, write=False)
        proposals = read_proposals(proposer_attempts, step, self._held_out)
        attempts = await sample(proposals.tasks, attempts=config.trainer.group_size)
        paid = reward_proposals(proposals, attempts, self._section)
        earned = await sampler.write(paid.trajectories, split="train", step=step)
        return RolloutRound([*attempts, *earned], dropped=paid.dropped, metrics=paid.metrics)
