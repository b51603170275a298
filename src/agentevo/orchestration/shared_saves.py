"""Checkpoints that several processes write together: what each of them gives, at once or while the
next step goes on.

    first    Leader -> Contribution, with which TrainingRun saves
    others   SharedSaves.give
"""

from __future__ import annotations

import threading
from typing import Any

from torch import distributed
from transformers import PreTrainedModel

from agentevo.training.contribution import Contribution
from agentevo.training.sharding.saving import saved_parts
from agentevo.training.state_parts import split_state


def contribution_of(
    model: PreTrainedModel,
    state: dict[str, Any],
    group: distributed.ProcessGroup | None,
    *,
    with_weights: bool,
    copied: bool,
) -> Contribution:
    """This process's, of its trainer's state. `with_weights`: no process has the whole model.
    `copied`: of now, whatever is trained before it is written."""
    _, parts = split_state(state)
    made = Contribution(saved_parts(model) if with_weights else {}, parts, group)
    return made.copied() if copied else made


class SharedSaves:
    """On another process than the first: gives its contributions, one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def give(self, contribution: Contribution, *, copied: bool) -> None:
        """A copied one is given by a thread. Raises what the one before has failed with."""
        self.end()
        if not copied:
            contribution.give()
            return

        def work() -> None:
            try:
                contribution.give()
            except Exception as error:  # noqa: BLE001 (raised by `end`)
                self._failure = error

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Waits for what is under way; raises what it has failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure
