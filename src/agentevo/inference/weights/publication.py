"""The trainer's side of sending weights as files (RUN/weights, or an object store). It keeps the
files of the newest version intact as long as engines may need them.

If the files of a version were missing or damaged, engines would stay at the previous version, and a
trainer that waits for attempts with the new version would wait forever. A waiting trainer therefore
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
"""The interval in seconds after which a version is read again although its files look unchanged."""


class Publication:
    """A WeightSender that writes files. `note` gets a message if a version is damaged or can't be
    written."""

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
        """The published version. None before the first version, or if it can't be read or
        written."""
        self._intact_state: object = None
        """The state of the published version's files at the last complete check."""
        self._verified_at = 0.0
        self._in_full = False
        """Whether the versions below the last one may be damaged. Then the next version is written
        in full."""
        self._has_advised = False
        self._last_reported = ""
        """The last reported problem. A problem is reported once."""

    async def begin(self, version: int) -> None:
        """See WeightSender.begin. Engines that have a later version keep it."""
        await self.publish(version)

    async def publish(self, version: int) -> None:
        """See WeightSender.publish. If an earlier trainer has published this version or a later
        one, and its files are intact, they stay. If the version can't be written now, `look_after`
        writes it later."""
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
            is_check_due = time.monotonic() - self._verified_at >= VERIFY_S
            state = await in_thread(self._folder.state, self._latest.version)
            if state == self._intact_state and not is_check_due:
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
            reason = f"{self._folder.place}: {error.strerror or error}"
            self._report(
                f"version {self._version} could not be written, and is tried again while the run "
                f"waits for attempts: {reason}"
            )

    async def _write(self) -> None:
        self._latest = self._intact_state = None
        sha256 = await in_thread(
            self._folder.write, self._version, self._model, keep=self._keep, in_full=self._in_full
        )
        self._latest = Latest(self._version, sha256)
        self._last_reported = ""
        self._in_full = False

        if self._folder.advice and not self._has_advised:
            self._has_advised = True
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
