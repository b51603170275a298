"""The trainer's side of weights that go over a process group.

`publish` announces a version, waits at most EXPECT_S for the engines that had the one before, or
asked for it, and sends it in rounds to all that ask. `look_after` sends it to engines that ask
later: new ones, and those whose round was broken off. Between these calls the model changes, and
nothing is sent.

An engine that is gone costs at most one wait and one round: its ask is answered once, and an engine
that did not ask for a version is not waited for at the next one. An engine that asks and never
joins (behind a firewall, say) soon has rounds of its own, which are rare, and keeps no other engine
from the weights.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn

from agentevo.devices import identity
from agentevo.errors import EngineError, WeightsLostError
from agentevo.event_loop import in_thread, run_to_end
from agentevo.inference.broadcast_files import (
    MOST_PLACES,
    BroadcastFiles,
    Contents,
    PlaceAnswer,
    PlaceRequest,
)
from agentevo.inference.broadcast_group import backend_of, send
from agentevo.inference.weight_transport import Latest
from agentevo.models.in_parts import in_parts
from agentevo.models.parameters import trained_weights
from agentevo.models.parts import Spec

EXPECT_S = 10.0
"""How long `publish` waits for an engine that had the version before, or asked for it."""
MOST_BROKEN = 3
"""The maximum number of broken rounds in one `publish`; `look_after` serves the engines that are
still waiting."""
ALONE_AFTER = 2
"""Broken rounds in a row after which an engine has rounds of its own..."""
PAUSE_S = 60.0
"""...and, where these are broken off too, the additional pause before each."""
LONGEST_PAUSE_S = 600.0
LOOK_S = 0.05


class BroadcastSender:
    """A WeightSender, see the module. `note` gets a message when a round was broken off."""

    def __init__(self, folder: Path, model: nn.Module, *, note: Callable[[str], None]) -> None:
        self._files = BroadcastFiles(folder)
        self._model = model
        self._note = note
        self._version = 0
        self._latest: Latest | None = None
        """The announced version; None if it could not be written."""
        self._has_begun = False
        self._expected: set[str] = set()
        """Engines that have this version, and are waited for at the next one."""
        self._broken: dict[str, tuple[int, float]] = {}
        """Engine -> its consecutive rounds that were broken off, and when it may have another
        one."""
        self._said = ""
        """The last reported problem; each is reported once."""

    async def begin(self, version: int) -> None:
        """See WeightSender.begin. Engines keep the weights that they have of a later version."""
        await self.publish(version)

    async def publish(self, version: int) -> None:
        """See WeightSender.publish. `look_after` announces later what can't be announced now."""
        missing = self._expected | await self._still_asking()
        num_broken = 0
        self._version = version
        self._latest = None
        self._expected = set()

        while num_broken < MOST_BROKEN:
            asks = await self._waiting(missing)
            chosen = self._chosen(asks)
            if not chosen:
                return

            went_well = await self._sent(chosen)
            num_broken += not went_well
            done = {ask.engine for ask in chosen} if went_well else set[str]()
            missing = {ask.engine for ask in asks if self._is_due(ask.engine)} - done
            if not missing:
                return

    async def look_after(self) -> None:
        """See WeightSender.look_after. Reads two files and lists one folder as long as no engine
        asks."""
        chosen = self._chosen(await self._waiting(set()))
        if chosen:
            await self._sent(chosen)

    async def _sent(self, asks: Sequence[PlaceRequest]) -> bool:
        """See `_send`. A round that has begun reads the model to its end: a caller that is
        cancelled waits for that, and may change the model then."""
        return await run_to_end(in_thread(self._send, asks))

    async def _still_asking(self) -> set[str]:
        """Engines that wait for the announced version, and will want the next one."""
        if self._latest is None:
            return set()
        try:
            asks = await in_thread(self._files.asks, self._latest.sha256)
        except OSError:  # which `_waiting` reports
            return set()
        return {ask.engine for ask in asks if self._is_due(ask.engine)}

    def _chosen(self, asks: Sequence[PlaceRequest]) -> list[PlaceRequest]:
        """The engines of the next round: all together, except those whose last rounds were broken
        off. Each of these has a round of its own, after the others', at growing intervals."""
        isolated = [ask for ask in asks if self._broken_rounds(ask.engine) >= ALONE_AFTER]
        together = list[PlaceRequest]()
        num_places = 0
        for ask in asks:
            fits = num_places + len(ask.places) <= MOST_PLACES
            if fits and ask not in isolated:
                together.append(ask)
                num_places += len(ask.places)

        return together or [ask for ask in isolated if self._is_due(ask.engine)][:1]

    def _broken_rounds(self, engine: str) -> int:
        return self._broken.get(engine, (0, 0.0))[0]

    def _is_due(self, engine: str) -> bool:
        return time.monotonic() >= self._broken.get(engine, (0, 0.0))[1]

    async def _waiting(self, missing: set[str]) -> list[PlaceRequest]:
        """The asks for the version, once all these engines ask or EXPECT_S have passed."""
        ends = time.monotonic() + EXPECT_S
        try:
            latest = await in_thread(self._latest_version)
            while True:
                asks = await in_thread(self._files.asks, latest.sha256)
                if missing <= {ask.engine for ask in asks} or time.monotonic() > ends:
                    return asks
                await asyncio.sleep(LOOK_S)
        except OSError as error:  # the folder is away, or full: try again at the next look
            self._say(
                f"version {self._version} can't be sent, and is tried again while the run waits "
                f"for attempts: {self._files.folder}: {error.strerror or error}"
            )
            return []

    def _latest_version(self) -> Latest:
        """The version as engines see it, written again if it was damaged."""
        if not self._has_begun:
            self._files.begin()
            self._has_begun = True
        self._files.make_folders()
        if self._latest is None or not self._files.is_whole(self._latest):
            self._latest = self._files.announce(Contents.of(self._version, self._specs()))
        return self._latest

    def _send(self, asks: Sequence[PlaceRequest]) -> bool:
        """One round, for these engines; whether it was completed."""
        latest = self._latest
        assert latest is not None  # otherwise no engine could have asked for it

        specs = self._specs()
        device = self._device()
        try:
            taken = self._files.take(asks)
            if not taken:
                return True

            places = [place for ask in taken for place in ask.places]
            backend = backend_of([identity(device), *places])
            round_id = uuid.uuid4().hex
            answers = dict[str, PlaceAnswer]()
            rank = 1
            for ask in taken:
                answers[ask.id] = PlaceAnswer(
                    round_id, latest.sha256, backend, rank, len(places) + 1
                )
                rank += len(ask.places)

            with self._files.round(round_id, answers):
                answer = next(iter(answers.values()))
                refusals = send(self._files, answer, specs, self._tensors, device)
        except WeightsLostError as error:
            self._was_broken_off(asks, str(error))
            return False
        except (EngineError, OSError, torch.OutOfMemoryError) as error:  # the trainer's own trouble
            self._say_not_reached(asks, str(error))
            return False

        if refusals:
            self._was_broken_off(
                taken, f"{refusals} of {len(places)} received other bits than were sent"
            )
            return False

        for ask in taken:
            self._expected.add(ask.engine)
            self._broken.pop(ask.engine, None)

        self._said = ""
        return True

    def _was_broken_off(self, asks: Sequence[PlaceRequest], why: str) -> None:
        for ask in asks:
            count = self._broken_rounds(ask.engine) + 1
            pause_s = min(PAUSE_S * max(count - ALONE_AFTER, 0), LONGEST_PAUSE_S)
            self._broken[ask.engine] = (count, time.monotonic() + pause_s)
        self._say_not_reached(asks, why)

    def _say_not_reached(self, asks: Sequence[PlaceRequest], why: str) -> None:
        of_whom = ", ".join(sorted(ask.where for ask in asks)[:5])
        whom = "an engine" if len(asks) == 1 else f"{len(asks)} engines"
        self._say(
            f"the round that sends version {self._version} to {whom} ({of_whom}) was broken off; "
            f"engines that still run keep their weights and ask again: {why}"
        )

    def _specs(self) -> dict[str, Spec]:
        how = in_parts(self._model)
        if how is not None:
            return how.specs(only_trained=True)
        return {
            name: Spec(tensor.dtype, tuple(tensor.shape))
            for name, tensor in trained_weights(self._model).items()
        }

    def _device(self) -> torch.device:
        how = in_parts(self._model)
        if how is not None:
            return next(iter(how.own_parts(True).values())).local.device
        return next(iter(trained_weights(self._model).values())).device

    def _tensors(self) -> AbstractContextManager[Iterable[tuple[str, torch.Tensor]]]:
        """In the order of `_specs`; gathered one by one from a model in parts."""
        how = in_parts(self._model)
        if how is not None:
            return how.tensors(only_trained=True)
        return nullcontext(trained_weights(self._model).items())

    def _say(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self._note(line)
