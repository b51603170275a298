"""Training by comparing answers: pairs, or single answers, to one update of the policy and its
metrics.

    loss = sum over pairs of weight * l(log pi(chosen), log pi(rejected),
                                        log ref(chosen), log ref(rejected), ...)

with sums of log-probs over whole answers, so no part of the loss belongs to one micro-batch;
`backward_through_sums` makes loss and gradient the same for any split. All log-probs, including
those of the solver's and given answers, are the policy's at its sampling temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from agentevo.algorithms.preference import bind_preference_loss
from agentevo.config import AlgorithmSection, MemorySection, TrainerSection
from agentevo.models.compute.positions import context_length
from agentevo.models.compute.rows import shares_prefixes
from agentevo.training.batching.credit import TurnCredits
from agentevo.training.batching.images import ImageProvider, admit, spans_within
from agentevo.training.batching.packing import PackedBatch
from agentevo.training.batching.passes import (
    backward_through_sums,
    device_of,
    micro_batches,
    null_batches,
    token_tables,
)
from agentevo.training.batching.staleness import leave_out_stale
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.training.learner import PreparedBatch
from agentevo.training.optimization import Optimization, minibatches, over_updates
from agentevo.training.pairs import CandidateAnswer, Demonstrations, Pair, make_pairs
from agentevo.training.parallel import gather
from agentevo.training.phases import phase
from agentevo.training.roles.reference import Reference
from agentevo.training.sharding.layouts import layouts_of
from agentevo.training.token_numbers import TokenNumbers
from agentevo.training.workload import FlopCounter
from agentevo.types import Sample, Trajectory
from agentevo.types.images import ImageFile

METRICS = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "accuracy": "rewards/accuracies",
}
"""AgentEvo's name -> TRL's."""


class PreferenceTrainer:
    """Has the optimizer of a model that was prepared by
    `agentevo.models.compute.attention.prepare`, and the reference policy."""

    def __init__(
        self,
        model: PreTrainedModel,
        trainer: TrainerSection,
        section: AlgorithmSection,
        *,
        temperature: float = 1.0,
        demonstrations: Demonstrations | None = None,
        memory: MemorySection | None = None,
    ) -> None:
        algorithm = section.preference()
        if algorithm is None:
            raise ValueError(
                f"algorithm.name={section.name} has no preference loss: choose dpo, say"
            )

        self.model = model
        self.images = ImageProvider.of(model)
        self.numbers: TokenNumbers | None = None
        """See Learner.numbers: answers are compared, not their tokens."""
        self.section = trainer
        self.algorithm_section = section
        self.algorithm = algorithm
        self.loss = bind_preference_loss(algorithm.loss, algorithm.hyper)
        self.temperature = temperature
        self.demonstrations = demonstrations
        self.optimization = Optimization(
            model.parameters(), trainer, memory=memory, layouts=layouts_of(model)
        )
        self.flops = FlopCounter(model)
        self.reference: Reference | None = None
        self.steps = 0
        self.context_length = context_length(model.config)

    def begin(self) -> None:
        """Starts training: the reference, if the loss has one, takes the policy's present
        weights."""
        if self.algorithm.needs_reference:
            self.reference = Reference(self.model, self.algorithm_section)

    def show(self, images: Mapping[str, ImageFile]) -> None:
        """See Learner.show."""
        if self.images is not None:
            self.images.hold(images)

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
        """Pairs of the trajectories, for `step`. `baselines`, `turn_credits` and `replayed` are for
        other trainers.

        With `version`, the number of committed steps, an attempt with a token more than `bound`
        versions away from it is left out whole, because the losses compare whole answers (see
        `leave_out_stale`).
        """
        if version is None and bound is not None:
            raise ValueError(
                f"bound={bound} is counted from the trainer's version: give version=, the number "
                "of committed steps"
            )

        trajectories, unseen, warnings = admit(self.images, trajectories)
        stale: dict[str, str] = {}
        ages: dict[str, float] = {}
        if version is not None:
            trajectories, stale, ages = leave_out_stale(
                trajectories, trainer_version=version, bound=bound
            )

        pairs = make_pairs(
            trajectories, self.algorithm, self.algorithm_section, self.demonstrations
        )
        used = {answer.name for pair in pairs for answer in pair.answers}
        dropped = {t.id: "no-pair" for t in trajectories if t.id not in used}
        return PreparedBatch(
            pairs,
            {"preference/num_pairs": float(len(pairs)), **ages},
            dropped | stale | unseen,
            warnings,
        )

    def step(self, samples: Sequence[Pair]) -> dict[str, float]:
        """One update from a batch of pairs: `epochs` passes of `minibatches` optimizer steps;
        groups stay whole.

        Raises TrainingError, before the weights change, if the loss or the gradient is not finite.
        """
        with phase("reference"):
            reference = self._reference_sums(samples)
        updates = [self._update(part, reference) for part in minibatches(samples, self.section)]
        self.steps += 1
        if self.reference is not None:
            self.reference.follow(self.model, self.steps)
        return over_updates(updates)

    def _update(self, pairs: Sequence[Pair], reference: Mapping[str, float]) -> dict[str, float]:
        """One optimizer step."""
        lr = self.optimization.begin()
        answers = _answers(pairs)
        rows, owners = self._rows(answers)
        section = self.section
        device = device_of(self.model)
        merge = shares_prefixes(self.model, section.prefix_merging)
        batches = micro_batches(
            rows, section.micro_batch_tokens, device, merge=merge, images=self.images
        )
        nulls = null_batches(rows, len(batches), device, merge=merge, images=self.images)

        for indices, batch in batches:
            self.flops.count_training([rows[i] for i in indices], batch)

        comparison = _PreferenceComparison(pairs, answers, reference)
        baseline = self._kl_baseline(answers) if self.algorithm.loss == "kto" else None
        measured: dict[str, float] = {}

        def loss_of(sums: torch.Tensor) -> torch.Tensor:
            inputs = comparison.inputs(sums, self.algorithm.loss)
            if baseline is not None:
                inputs["kl_baseline"] = baseline

            loss, metrics = self.loss(**inputs)
            measured.update(
                {METRICS[key]: float(value) for key, value in metrics.items() if key in METRICS}
            )
            return loss

        loss, sums = backward_through_sums(
            self.model, batches, owners, loss_of, self.optimization.backward, nulls
        )
        norm = self.optimization.finish()

        measured |= {"loss": float(loss)} | comparison.means(sums)
        if baseline is not None:
            measured |= {"kl": baseline} | comparison.kto_rewards(
                sums, self.algorithm.hyper["beta"]
            )

        return (
            {f"preference/{key}": value for key, value in measured.items()}
            | self.flops.take()
            | {
                "actor/grad_norm": norm,
                "actor/lr": lr,
                "trainer/distinct_tokens": float(
                    sum(gather(sum(batch.num_distinct for _, batch in batches)))
                ),
                "trainer/logical_tokens": float(sum(len(row.ids) for row in rows)),
                "trainer/trained_tokens": float(sum(answer.num_tokens for answer in answers)),
            }
        )

    def _rows(self, answers: Sequence[CandidateAnswer]) -> tuple[list[Sample], list[int]]:
        """All rows, set to one temperature, and for each row the number of its answer."""
        rows = [
            msgspec.structs.replace(row, temperature=self.temperature)
            for answer in answers
            for row in answer.rows
        ]
        return rows, [number for number, answer in enumerate(answers) for _ in answer.rows]

    def _reference_sums(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Answer name -> summed log-prob under the reference; empty if there is no reference."""
        if self.reference is None:
            return {}

        reference = self.reference
        answers = _answers(pairs)
        rows, owners = self._rows(answers)

        def logprobs(batch: PackedBatch) -> dict[str, torch.Tensor]:
            self.flops.count_inference(batch)
            return {"ref": reference.logprobs(batch)}

        tables = self._tables(rows, logprobs)
        self.flops.stood_for(rows)
        sums = torch.zeros(len(answers)).index_add(0, torch.tensor(owners), tables["ref"].sum(1))
        return {answer.name: float(value) for answer, value in zip(answers, sums, strict=True)}

    def _kl_baseline(self, answers: Sequence[CandidateAnswer]) -> float:
        """KTO's reference point before it is cut at 0: the mean log-ratio of answers put after
        other tasks' prompts. 0 where there are none."""
        mismatched_rows = [
            row for rows in mismatch_answers(answers, self.context_length) for row in rows
        ]
        if not mismatched_rows or self.reference is None:
            return 0.0

        reference = self.reference
        num_answers = len({row.trajectory_id for row in mismatched_rows})
        rows = [
            msgspec.structs.replace(row, temperature=self.temperature) for row in mismatched_rows
        ]

        def log_ratio(batch: PackedBatch) -> dict[str, torch.Tensor]:
            return {"ratio": token_logprobs(self.model, batch)[0] - reference.logprobs(batch)}

        return float(self._tables(rows, log_ratio)["ratio"].sum()) / num_answers

    def _tables(
        self, rows: Sequence[Sample], compute: Callable[[PackedBatch], Mapping[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        section = self.section
        return token_tables(
            rows,
            section.micro_batch_tokens,
            device_of(self.model),
            compute,
            merge=shares_prefixes(self.model, section.prefix_merging),
            images=self.images,
        )

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs in addition to the model's weights."""
        reference = {} if self.reference is None else self.reference.state_dict()
        return {
            "optimization": self.optimization.state_dict(),
            "steps": self.steps,
            "reference": reference,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict, for a model whose weights are already loaded."""
        self.begin()
        self.optimization.load_state_dict(state["optimization"])
        self.steps = state["steps"]
        if self.reference is not None and state["reference"]:
            self.reference.load_state_dict(state["reference"])


def mismatch_answers(answers: Sequence[CandidateAnswer], context_length: int) -> list[list[Sample]]:
    """Pairs each answer's prompt with the next answer to another task, as rows; there are none
    where all answers are to one task.

    The rest of the other answer after its first prompt stays as it is, its later observations
    included; tokens beyond the context are cut off. The order of answers does not matter. Source:
    arXiv 2402.01306, section 4.1.
    """
    ordered = sorted(answers, key=lambda answer: (answer.rows[0].group_id, answer.name))
    rows_of_answers = []
    for place, answer in enumerate(ordered):
        group = answer.rows[0].group_id
        candidates = (
            candidate
            for candidate in [*ordered[place + 1 :], *ordered[:place]]
            if candidate.rows[0].group_id != group
        )
        next_answer = next(candidates, None)
        first = answer.rows[0]
        rows = (
            []
            if next_answer is None
            else [_after(first, row, answer.name, context_length) for row in next_answer.rows]
        )
        rows_of_answers.append([row for row in rows if row.num_trained])

    return rows_of_answers


def _after(first: Sample, row: Sample, name: str, context_length: int) -> Sample:
    """The prompt of `first`, and everything of `row` after its own. An image is never cut: the rest
    begins before one that does not fit."""
    size = int(first.loss_mask.argmax())
    start = int(row.loss_mask.argmax())
    ids = np.concatenate([first.ids[:size], row.ids[start:]])
    mask = np.concatenate([np.zeros(size, dtype=np.bool_), row.loss_mask[start:]])
    images = spans_within(first.images, 0, size)
    later = spans_within(row.images, start, len(row.ids))
    images += tuple(span.shifted(size) for span in later)
    cut = [span.offset for span in images if span.end > context_length]
    end = min([context_length, *cut])
    sample = Sample.given(name, row.group_id, ids[:end], mask[:end], row.temperature)
    if not images:
        return sample
    return msgspec.structs.replace(
        sample,
        images=spans_within(images, 0, end),
        processor=first.processor or row.processor,
    )


def _answers(pairs: Sequence[Pair]) -> list[CandidateAnswer]:
    """Every answer once, in the order of names, so that sums do not depend on the order of
    pairs."""
    answers = {answer.name: answer for pair in pairs for answer in pair.answers}
    return [answers[name] for name in sorted(answers)]


class _PreferenceComparison:
    """Which answers the pairs consist of; it turns sums of log-probs [N] into the loss's inputs
    [P]."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        answers: Sequence[CandidateAnswer],
        reference: Mapping[str, float],
    ) -> None:
        numbers = {answer.name: number for number, answer in enumerate(answers)}
        self.pairs = sorted(pairs, key=lambda pair: [answer.name for answer in pair.answers])
        self.lengths = torch.tensor([answer.num_tokens for answer in answers])
        self.reference = torch.tensor([reference.get(answer.name, 0.0) for answer in answers])
        self.chosen = torch.tensor(
            [numbers[pair.chosen.name] for pair in self.pairs if pair.chosen is not None],
            dtype=torch.int64,
        )
        self.rejected = torch.tensor(
            [numbers[pair.rejected.name] for pair in self.pairs if pair.rejected is not None],
            dtype=torch.int64,
        )

    def inputs(self, sums: torch.Tensor, loss: str) -> dict[str, Any]:
        """All inputs of the loss that can be made from the sums [N]."""
        reference = self.reference.to(sums)
        lengths = self.lengths.to(sums.device)
        if loss == "kto":
            answer_indices = torch.cat([self.chosen, self.rejected]).to(sums.device)
            desirable = torch.arange(len(answer_indices), device=sums.device) < len(self.chosen)
            return {
                "logp": sums[answer_indices],
                "ref_logp": reference[answer_indices],
                "desirable": desirable,
            }

        inputs: dict[str, Any] = {}
        for side, places in (("chosen", self.chosen), ("rejected", self.rejected)):
            at = places.to(sums.device)
            inputs |= {
                f"{side}_logp": sums[at],
                f"ref_{side}_logp": reference[at],
                f"{side}_lengths": lengths[at],
            }

        if loss == "sppo":
            chances = torch.tensor([pair.win_probs for pair in self.pairs]).to(sums)
            inputs |= {"chosen_win_prob": chances[:, 0], "rejected_win_prob": chances[:, 1]}

        return inputs

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        """The means of the answers' log-probs, for the metrics."""
        sides = (("logps/chosen", self.chosen), ("logps/rejected", self.rejected))
        return {key: float(sums.cpu()[places].mean()) for key, places in sides if len(places)}

    def kto_rewards(self, sums: torch.Tensor, beta: float) -> dict[str, float]:
        """Mean rewards of desirable and of undesirable answers, and their difference."""
        rewards = beta * (sums.cpu() - self.reference)
        means = {
            key: float(rewards[places].mean())
            for key, places in (("chosen", self.chosen), ("rejected", self.rejected))
            if len(places)
        }
        if len(means) == 2:
            means["margins"] = means["chosen"] - means["rejected"]
        return {f"rewards/{key}": value for key, value in means.items()}
