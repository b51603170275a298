"""One engine step of a model that computes rows: passes over the new tokens of its sequences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from transformers import PreTrainedModel

from agentevo.inference.embedded.batch import MAX_CHUNK
from agentevo.inference.embedded.images import EngineImages, Stretch
from agentevo.inference.embedded.scheduler import Sequence as EngineSequence
from agentevo.inference.embedded.state_scheduler import StateScheduler, StateSequence
from agentevo.inference.embedded.states import (
    StateStack,
    StateSupport,
    mask_of,
    run_states,
    select_rows,
)
from agentevo.models.compute.rows import RowGroup, padded_group, row_settings, run_rows
from agentevo.models.vision.features import ImageFeatures

Work = tuple[StateSequence, int]
"""A sequence, and the number of its tokens that a step computes."""


class StateBatch:
    """A StepWork: passes over states."""

    def __init__(
        self,
        scheduler: StateScheduler,
        running: list[EngineSequence],
        prefill_tokens: int,
        images: EngineImages | None = None,
    ) -> None:
        """`running`: sequences of that scheduler. `images`: those of the engine, if its model can
        be shown some."""
        self.support = scheduler.support
        self.stacks = scheduler.stacks
        self._images = images
        self._work = _choose_work(
            self.support, cast(list[StateSequence], running), prefill_tokens, images
        )
        self.work: list[tuple[EngineSequence, int]] = [*self._work]
        self.sampled: list[EngineSequence] = [s for s, n in self._work if _is_sampled(s, n)]
        scored = [(s, _num_scored(s, count)) for s, count in self._work]
        self.scored: list[tuple[EngineSequence, int]] = [(s, count) for s, count in scored if count]

    def logits(self, model: PreTrainedModel, version: int) -> torch.Tensor:
        """See StepWork.logits. The sequences' states continue by the work."""
        together = []
        fresh = defaultdict[int, list[Work]](list)
        alone: list[list[Work]] = []
        for sequence, count in self._work:
            if not self.support.continues:
                fresh[0].append((sequence, count))
            elif not sequence.cached and self.support.stacks:
                fresh[count].append((sequence, count))
            elif self.support.stacks and self._is_in_single_tokens(sequence, count):
                together.append(sequence)
            else:
                alone.append([(sequence, count)])

        run = _Pass(model, version, self.support, self._images)
        outputs: dict[int, torch.Tensor] = {}
        stack = self.stacks.setdefault(version, StateStack())
        stack.put(together)
        if together:
            outputs |= run.stack(stack)
        for works in [*fresh.values(), *alone]:
            if self.support.continues:
                outputs |= run.equal(works)
            else:
                outputs |= run.again(works)

        sequences = [*self.sampled, *(sequence for sequence, _ in self.scored)]
        if not sequences:
            return torch.empty(0)
        return torch.cat([outputs[id(sequence)] for sequence in sequences])

    def _is_in_single_tokens(self, sequence: StateSequence, count: int) -> bool:
        """Whether this step and every later one computes a single token of the sequence. Only then
        may its state move into the stack, because a sequence that leaves the stack loses it."""
        is_last = sequence.cached + count == len(sequence.ids)
        return count == 1 and (is_last or not self.support.appends)


def _choose_work(
    support: StateSupport,
    running: Sequence[StateSequence],
    prefill_tokens: int,
    images: EngineImages | None,
) -> list[Work]:
    """How many tokens of each sequence a step computes. A sequence that needs one token always gets
    that token. The others share `prefill_tokens`, first come first served; a prompt that can't be
    continued by several tokens is computed as a whole."""
    work = []
    remaining = prefill_tokens
    for sequence in running:
        missing = len(sequence.ids) - sequence.cached
        if missing == 1 or (sequence.cached and not support.appends and support.continues):
            work.append((sequence, 1))
        elif support.appends:
            count = min(missing, MAX_CHUNK, remaining)
            if count > 0:
                count = count if images is None else images.fit_chunk(sequence, count)
                work.append((sequence, count))
            remaining -= count
        elif remaining > 0:
            work.append((sequence, missing))
            remaining -= missing

    return work


