"""Engines of a run as real processes, for tests that kill them. Each is forked from a process that
has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Self

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["agentevo.runs.processes.serve"])


def serve_run(folder: str, name: str, step_s: float, parent: int | None) -> None:
    """`agentevo serve FOLDER/config.yaml` whose every step takes `step_s` longer, so that something
    is always under way."""
    import torch

    torch.set_num_threads(1)
    from agentevo.config import load_config
    from agentevo.inference.embedded.torch_engine import TorchEngine
    from agentevo.runs.processes.serve import serve

    real = TorchEngine._step

    def slow(engine: TorchEngine) -> int:
        time.sleep(step_s)
        return real(engine)

    TorchEngine._step = slow  # type: ignore[method-assign]
    log = Path(folder) / f"{name}.log"

    def note(line: str) -> None:
        with log.open("a") as file:
            file.write(line + "\n")

    serve(
        load_config(Path(folder) / "config.yaml", [f"run.dir={folder}"]),
        name=name,
        parent=parent,
        note=note,
    )


class EngineProcesses:
    """The engines of one run, by name. None is left when the `with` block ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, BaseProcess] = {}

    def start(self, name: str, *, step_s: float = 0.0, parent: int | None = None) -> BaseProcess:
        process = CONTEXT.Process(
            target=serve_run, args=(str(self.folder), name, step_s, parent), daemon=True
        )
        process.start()
        self.processes[name] = process
        return process

    def signal(self, name: str, number: signal.Signals) -> None:
        pid = self.processes[name].pid
        assert pid is not None
        os.kill(pid, number)

    def log(self, name: str) -> list[str]:
        path = self.folder / f"{name}.log"
        return path.read_text().splitlines() if path.is_file() else []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(300)
