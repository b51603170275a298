"""Chooses the sequences that compute next for models that compute rows, and stores their states
(states.py).

A sequence owns a state, or has a row in the stack of the sequences that are sampled from. The
queue, shared prefixes, sessions and the order in which memory is freed are those of `Scheduler`.

A shared prefix is copied into each sequence that begins with it. A session keeps its state until
its next turn. If that turn does not extend the session's tokens, it begins from a shared prefix or
from the first token, because a recurrent state can't go back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentevo.config import EngineSection
from agentevo.inference.embedded.kv_cache import PrefixSegment
from agentevo.inference.embedded.requests import EngineRequest
from agentevo.inference.embedded.scheduler import Scheduler, Sequence, room_to_draw
from agentevo.inference.embedded.states import StateStack, StateSupport, copy_state


@dataclass(eq=False)
class StateSequence(Sequence):
    """A sequence whose memory is a state of `ids[:cached]`."""

    state: Any = None
    """None if nothing is computed yet, or while the sequence is in a stack."""


@dataclass(eq=False)
class StateSegment(PrefixSegment):
    """A shared prefix as a state."""

    state: Any = None


class StateScheduler(Scheduler):
    """See the module."""

    def __init__(
        self,
        config: EngineSection,
        context_length: int,
        kv_tokens: int,
        context_advice: str,
        support: StateSupport,
    ) -> None:
        super().__init__(config, context_length, kv_tokens, context_advice)
        self.support = support
        self.stacks: dict[int, StateStack] = {}
        """By the version of the weights."""

    def grow(self) -> None:
        """See Scheduler.grow."""
        for sequence in list(self.running):
            if sequence not in self.running or len(sequence.ids) <= sequence.need:
                continue

            assert sequence.request is not None
            sequence.need = room_to_draw(sequence.request, sequence.ids)
            while not self._make_spare(0):
                youngest = self.running[-1]
                self._interrupt(youngest)
                if youngest is sequence:
                    break

    def finish(self, sequence: Sequence) -> None:
        """See Scheduler.finish."""
        assert isinstance(sequence, StateSequence)
        request = sequence.request
        if request is None or request.session is None or not self.support.continues:
            self.retire(sequence)
            return

        self._take_state(sequence)
        self.retire(sequence)
        sequence.request = None
        self._evict(request.session)  # of an earlier turn that ran at the same time
        if self._make_spare(self._size(sequence.cached)):
            sequence.last_used = self._tick()
            self.sessions[request.session] = sequence

    def finish_prefix(self, sequence: Sequence) -> None:
        """See Scheduler.finish_prefix."""
        assert isinstance(sequence, StateSequence) and sequence.request is not None
        version = sequence.request.version
        key = (version, tuple(sequence.ids))
        self._take_state(sequence)
        self.retire(sequence)
        if not self._make_spare(self._size(len(sequence.ids))):
            self.unshareable.add(key)
            return

        segment = StateSegment(sequence.ids, [], [], version, state=sequence.state)
        segment.last_used = self._tick()
        self.segments.setdefault(len(sequence.ids), {})[key] = segment

    def _take_state(self, sequence: StateSequence) -> None:
        """Gives the sequence its state if a stack has it."""
        stack = next((s for s in self.stacks.values() if sequence in s.members), None)
        if stack is not None:
            sequence.state = stack.take(sequence)

    def retire(self, sequence: Sequence) -> None:
        """See Scheduler.retire. A stack frees the row in the next step."""
        super().retire(sequence)
        for version, stack in list(self.stacks.items()):
            if not any(member in self.running for member in stack.members):
                del self.stacks[version]

    def forget_cache(self) -> None:
        """See Scheduler.forget_cache."""
        super().forget_cache()
        self.stacks.clear()

    def memory_tokens(self) -> int:
        """The memory of all states, counted in tokens."""
        return sum(self._size(s.need) for s in self.running) + self._tokens_outside()

    def _size(self, tokens: int) -> int:
        return self.support.size(tokens)

    def _place(self, request: EngineRequest) -> bool:
        """Gives the request a sequence: its session's, or a new one that may begin with a shared
        prefix. False if there is not enough memory now."""
        idle = self.sessions.pop(request.session, None) if request.session is not None else None
        context = request.ids[: request.num_context]
        extends = idle is not None and (
            idle.cached < len(request.ids) and idle.ids[: idle.cached] == request.ids[: idle.cached]
        )
        sequence = StateSequence(-1, list(request.ids), request)
        sequence.need = room_to_draw(request, request.ids)
        segment = None
        if extends:
            assert isinstance(idle, StateSequence)
            sequence.state = idle.state
            sequence.cached = idle.cached
        elif self.config.prefix_sharing and (segment := self._match(request.version, context)):
            segment.users += 1  # not to be dropped while room is made

        fits = self._make_spare(self._size(sequence.need))
        if segment is not None:
            segment.users -= 1
        if not fits and self.running:
            if extends:
                assert idle is not None and request.session is not None
                self.sessions[request.session] = idle
            return False

        if extends:
            self.session_hit_tokens += sequence.cached
        elif isinstance(segment, StateSegment):
            segment.last_used = self._tick()
            sequence.cached = len(segment.ids)
            sequence.state = copy_state(segment.state)
            self.prefix_hit_tokens += sequence.cached

        self.running.append(sequence)
        return True

    def _request_prefixes(self) -> None:
        if self.support.continues:
            super()._request_prefixes()

    def _shrink(self, spare: int) -> bool:
        return False  # running sequences have no free places
