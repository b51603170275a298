"""Chooses the sequences that compute next, and manages the storage of their keys and values: the
waiting queue, slots, sessions, shared prefixes and the memory budget.

Lifecycle of a sequence: waiting -> running (owns a slot) -> done, or idle. An idle sequence is a
session between two turns. Its keys and values stay in its slot until another request needs the
slot, and are then outside of the slots until the next turn, a release, or eviction. The size of a
slot follows the tokens that exist, not those that the request may still sample.

Memory never exceeds the budget. A request that does not fit now waits in the queue. A request that
can never fit is refused immediately. Before a request waits, idle sessions and unused prefixes are
dropped, the oldest first. Their keys and values are computed again when needed. If a running
sequence has no room to grow, the youngest one returns to the head of the queue with its sampled
tokens. The oldest sequence always has room: it was admitted only because it fits the budget if it
runs alone, to its last token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from agentevo.config import EngineSection
from agentevo.errors import RequestTooLongError
from agentevo.inference.embedded.kv_cache import (
    KEY_BLOCK,
    KeysAndValues,
    KVCache,
    PrefixSegment,
    num_blocks,
)
from agentevo.inference.embedded.requests import EngineRequest
from agentevo.inference.embedded.routing import TokenRows, drawn_rows
from agentevo.inference.embedded.routing_memory import KnownPrefix, RoutingMemory
from agentevo.types import SamplingParams

MIN_SHARED_TOKENS = 16
"""A shorter common prefix is not worth a separate step."""
MIN_REFERRED_TOKENS = 128
"""Sequences refer to a shared prefix of at least this length. A shorter prefix is copied into their
slots, which costs less per step."""
GROWTH_TOKENS = 256
"""The most future tokens for which a slot gets room in advance."""


PrefixKey = tuple[int | None, tuple[int, ...]]
"""EngineRequest.version, and the ids."""


@dataclass(eq=False)
class Sequence:
    """The tokens of a request or an idle session. `ids[:cached]` have keys and values. The first
    `offset` of these are in `segment`. The others are in the slot, or in `saved`."""

    slot: int
    """-1 while the keys and values are in `saved`."""
    ids: list[int]
    request: EngineRequest | None
    cached: int = 0
    segment: PrefixSegment | None = None
    offset: int = 0
    need: int = 0
    """The number of places in its slot. It grows when tokens have filled them."""
    saved: KeysAndValues | None = None
    last_used: int = 0
    routed: TokenRows = field(default_factory=TokenRows)
    """The routed experts of `ids[:cached]`, if the engine records them. Rows of later tokens are
    used when these tokens are computed again."""


def common_prefix(a: list[int], b: list[int]) -> int:
    """The length of the longest common prefix."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(i for i in range(size) if a[i] != b[i])


