"""Repeats the committed steps of a run that are newer than the checkpoint which it resumes from."""

from __future__ import annotations

from collections.abc import Callable

from agentevo.errors import TrainingError
from agentevo.observability import LiveView
from agentevo.runs.folder.chain import KEY as CHAIN
from agentevo.runs.folder.chain import End
from agentevo.runs.orchestration.batch_sources import BatchSource
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.resume import ResumePoint, replay_step
from agentevo.runs.orchestration.run_checkpoints import RunCheckpoints
from agentevo.runs.orchestration.run_record import RunRecord
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.store.records import StepRecord
from agentevo.training.learner import Learner

SAME = 1e-3
"""Relative difference of a gradient norm up to which a repeated step counts as the same."""


class StepReplayer:
    """See the module."""

    def __init__(
        self,
        parts: Components,
        source: BatchSource,
        trainer: Learner,
        record: RunRecord,
        checkpoints: RunCheckpoints,
        view: LiveView,
        is_stopped: Callable[[], bool],
        *,
        is_synchronous: bool,
    ) -> None:
        """`is_synchronous`: nothing else samples while the trainer computes."""
        self._parts = parts
        self._source = source
        self._trainer = trainer
        self._record = record
        self._checkpoints = checkpoints
        self._view = view
        self._is_stopped = is_stopped
        self._is_synchronous = is_synchronous

    async def replay(self, start: ResumePoint) -> None:
        """Brings trainer and record to the newest committed step, unless the run is asked to stop
        before that.

        For the step after it, which a kill may have left reserved, the same attempts are taken
        again (rollout_sources.py). If these are the attempts of the step's own tasks, an earlier
        selection among them is dropped, because the recipe may select differently now.
        """
        if self._is_synchronous or self._parts.config.rollout.policy == "wait":
            store = self._parts.store
            await with_retries(
                lambda: store.rewind(start.end.step, keep=True),
                within_s=STORE_RETRY_S,
                what="releasing reserved attempts",
            )

        if start.steps and start.checkpoint is None:
            self._trainer.begin()

        for number, step in enumerate(start.steps, start=1):
            if self._is_stopped():
                self._view.note("stopped while repeating committed steps: nothing was changed")
                return
            self._view.phase("doing again", f"step {step.step} ({number}/{len(start.steps)})")
            await self._replay_step(step)

    async def _replay_step(self, step: StepRecord) -> None:
        self._compare(step, await replay_step(self._trainer, self._source, step))
        self._record.restore_step(step)
        self._checkpoints.keep_lost_best(End(step.step, str(step.record[CHAIN])))

    def _compare(self, step: StepRecord, trained: dict[str, float]) -> None:
        """Warns if the repeated step gave another result than the committed one, for example on
        another machine."""
        was = step.record["metrics"].get("actor/grad_norm")
        now = trained.get("actor/grad_norm")
        if (was is None) != (now is None):
            raise TrainingError(
                f"step {step.step}, repeated from its plan, has gradient norm {now}; when it was "
                f"committed {was}: has the recipe changed?"
            )

        if was is not None and now is not None and abs(now - was) > SAME * max(abs(was), 1e-6):
            self._record.warn(
                f"step {step.step}, repeated from its plan, has a gradient norm of {now:.6g}; "
                f"when it was committed {was:.6g}"
            )
