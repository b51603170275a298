"""What somebody asks of a run between two of its steps: to save, to pause, to go on (runs/control).

Engines, samplers and leases live on while it is paused: the event loop runs, so leases are renewed,
and samplers play until as much waits as the recipe allows. A signal ends a pause at once.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from agentevo.errors import AgentEvoError
from agentevo.observability.moment import PAUSED
from agentevo.paths import short
from agentevo.runs.control import RunControl
from agentevo.signals import LOOK_S, STOPPING

if TYPE_CHECKING:
    from agentevo.observability import LiveView
    from agentevo.orchestration.training_run import TrainingRun


def asked_through(
    folder: Path, stop_signals: list[int], view: LiveView
) -> AbstractContextManager[RunControl | None]:
    """Around a run's steps. To stop is what SIGTERM does."""

    def stop() -> None:
        stop_signals.append(signal.SIGTERM)
        view.note(f"asked to stop: {STOPPING}")

    return RunControl(folder, stop, note=view.note)


async def obey(run: TrainingRun) -> None:
    """Does what was asked for since the step before; returns when the next one may begin, or the
    run is to stop."""
    control = run.control
    if control is None:
        return

    step = run.progress.step
    stood_still = False
    while True:
        for request in control.take_saves():
            try:
                run.keep_checkpoint()
            except AgentEvoError as error:
                run.view.warn(f"the checkpoint that was asked for could not be saved: {error}")
                control.answer(request, f"failed: {error}", is_done=False)
            else:
                control.answer(request, f"the checkpoint of step {step} is there")

        if not control.is_pause_asked or run.is_stopped():
            break

        stood_still = True
        control.paused(step)
        folder = short(run.parts.config.run_dir)
        run.view.phase(PAUSED, f"after step {step}; agentevo control {folder} resume goes on")
        began = time.perf_counter()
        await asyncio.sleep(LOOK_S)
        run.stood_still(time.perf_counter() - began)

    if stood_still:
        control.goes_on()
