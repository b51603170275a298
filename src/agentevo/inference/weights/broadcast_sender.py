"""The trainer's side of sending weights over a process group.

`publish` announces a version. It waits at most ENGINE_WAIT_S for the engines that have the previous
version, or asked for it. Then it sends the new version in rounds to all engines that ask.
`look_after` sends it to engines that ask later: new engines, and those whose round failed. Between
these calls the model changes, and nothing is sent.

A dead engine costs at most one wait and one round: its ask is answered once, and `publish` does not
wait for an engine that did not ask for the previous version. An engine that asks and never joins
(behind a firewall, say) soon gets separate rounds at long intervals, so it does not delay the other
engines.
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

from agentevo.errors import EngineError, WeightsLostError
from agentevo.inference.weights.broadcast_files import (
    MAX_PLACES,
    BroadcastFiles,
    Contents,
    PlaceAnswer,
    PlaceRequest,
)
from agentevo.inference.weights.broadcast_group import backend_of, send
from agentevo.inference.weights.weight_transport import Latest
from agentevo.models.compute.parameters import trained_weights
from agentevo.models.compute.parts import Spec
from agentevo.models.files.split_models import in_parts
from agentevo.runtime.devices import identity
from agentevo.runtime.event_loop import in_thread, run_to_end

ENGINE_WAIT_S = 10.0
"""How long `publish` waits for an engine that has the previous version, or asked for it."""
MAX_FAILED_ROUNDS = 3
"""The most failed rounds in one `publish`. After them, `look_after` serves the engines that still
wait."""
SEPARATE_AFTER = 2
"""After this many consecutive failed rounds, an engine gets separate rounds..."""
PAUSE_S = 60.0
"""...and after each separate round that fails, the pause before the next one grows by this much."""
MAX_PAUSE_S = 600.0
POLL_INTERVAL_S = 0.05


class BroadcastSender:
    """A WeightSender, see the module. `note` gets a message when a round fails."""

    def __init__(self, folder: Path, model: nn.Module, *, note: Callable[[str], None]) -> None:
        self._files = BroadcastFiles(folder)
        self._model = model
        self._note = note
        self._version = 0
        self._latest: Latest | None = None
        """The announced version; None if it could not be written."""
        self._has_begun = False
        self._served: set[str] = set()
        """Engines that have this version. `publish` waits for them when it sends the next one."""
        self._failed_rounds: dict[str, tuple[int, float]] = {}
        """Engine -> the number of its consecutive failed rounds, and the earliest time of its next
        one."""
        self._last_reported = ""
        """The last reported problem. A problem is reported once."""

    async def begin(self, version: int) -> None:
        """See WeightSender.begin. Engines that have a later version keep it."""
        await self.publish(version)

    async def publish(self, version: int) -> None:
        """See WeightSender.publish. If the version can't be announced now, `look_after` announces
        it later."""
        missing = self._served | await self._still_asking()
        num_failed = 0
        self._version = version
        self._latest = None
        self._served = set()

        while num_failed < MAX_FAILED_ROUNDS:
            asks = await self._wait_for_asks(missing)
            chosen = self._choose_asks(asks)
            if not chosen:
                return

            is_complete = await self._send_in_thread(chosen)
            num_failed += not is_complete
            done = {ask.engine for ask in chosen} if is_complete else set[str]()
            missing = {ask.engine for ask in asks if self._is_due(ask.engine)} - done
            if not missing:
                return

    async def look_after(self) -> None:
        """See WeightSender.look_after. While no engine asks, it reads two files and lists one
        folder."""
        chosen = self._choose_asks(await self._wait_for_asks(set()))
        if chosen:
            await self._send_in_thread(chosen)

    async def _send_in_thread(self, asks: Sequence[PlaceRequest]) -> bool:
        """Runs `_send` in a thread. A round reads the model until it ends, so a cancelled caller
        waits for its end before the model may change."""
        return await run_to_end(in_thread(self._send, asks))

    async def _still_asking(self) -> set[str]:
        """Engines that wait for the announced version, and will also want the next one."""
        if self._latest is None:
            return set()
        try:
            asks = await in_thread(self._files.asks, self._latest.sha256)
        except OSError:  # which `_wait_for_asks` reports
            return set()
        return {ask.engine for ask in asks if self._is_due(ask.engine)}

    def _choose_asks(self, asks: Sequence[PlaceRequest]) -> list[PlaceRequest]:
        """Chooses the engines of the next round: all together, except those whose last rounds
        failed. Each of these gets a separate round after the others, at growing intervals."""
        isolated = [ask for ask in asks if self._num_failed_rounds(ask.engine) >= SEPARATE_AFTER]
        together = list[PlaceRequest]()
        num_places = 0
        for ask in asks:
            fits = num_places + len(ask.places) <= MAX_PLACES
            if fits and ask not in isolated:
                together.append(ask)
                num_places += len(ask.places)

        return together or [ask for ask in isolated if self._is_due(ask.engine)][:1]

    def _num_failed_rounds(self, engine: str) -> int:
        return self._failed_rounds.get(engine, (0, 0.0))[0]

    def _is_due(self, engine: str) -> bool:
        return time.monotonic() >= self._failed_rounds.get(engine, (0, 0.0))[1]

    async def _wait_for_asks(self, missing: set[str]) -> list[PlaceRequest]:
        """Waits until all these engines ask for the version or ENGINE_WAIT_S has passed, and
        returns the asks."""
        ends = time.monotonic() + ENGINE_WAIT_S
        try:
            latest = await in_thread(self._latest_version)
            while True:
                asks = await in_thread(self._files.asks, latest.sha256)
                if missing <= {ask.engine for ask in asks} or time.monotonic() > ends:
                    return asks
                await asyncio.sleep(POLL_INTERVAL_S)
        except OSError as error:  # the folder is unavailable or full: the next call tries again
            self._report(
                f"version {self._version} can't be sent, and is tried again while the run waits "
                f"for attempts: {self._files.folder}: {error.strerror or error}"
            )
            return []

    def _latest_version(self) -> Latest:
        """The version as engines see it. Writes it again if it was damaged."""
        if not self._has_begun:
            self._files.begin()
            self._has_begun = True
        self._files.make_folders()
        if self._latest is None or not self._files.is_whole(self._latest):
            self._latest = self._files.announce(Contents.of(self._version, self._specs()))
        return self._latest

    def _send(self, asks: Sequence[PlaceRequest]) -> bool:
        """Runs one round for these engines. Returns whether it was completed."""
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
            self._record_failed_round(asks, str(error))
            return False
        except (EngineError, OSError, torch.OutOfMemoryError) as error:  # the trainer's error
            self._report_failed_round(asks, str(error))
            return False

        if refusals:
            self._record_failed_round(
                taken, f"{refusals} of {len(places)} received other bits than were sent"
            )
            return False

        for ask in taken:
            self._served.add(ask.engine)
            self._failed_rounds.pop(ask.engine, None)

        self._last_reported = ""
        return True

    def _record_failed_round(self, asks: Sequence[PlaceRequest], why: str) -> None:
        for ask in asks:
            count = self._num_failed_rounds(ask.engine) + 1
            pause_s = min(PAUSE_S * max(count - SEPARATE_AFTER, 0), MAX_PAUSE_S)
            self._failed_rounds[ask.engine] = (count, time.monotonic() + pause_s)
        self._report_failed_round(asks, why)

    def _report_failed_round(self, asks: Sequence[PlaceRequest], why: str) -> None:
        engine_names = ", ".join(sorted(ask.where for ask in asks)[:5])
        recipients = "an engine" if len(asks) == 1 else f"{len(asks)} engines"
        self._report(
            f"the round that sends version {self._version} to {recipients} ({engine_names}) "
            f"was broken off; engines that still run keep their weights and ask again: {why}"
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
        """The tensors in the order of `_specs`. If the model is in parts, each is gathered when it
        is needed."""
        how = in_parts(self._model)
        if how is not None:
            return how.tensors(only_trained=True)
        return nullcontext(trained_weights(self._model).items())

    def _report(self, line: str) -> None:
        if line != self._last_reported:
            self._last_reported = line
            self._note(line)
