"""The reward `math`: compares answers as mathematics, in worker processes (math_worker.py).

If a comparison takes longer than `deadline_s`, its process ends and the score fails. The next
comparison gets a new process. The processes end with the scorer, and with this process.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from pydantic import Field

from agentevo.rewards.reward import AnswerConfig, Score, reward, right_answers, stated_answer
from agentevo.runtime.extras import load_extra
from agentevo.runtime.json_worker import JsonWorker
from agentevo.types import Task, Trajectory

MAX_PROCESSES = 2
MAX_CHARACTERS = 2000
"""The maximum number of characters of an answer. Of a longer answer, only the end is compared."""


class MathConfig(AnswerConfig):
    """A reward that compares answers as mathematics."""

    deadline_s: float = Field(default=5.0, gt=0, le=60)
    """The time limit of a comparison, in seconds. Beyond it, the score fails."""


@reward("math")
class MathAnswer:
    """Score 1 if the stated answer equals a right answer as mathematics, else 0: `1/2` equals
    `\\\\frac{2}{4}`. Needs the extra `math`."""

    Config = MathConfig

    def __init__(self, config: MathConfig) -> None:
        """Raises MissingExtraError."""
        if find_spec("math_verify") is None:
            load_extra("math_verify", "math", "the reward math")
        self.config = config
        self._workers = _MathWorkers()

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """See Scorer.score. Raises TimeoutError, ValueError for a right answer that is not
        mathematics, and RuntimeError for a comparison that fails."""
        right_texts = [str(answer)[-MAX_CHARACTERS:] for answer in right_answers(task)]
        stated = await stated_answer(trajectory, task, self.config.place)
        if not stated:
            return Score(0.0)

        request = {"right": right_texts, "stated": stated[-MAX_CHARACTERS:]}
        answer = await self._workers.ask(request, self.config.deadline_s)
        if "problem" in answer:
            raise ValueError(f"the answers can't be compared: {answer['problem']}")

        return Score(float(answer["equal"]))


class _MathWorkers:
    """A limited number of threads, each with its own process. They start when they are needed."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="agentevo-math")
        self._thread_local = threading.local()

    async def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The answer of a process. Raises TimeoutError and RuntimeError."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._ask, request, limit_s)

    def _ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        worker: JsonWorker | None = getattr(self._thread_local, "worker", None)
        if worker is None or not worker.is_alive:
            worker = JsonWorker("agentevo.rewards.math_worker", "math-verify")
            self._thread_local.worker = worker
        return worker.ask(request, limit_s, "compare two answers")
