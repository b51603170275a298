"""The proof that the run's engine sampled an attempt's tokens: a program may change the rewards of
a group, but not its turns.

    seal = HMAC-SHA256(secret of the run, digest of the trajectory without its outcome)

The digest (store/codec.py) covers ids of trajectory, task and group, the number of the attempt, and
of every turn its ids, float32 log-probs, versions, temperature, seed and messages.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from agentevo.api.loop.errors import SealError
from agentevo.errors import StoreError
from agentevo.store.codec import content_digest
from agentevo.types import Trajectory


class Sealer:
    """Seals attempts, and checks seals."""

    def __init__(self, secret: str) -> None:
        self._key = hashlib.sha256(f"attempts {secret}".encode()).digest()

    def seal(self, trajectory: Trajectory) -> str:
        """The trajectory's proof, which does not depend on its outcome."""
        bare = Trajectory(
            id=trajectory.id,
            task_id=trajectory.task_id,
            group_id=trajectory.group_id,
            attempt=trajectory.attempt,
            turns=[msgspec.structs.replace(turn, reward=0.0) for turn in trajectory.turns],
        )
        return hmac.new(self._key, content_digest(bare), hashlib.sha256).hexdigest()

    def check(self, trajectory: Trajectory, seal: str | None) -> None:
        """Raises SealError for tokens that differ from the sealed ones."""
        try:
            expected = self.seal(trajectory)
        except StoreError as error:
            raise SealError(f"{error}; submit attempts as they were gathered") from error

        is_text = isinstance(seal, str) and seal.isascii()
        if not is_text or not hmac.compare_digest(expected, str(seal)):
            raise SealError(
                f"the attempt {trajectory.id!r} is not what this run's engine sampled: its "
                f"turns, task, group or number were changed, or it belongs to another run; you "
                f"can change rewards, but not tokens"
            )