@dataclass(frozen=True)
class _Pass:
    """Passes of one model. `images` is None for a text model."""

    model: PreTrainedModel
    version: int
    support: StateSupport
    images: EngineImages | None

    def stack(self, stack: StateStack) -> dict[int, torch.Tensor]:
        """One token of each member."""
        members = stack.members
        places = [(row, 0) for row, s in enumerate(members) if _columns(s, 1)]
        stretches = [Stretch(s, s.cached, 1) for s in members]
        group = self._group(stretches, places)
        lengths = torch.tensor([[s.cached] for s in members], device=group.input_ids.device)
        has_mask = self.support.bytes_per_token > 0 and stack.has_padding
        mask = mask_of(lengths, stack.width) if has_mask else None
        positions = self._positions(stretches, lengths)
        logits, stack.state = run_states(
            self.model, group, stack.state, positions, mask, self._features(stretches)
        )
        stack.width += 1
        return {id(members[row]): logits[n : n + 1] for n, (row, _) in enumerate(places)}

    def equal(self, works: Sequence[Work]) -> dict[int, torch.Tensor]:
        """The same number of tokens of sequences without a state, or of one with a state."""
        count = works[0][1]
        first = works[0][0].cached
        stretches = [Stretch(s, first, count) for s, _ in works]
        places = [(row, col) for row, (s, _) in enumerate(works) for col in _columns(s, count)]
        group = self._group(stretches, places)
        counted = torch.arange(first, first + count, device=group.input_ids.device)
        positions = self._positions(stretches, counted.expand(len(works), -1))
        assert not first or works[0][0].state is not None, "its state was left in a stack"
        logits, state = run_states(
            self.model, group, works[0][0].state, positions, features=self._features(stretches)
        )
        for row, (sequence, _) in enumerate(works):
            alone = len(works) == 1
            sequence.state = state if alone else select_rows(state, [row], first + count)

        return _split(logits, works, [len(_columns(s, count)) for s, _ in works])

    def again(self, works: Sequence[Work]) -> dict[int, torch.Tensor]:
        """All tokens of each sequence, for a model that does not continue from a state."""
        settings = row_settings(self.model)
        assert settings is not None
        outputs: dict[int, torch.Tensor] = {}
        for members in [works] if settings.pads else [[work] for work in works]:
            stretches = [Stretch(s, 0, s.cached + count) for s, count in members]
            places = [
                (row, s.cached + column)
                for row, (s, count) in enumerate(members)
                for column in _columns(s, count)
            ]
            inputs = {}
            if self.images is not None:
                inputs["position_ids"] = self.images.position_ids([[one] for one in stretches])
            group = self._group(stretches, places)
            out = run_rows(self.model, group, self._features(stretches), **inputs)
            outputs |= _split(
                out.logits[0], members, [len(_columns(s, count)) for s, count in members]
            )

        return outputs

    def _group(self, stretches: Sequence[Stretch], places: list[tuple[int, int]]) -> RowGroup:
        texts = [stretch.keys for stretch in stretches]
        if self.images is None:
            return padded_group(texts, places, self.model)

        group = padded_group([self.images.ids(keys) for keys in texts], places, self.model)
        return group._replace(types=self.images.types(stretches))

    def _positions(self, stretches: Sequence[Stretch], counted: torch.Tensor) -> torch.Tensor:
        """`counted` [B, L] unless images have positions of their own."""
        if self.images is None:
            return counted
        return self.images.position_ids([[stretch] for stretch in stretches])

    def _features(self, stretches: Sequence[Stretch]) -> list[ImageFeatures]:
        if self.images is None:
            return []
        return self.images.features(stretches, self.model, self.version)


def _split(
    logits: torch.Tensor, works: Sequence[Work], sizes: Sequence[int]
) -> dict[int, torch.Tensor]:
    return {
        id(sequence): part
        for (sequence, _), part in zip(works, logits.split(list(sizes)), strict=True)
    }


def _columns(sequence: StateSequence, count: int) -> Sequence[int]:
    """The places among its `count` new tokens that predict a sampled or scored token."""
    if _is_sampled(sequence, count):
        return [count - 1]
    return range(count - _num_scored(sequence, count), count)


def _is_sampled(sequence: StateSequence, count: int) -> bool:
    """Whether a token is sampled after these new tokens."""
    request = sequence.request
    return (
        sequence.cached + count == len(sequence.ids)
        and request is not None
        and request.future is not None
        and request.scored is None
    )


def _num_scored(sequence: StateSequence, count: int) -> int:
    """How many of the new tokens predict a given token that is scored."""
    request = sequence.request
    if request is None or request.scored is None:
        return 0
    return max(0, count - max(request.num_context - 1 - sequence.cached, 0))