class Scheduler:
    """Holds every sequence; `admit` moves requests from the queue into slots."""

    def __init__(
        self,
        config: EngineSection,
        context_length: int,
        kv_tokens: int,
        context_advice: str = "",
        routing: RoutingMemory | None = None,
    ) -> None:
        """`routing`: the record of the chosen experts, if the engine has one."""
        self.config = config
        self.routing = routing
        self.context_length = context_length
        self._context_advice = f"; {context_advice}" if context_advice else ""
        self.kv_tokens = kv_tokens
        """The memory budget."""
        self.cache = KVCache()
        self.waiting: deque[EngineRequest] = deque()
        self.running: list[Sequence] = []
        self.sessions: dict[str, Sequence] = {}
        """Idle sessions only, by name."""
        self.segments: dict[int, dict[PrefixKey, PrefixSegment]] = {}
        """Shared prefixes: length -> version and ids -> segment."""
        self.pending_prefixes: dict[PrefixKey, EngineRequest] = {}
        self.unshareable: set[PrefixKey] = set()
        """Prefixes for which there was no memory, until the queue is empty. Without this set they
        could be computed over and over."""
        self.clock = 0
        self.prefix_hit_tokens = 0
        self.session_hit_tokens = 0

    def submit(self, request: EngineRequest) -> None:
        """Queues a request. Raises RequestTooLongError if it can never run."""
        need = request.max_tokens
        what = f"prompt of {len(request.ids)} tokens"
        if request.scored is None:
            what += f" plus max_new_tokens={request.params.max_new_tokens}"

        if need > self.context_length:
            lower = "" if request.scored is not None else " or lower sampling.max_new_tokens"
            raise RequestTooLongError(
                f"{what} exceeds the model's context of {self.context_length} tokens: shorten the "
                f"prompt{lower}{self._context_advice}"
            )

        if self._size(need) > self.kv_tokens:
            raise RequestTooLongError(
                f"{what} can't fit the key-value memory of {self.kv_tokens} tokens: raise "
                "engine.kv_cache_gb (or engine.kv_cache_tokens)"
            )

        self.waiting.append(request)

    def drop_abandoned(self) -> None:
        """Frees the memory of cancelled and expired requests."""
        self.waiting = deque(r for r in self.waiting if not r.abandoned)
        for sequence in [s for s in self.running if s.request is not None and s.request.abandoned]:
            self.retire(sequence)

    @property
    def has_begun(self) -> bool:
        """Whether any request has begun: it is running, or was sent back to the queue."""
        return bool(self.running) or any(request.is_begun for request in self.waiting)

    def admit(self, *, begun_only: bool = False) -> None:
        """Moves waiting requests into slots, in order, as far as memory allows. `begun_only`: only
        requests that have run before."""
        if self.config.prefix_sharing and not begun_only:
            self._request_prefixes()

        held_back: list[EngineRequest] = []
        while self.waiting and len(self.running) < self.config.max_running:
            request = self.waiting.popleft()
            is_early = not request.is_begun if begun_only else self._prefix_coming(request)
            if is_early:
                held_back.append(request)
            elif not self._place(request):
                held_back.append(request)
                break

        self.waiting.extendleft(reversed(held_back))
        if not self.waiting:
            self.unshareable.clear()

    def grow(self) -> None:
        """Makes room for the sampled tokens, before the next step; see the module."""
        for sequence in list(self.running):
            if sequence not in self.running or _length(sequence) <= sequence.need:
                continue

            assert sequence.request is not None
            sequence.need = room_to_draw(sequence.request, sequence.ids) - sequence.offset
            while not self._make_room(extra=0, capacity=sequence.need):
                youngest = self.running[-1]
                self._interrupt(youngest)
                if youngest is sequence:
                    break

    def finish(self, sequence: Sequence) -> None:
        """Keeps the sequence of an answered request as an idle session, or frees it."""
        request = sequence.request
        if request is None or request.session is None:
            self.retire(sequence)
            return

        self.running.remove(sequence)
        sequence.request = None
        self._evict(request.session)  # of an earlier turn that ran at the same time
        if self.routing is not None:
            self.routing.keep(request.session, sequence)

        # Room for its keys and values outside is kept free from now on.
        room = _round_up(sequence.cached - sequence.offset)
        if self.memory_tokens() + room > self.kv_tokens:
            self._save(sequence)
            if not self._make_spare(room):
                self.retire(sequence)
                return

        sequence.last_used = self._tick()
        self.sessions[request.session] = sequence

    def finish_prefix(self, sequence: Sequence) -> None:
        """Stores a shared prefix that was computed, and frees its slot."""
        assert sequence.request is not None

        version = sequence.request.version
        size = len(sequence.ids)
        key = (version, tuple(sequence.ids))
        self.retire(sequence)
        keys, values = self.cache.cut(sequence.slot, size)
        segment = PrefixSegment(sequence.ids, keys, values, version, routed=sequence.routed)

        room = _round_up(size)
        if self.memory_tokens() + room > self.kv_tokens and not self._shrink(room):
            self.unshareable.add(key)
            return

        segment.last_used = self._tick()
        self.segments.setdefault(size, {})[key] = segment

    def retire(self, sequence: Sequence) -> None:
        """Removes the sequence from its slot."""
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence.segment is not None:
            sequence.segment.users -= 1
        if sequence.request is not None and sequence.request.future is None:
            self.pending_prefixes.pop((sequence.request.version, tuple(sequence.ids)), None)

    def abort(self) -> list[EngineRequest]:
        """Empties queue and slots after a failure; returns the unanswered requests."""
        unanswered = [
            r
            for r in (*self.waiting, *(s.request for s in self.running))
            if r is not None and r.future is not None
        ]
        for sequence in list(self.running):
            self.retire(sequence)

        self.waiting.clear()
        self.pending_prefixes.clear()
        return unanswered

    def release(self, session: str) -> None:
        """Ends a session and frees its memory."""
        self._evict(session)
        if self.routing is not None:
            self.routing.release(session)

    def _evict(self, session: str) -> None:
        sequence = self.sessions.pop(session, None)
        if sequence is not None:
            self.retire(sequence)

    def forget_cache(self) -> None:
        """Drops the whole cache, for example after new weights. Running requests return to the head
        of the queue with the tokens sampled so far."""
        if self.routing is not None:
            self.routing.forget_outdated()

        self.sessions.clear()
        self.segments.clear()

        for sequence in reversed(list(self.running)):
            self._interrupt(sequence)

        self.unshareable.clear()
        self.cache = KVCache()

    def _interrupt(self, sequence: Sequence) -> None:
        """Sends a running request back to the head of the queue with its sampled tokens. The
        computation of a shared prefix is dropped."""
        self.retire(sequence)
        request = sequence.request
        assert request is not None
        if request.future is None:
            self.unshareable.add((request.version, tuple(sequence.ids)))
            return

        records = self.routing is not None
        rows = drawn_rows(sequence, request) if records else None
        request.restart_from(sequence.ids, rows, sequence.routed if records else None)
        self.waiting.appendleft(request)

    def memory_tokens(self) -> int:
        """The tokens of key-value memory in use, including free places in slots."""
        return self.cache.num_slots * self.cache.capacity + self._tokens_outside()

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _size(self, tokens: int) -> int:
        """The memory of the keys and values of so many tokens."""
        return _round_up(tokens)

    def _tokens_outside(self) -> int:
        """Tokens of shared prefixes and of idle sessions. Those that still are in a slot count too,
        so that they can leave it at any time."""
        shared = sum(self._size(length) * len(group) for length, group in self.segments.items())
        return shared + sum(self._size(s.cached - s.offset) for s in self.sessions.values())

    def _match(
        self, version: int | None, ids: list[int], known_prefix: KnownPrefix | None = None
    ) -> PrefixSegment | None:
        """The longest segment of that version that is a proper prefix of `ids` and was computed
        with the known experts. The prefix is proper because one token must be left to predict
        from."""
        for length in sorted(self.segments, reverse=True):
            if (
                length < len(ids)
                and (segment := self.segments[length].get((version, tuple(ids[:length]))))
                and (known_prefix is None or known_prefix.agrees(segment.routed, length) == length)
            ):
                return segment

        return None

    def _prefix_coming(self, request: EngineRequest) -> bool:
        return request.future is not None and any(
            version == request.version
            and len(ids) < request.num_context
            and tuple(request.ids[: len(ids)]) == ids
            for version, ids in self.pending_prefixes
        )

    def _request_prefixes(self) -> None:
        """Queues the computation of prefixes that several waiting requests share. Equal prompts
        come first, then common beginnings of different prompts."""
        fresh = [
            r
            for r in self.waiting
            if r.future is not None and (r.session is None or r.session not in self.sessions)
        ]
        for version in dict.fromkeys(request.version for request in fresh):
            self._request_prefixes_of(
                version, [request for request in fresh if request.version == version]
            )

    def _request_prefixes_of(self, version: int | None, fresh: list[EngineRequest]) -> None:
        by_prompt: dict[tuple[int, ...], int] = {}
        for request in fresh:
            key = tuple(request.ids[: request.num_context])
            by_prompt[key] = by_prompt.get(key, 0) + 1

        shared_prompts = [list(key[:-1]) for key, count in by_prompt.items() if count > 1]
        singles = sorted(list(key) for key, count in by_prompt.items() if count == 1)
        for ids in shared_prompts + _shared_beginnings(singles):
            matched = self._match(version, [*ids, -1])
            prefix_key = (version, tuple(ids))
            have = len(matched.ids) if matched else 0
            if (
                len(ids) - have >= MIN_SHARED_TOKENS
                and prefix_key not in self.pending_prefixes
                and prefix_key not in self.unshareable
            ):
                request = EngineRequest(
                    ids, SamplingParams(max_new_tokens=0), None, version=version
                )
                request.images = {name: r.images[name] for r in fresh for name in r.images}
                if self.routing is not None:
                    request.known_rows = self.routing.known_to_any(fresh, ids)
                self.pending_prefixes[prefix_key] = request
                self.waiting.appendleft(request)

    def _place(self, request: EngineRequest) -> bool:
        """Gives the request a slot: its session's, or a new one that may be filled from a shared
        prefix. False if there is not enough memory now."""
        idle = self.sessions.pop(request.session, None) if request.session is not None else None
        if idle is not None:
            return self._resume(idle, request)

        context = request.ids[: request.num_context]
        known_prefix = None if self.routing is None else self.routing.known(request)
        sharing = self.config.prefix_sharing
        segment = self._match(request.version, context, known_prefix) if sharing else None
        offset = (
            len(segment.ids)
            if segment is not None
            and len(segment.ids) >= MIN_REFERRED_TOKENS
            and request.future is not None
            and self._fits_with_segment(segment, request)
            else 0
        )
        need = room_to_draw(request, request.ids) - offset

        if segment is not None:
            segment.users += 1  # not to be evicted while room is made

        slot = self._take_slot(need)
        if segment is not None and (slot is None or not offset):
            segment.users -= 1

        if slot is None:
            if segment is None or self.running:
                return False
            self._drop_segment(segment)  # no request will leave, and its own prefix takes the room
            return self._place(request)

        sequence = Sequence(slot, list(request.ids), request, need=need)
        if segment is not None:
            segment.last_used = self._tick()
            sequence.cached = len(segment.ids)
            if known_prefix is not None and known_prefix.num_tokens < len(segment.ids):
                known_prefix = KnownPrefix(segment.routed, len(segment.ids))

            self.prefix_hit_tokens += len(segment.ids)
            if offset:
                sequence.segment = segment
                sequence.offset = offset
            else:
                prefix = KeysAndValues(segment.keys, segment.values)
                self.cache.paste(slot, prefix, len(segment.ids))

        if known_prefix is not None:
            sequence.routed = known_prefix.rows.beginning(known_prefix.num_tokens)

        self.running.append(sequence)
        return True

    def _resume(self, idle: Sequence, request: EngineRequest) -> bool:
        """Prepares the next turn of a session: keeps the part of its cache that the new prompt
        begins with."""
        assert request.session is not None

        common = min(common_prefix(idle.ids, request.ids), idle.cached)
        keep = min(common, len(request.ids) - 1)
        known_prefix = None if self.routing is None else self.routing.known(request)
        if known_prefix is not None:
            keep = known_prefix.agrees(idle.routed, keep)

        left_prefix = keep < idle.offset
        if left_prefix or (idle.segment and not self._fits_with_segment(idle.segment, request)):
            self.retire(idle)  # start over
            return self._place(request)

        need = room_to_draw(request, request.ids) - idle.offset
        if idle.slot >= 0 and not self._has_room(extra=0, capacity=need):
            self._save(idle)
        slot = idle.slot if idle.slot >= 0 else self._take_slot(need)
        if slot is None:
            self.sessions[request.session] = idle
            if not self.running:  # no request will leave: drop the cache instead of waiting forever
                self._evict(request.session)
                return self._place(request)
            return False

        if idle.saved is not None:
            self.cache.paste(slot, idle.saved, keep - idle.offset)
            idle.saved = None
        idle.slot = slot
        idle.ids = list(request.ids)
        idle.cached = keep
        idle.request = request
        idle.need = need
        if known_prefix is not None:
            idle.routed = known_prefix.of_resumed(idle.routed, common)

        self.session_hit_tokens += keep
        self.running.append(idle)
        return True

    def _take_slot(self, need: int) -> int | None:
        """A free slot with room for `need` tokens. None if there is not enough memory now."""
        if not self._make_room(extra=1, capacity=need):
            return None

        in_slots = [idle for idle in self.sessions.values() if idle.slot >= 0]
        if len(self.running) + len(in_slots) == self.cache.num_slots:
            self._save(min(in_slots, key=lambda idle: idle.last_used))

        used = {s.slot for s in (*self.running, *self.sessions.values())}
        return next(slot for slot in range(self.cache.num_slots) if slot not in used)

    def _save(self, idle: Sequence) -> None:
        """Copies the keys and values of an idle session out of its slot."""
        idle.saved = self.cache.cut(idle.slot, idle.cached - idle.offset)
        idle.slot = -1

    def _fits_with_segment(self, segment: PrefixSegment, request: EngineRequest) -> bool:
        """Whether a request that refers to the segment has room up to its last token if it runs
        alone."""
        size = len(segment.ids)
        return _round_up(size) + _round_up(request.max_tokens - size) <= self.kv_tokens

    def _make_room(self, extra: int, capacity: int) -> bool:
        """Makes `extra` free slots of at least `capacity` places; evicts idle sessions and unused
        prefixes if needed, oldest first."""
        if self._has_room(extra, capacity):
            return True

        while not self._resize(extra, capacity):
            if not self._drop_oldest():
                return False

        return True

    def _has_room(self, extra: int, capacity: int) -> bool:
        """Whether the slots hold `extra` more sequences of `capacity` places, and are not far wider
        than the only one needs."""
        is_wide = not self.running and self.cache.capacity > 2 * _round_up(capacity)
        has_slots = len(self.running) + extra <= self.cache.num_slots
        return has_slots and capacity <= self.cache.capacity and not is_wide

    def _make_spare(self, spare: int) -> bool:
        """Leaves `spare` tokens of the budget unused; drops idle sessions and unused prefixes if
        needed, oldest first. False if the running sequences need them."""
        while self.memory_tokens() + spare > self.kv_tokens and not self._shrink(spare):
            if not self._drop_oldest():
                return False

        return True

    def _drop_oldest(self) -> bool:
        """Drops the least recently used idle session or unused prefix. False if there is none."""
        idle = min(self.sessions.items(), key=lambda item: item[1].last_used, default=None)
        unused = min(
            (s for group in self.segments.values() for s in group.values() if not s.users),
            key=lambda s: s.last_used,
            default=None,
        )
        if unused is not None and (idle is None or unused.last_used < idle[1].last_used):
            self._drop_segment(unused)
        elif idle is not None:
            self._evict(idle[0])
        else:
            return False

        return True

    def _shrink(self, spare: int) -> bool:
        """Frees unused slots until `spare` tokens of the budget are unused; False if the running
        sequences need them."""
        num_slots = len(self.running)
        places = _round_up(max((s.need for s in self.running), default=1))
        room = self.kv_tokens - self._tokens_outside() - spare
        if num_slots * places > room:
            return False
        self._move(max(num_slots, min(self.cache.num_slots, room // places)), places)
        return True

    def _drop_segment(self, segment: PrefixSegment) -> None:
        group = self.segments[len(segment.ids)]
        key = (segment.version, tuple(segment.ids))
        del group[key]
        self.unshareable.add(key)
        if not group:
            del self.segments[len(segment.ids)]

    def _resize(self, extra: int, capacity: int) -> bool:
        """Creates new buffers for the running sequences and `extra` more, within the budget. Adds
        room to grow if it fits."""
        budget = self.kv_tokens - self._tokens_outside()
        num_slots = len(self.running) + extra
        least = _round_up(max([capacity, *(s.need for s in self.running)]))
        generous = (
            max(least, min(2 * self.cache.capacity, _round_up(least + least // 2)))
            if self.cache.capacity
            else least
        )

        if num_slots * least > budget:
            return False

        places = generous if num_slots * generous <= budget else least
        desired_slots = min(num_slots + len(self.waiting), self.config.max_running)
        num_slots = max(num_slots, min(max(desired_slots, self.cache.num_slots), budget // places))
        self._move(num_slots, places)

        return True

    def _move(self, num_slots: int, capacity: int) -> None:
        for idle in self.sessions.values():
            if idle.slot >= 0:
                self._save(idle)

        moved = self.cache.resize(
            num_slots, capacity, [(s.slot, s.cached - s.offset) for s in self.running]
        )
        for sequence in self.running:
            sequence.slot = moved[sequence.slot]


def _length(sequence: Sequence) -> int:
    """The most slot places that the sequence uses in its next step."""
    return len(sequence.ids) - sequence.offset


def room_to_draw(request: EngineRequest, ids: list[int]) -> int:
    """The most tokens that fit, including these `ids`."""
    return min(request.max_tokens, len(ids) + GROWTH_TOKENS)


def _round_up(tokens: int) -> int:
    return num_blocks(tokens) * KEY_BLOCK


def _shared_beginnings(prompts: list[list[int]]) -> list[list[int]]:
    """The prefixes of sorted, distinct prompts that are worth computing once: those that a run of
    neighbours shares, with at least half of their tokens."""
    beginnings: list[list[int]] = []
    run: list[int] | None = None
    for before, prompt in pairwise(prompts):
        base = run if run is not None else before
        size = min(common_prefix(base, prompt), len(base) - (run is None), len(prompt) - 1)
        if size >= MIN_SHARED_TOKENS and 2 * size >= len(prompt):
            run = base[:size]
        else:
            if run is not None:
                beginnings.append(run)
            run = None

    if run is not None:
        beginnings.append(run)

    return beginnings
