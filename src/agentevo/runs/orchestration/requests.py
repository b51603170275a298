"""Carries out the requests that reach a run between two steps: save, pause, resume
(runs/folder/control.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from agentevo.config import RunConfig
from agentevo.errors import AgentEvoError
from agentevo.observability import LiveView
from agentevo.observability.current_activity import PAUSED
from agentevo.runs.folder.control import RunControl
from agentevo.runs.orchestration.run_checkpoints import RunCheckpoints
from agentevo.runs.orchestration.run_record import RunRecord
from agentevo.runtime.paths import short
from agentevo.runtime.signals import POLL_INTERVAL_S


class RequestHandler:
    """See the module."""

    def __init__(
        self,
        config: RunConfig,
        control: RunControl,
        record: RunRecord,
        checkpoints: RunCheckpoints,
        view: LiveView,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._folder = config.run_dir
        self._control = control
        self._record = record
        self._checkpoints = checkpoints
        self._view = view
        self._is_stopped = is_stopped

    async def handle(self) -> None:
        """Carries out the requests since the previous step. Returns when the next step may begin,
        or the run has to stop.

        Engines, samplers and leases stay alive during a pause: the event loop runs, so leases are
        renewed, and samplers play until as many attempts wait as the recipe allows. A signal ends a
        pause immediately.
        """
        step = self._record.progress.step
        has_paused = False
        while True:
            self._save(step)
            if not self._control.is_pause_asked or self._is_stopped():
                break

            has_paused = True
            self._control.note_pause(step)
            resume = f"agentevo control {short(self._folder)} resume"
            self._view.phase(PAUSED, f"after step {step}; {resume} continues")
            started = time.perf_counter()
            await asyncio.sleep(POLL_INTERVAL_S)
            self._record.exclude_pause(time.perf_counter() - started)

        if has_paused:
            self._control.note_resume()

    def _save(self, step: int) -> None:
        for request in self._control.take_saves():
            try:
                self._checkpoints.keep()
            except AgentEvoError as error:
                self._view.warn(f"the requested checkpoint could not be saved: {error}")
                self._control.answer(request, f"failed: {error}", is_done=False)
            else:
                self._control.answer(request, f"the checkpoint of step {step} exists")
