"""The reward `math`: answers compared as mathematics, in worker processes (math_worker.py).

A comparison that takes longer than `deadline_s` ends its process, and the score has failed; the
next one gets a fresh process. The processes end with the scorer, and with this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from pydantic import Field

from agentevo.extras import load_extra
from agentevo.rewards.reward import Score, reward
from agentevo.rewards.stated import AnswerConfig, right_answers, stated_answer
from agentevo.types import Task, Trajectory

START_S = 120.0
"""Longest time for a process to import sympy, on a machine that is busy."""
MAX_PROCESSES = 2
MAX_CHARACTERS = 2000
"""Of an answer: of a longer one, the last so many are read."""


class MathConfig(AnswerConfig):
    """A reward that compares answers as mathematics."""

    deadline_s: float = Field(default=5.0, gt=0, le=60)
    """Longest time for one comparison, in seconds; then the score has failed."""


@reward("math")
class MathAnswer:
    """The stated answer equals the task's, or one of them, as mathematics: `1/2` is
    `\\\\frac{2}{4}`. Needs the extra `math`."""

    Config = MathConfig

    def __init__(self, config: MathConfig) -> None:
        """Raises MissingExtraError."""
        if find_spec("math_verify") is None:
            load_extra("math_verify", "math", "the reward math")
        self.config = config
        self._workers = _Workers()

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """See Scorer.score. Raises TimeoutError, ValueError for a right answer that is no
        mathematics, and RuntimeError for a comparison that fails."""
        right = [str(answer)[-MAX_CHARACTERS:] for answer in right_answers(task)]
        stated = await stated_answer(trajectory, task, self.config.place)
        if not stated:
            return Score(0.0)

        request = {"right": right, "stated": stated[-MAX_CHARACTERS:]}
        answer = await self._workers.ask(request, self.config.deadline_s)
        if "problem" in answer:
            raise ValueError(f"the answers can't be compared: {answer['problem']}")

        return Score(float(answer["equal"]))


class _Workers:
    """A bounded number of threads, each with a process of its own, begun as they are needed."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="agentevo-math")
        self._of_thread = threading.local()

    async def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """What a process answers. Raises TimeoutError and RuntimeError."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._ask, request, limit_s)

    def _ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        worker: _Worker | None = getattr(self._of_thread, "worker", None)
        if worker is None or not worker.is_alive:
            worker = self._of_thread.worker = _Worker()
        return worker.ask(request, limit_s)


class _Worker:
    """One process."""

    def __init__(self) -> None:
        """Raises RuntimeError, and TimeoutError, for one that does not start."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agentevo.rewards.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process alone
            bufsize=0,
        )
        self._end = weakref.finalize(self, _ended, self._process)
        self._answer(START_S, "start")

    @property
    def is_alive(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except OSError as error:
            self._end()
            raise RuntimeError(f"the process that compares answers has ended: {error}") from error
        return self._answer(limit_s, "compare two answers")

    def _answer(self, limit_s: float, what: str) -> dict[str, Any]:
        """The next line. Whatever goes wrong ends the process."""
        assert self._process.stdout is not None

        until = time.monotonic() + limit_s
        line = b""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                while not line.endswith(b"\n"):
                    left = until - time.monotonic()
                    if left <= 0 or not selector.select(left):
                        raise TimeoutError(
                            f"the process of math-verify took longer than {limit_s:g} s to {what}"
                        )

                    piece = os.read(self._process.stdout.fileno(), 65536)
                    if not piece:
                        raise RuntimeError(f"the process of math-verify ended; it was to {what}")

                    line += piece

            answer: dict[str, Any] = json.loads(line)
        except BaseException:
            self._end()
            raise

        return answer


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.wait()
