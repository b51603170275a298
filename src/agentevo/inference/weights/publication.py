"""The trainer's side of sending weights as files (RUN/weights, or an object store). It keeps the
newest version there intact as long as engines may need it.

If a version can't be written or is damaged later, engines would stay at the previous version, and a
trainer that waits for attempts with the new one would wait forever. A waiting trainer therefore
checks the version and writes it again, since its model still has those weights. The last version of
a run is not checked any more, but is also in the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from agentevo.errors import EngineError
from agentevo.inference.weights.weight_transport import Latest
from agentevo.inference.weights.weight_versions import WeightVersions
from agentevo.runtime.event_loop import in_thread

VERIFY_S = 60.0
"""How often a version whose files look untouched is read again, in seconds."""


class Publication:
    """A WeightSender, see the module. `note` gets a message when a version was repaired, or can't
    be written."""

    def __init__(
        self,
        folder: WeightVersions,
        model: torch.nn.Module,
        *,
        keep: int,
        note: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._model = model
        self._keep = keep
        self._note = note
        self._version = 0
        """The version of the model's current weights."""
        self._latest: Latest | None = None
        """The published version. None if there is none yet, or if it can't be read or written."""
        self._intact_state: object = None
        """The state of its files when they were last read whole."""
        self._verified_at = 0.0
        self._in_full = False
        """Whether the versions below the last one may be damaged. Then the next version is written
        in full."""
        self._advised = False
        self._last_reported = ""
        """The last reported problem. A problem is reported once."""

    async def begin(self, version: int) -> None:
        """See WeightSender.begin. Engines that have a later version keep it."""
        await self.publish(version)

    async def publish(self, version: int) -> None:
        """See WeightSender.publish. If an earlier trainer has published this version or a later
        one, and it is intact, it stays. If the version can't be written now, `look_after` writes it
        later."""
        latest = await in_thread(self._latest_version)
        self._version = version
        self._latest = latest
        if self._latest is not None and self._latest.version < version:
            self._latest = None
        await self.look_after()

    async def look_after(self) -> None:
        """See WeightSender.look_after. Cheap while the files look unchanged, except once every
        VERIFY_S."""
        if self._latest is not None:
            late = time.monotonic() - self._verified_at >= VERIFY_S
            state = await in_thread(self._folder.state, self._latest.version)
            if state == self._intact_state and not late:
                return

            try:
                await in_thread(self._folder.check, self._latest)
            except EngineError as error:
                self._report(
                    f"version {self._latest.version} was damaged after it was published, and is "
                    f"written again: {error}"
                )
                self._in_full = True
            else:
                self._intact_state = state
                self._verified_at = time.monotonic()
                return

        try:
            await self._write()
        except OSError as error:  # the folder is unavailable or full: the next call tries again
            why = f"{self._folder.place}: {error.strerror or error}"
            self._report(
                f"version {self._version} could not be written, and is tried again while the run "
                f"waits for attempts: {why}"
            )

    async def _write(self) -> None:
        self._latest = self._intact_state = None
        sha256 = await in_thread(
            self._folder.write, self._version, self._model, keep=self._keep, in_full=self._in_full
        )
        self._latest = Latest(self._version, sha256)
        self._last_reported = ""
        self._in_full = False

        if self._folder.advice and not self._advised:
            self._advised = True
            self._note(self._folder.advice)

    def _latest_version(self) -> Latest | None:
        try:
            return self._folder.latest_version()
        except EngineError as error:
            self._report(str(error))
            return None

    def _report(self, line: str) -> None:
        if line != self._last_reported:
            self._last_reported = line
            self._note(line)
