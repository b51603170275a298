"""What Python's search for cyclic garbage costs a training, with and without `lasting_heap`.

OMP_NUM_THREADS=1 .venv/bin/python benchmarks/heap.py [--steps 4] [--save]

ratio full_collections   seconds of searches of the whole heap between the first evaluation and
                         the end of a training of `frozen_lake`, over those of the same training
                         whose heap is not frozen. Lower is better; no peer
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from figures import Figure, write_results
from machine import describe_machine


def train_here(told: Path, is_frozen: bool, words: list[str]) -> None:
    """In a process of its own: trains, and writes how long each search of the whole heap took."""
    from agentevo.cli.main import main
    from agentevo.runs.orchestration import run

    freeze = run.lasting_heap
    searches = list[float]()
    began = [0.0]

    def heard(phase: str, info: dict[str, Any]) -> None:
        if info["generation"] == 2 and phase == "start":
            began[0] = time.perf_counter()
        elif info["generation"] == 2:
            searches.append(time.perf_counter() - began[0])

    @contextlib.contextmanager
    def measured() -> Any:
        with freeze() if is_frozen else contextlib.nullcontext():
            gc.callbacks.append(heard)
            cpu_s = time.process_time()
            yield
            gc.callbacks.remove(heard)
            found = {"searches_s": searches, "process_s": time.process_time() - cpu_s}
            told.write_text(json.dumps(found))

    run.lasting_heap = measured
    sys.argv = ["agentevo", *words]
    main()


def train(folder: Path, is_frozen: bool, steps: int) -> dict[str, Any]:
    told = folder / f"told-{is_frozen}"
    words = ["train", "frozen_lake", f"run.dir={folder / f'run-{is_frozen}'}"]
    words += [f"trainer.steps={steps}", "evaluation.tasks=8", "tracking.report=false"]
    program = [sys.executable, __file__, "--train-here", str(told), str(int(is_frozen)), *words]
    subprocess.run(program, check=True, capture_output=True, cwd=folder)
    found: dict[str, Any] = json.loads(told.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    machine = describe_machine()

    with tempfile.TemporaryDirectory(prefix="agentevo-bench-heap-") as name:
        raw = {
            "frozen" if is_frozen else "as_it_is": train(Path(name), is_frozen, arguments.steps)
            for is_frozen in (False, True)
        }

    took = {key: sum(one["searches_s"]) for key, one in raw.items()}
    longest = {key: max(one["searches_s"], default=0.0) for key, one in raw.items()}
    shares = {key: took[key] / one["process_s"] for key, one in raw.items()}
    content = {**raw, "sums": took, "longest": longest, "shares_of_cpu": shares, "unit": "s"}
    meaning = "seconds of searches of the whole heap, of a frozen one over one as it is"
    figure = Figure("full_collections", took["frozen"] / took["as_it_is"], meaning, content)
    print(figure.line())
    print({"sums": took, "longest": longest, "shares_of_cpu": shares})

    if arguments.save:
        print(write_results([figure], {}, {}, machine, "heap"), file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train-here"]:
        train_here(Path(sys.argv[2]), bool(int(sys.argv[3])), sys.argv[4:])
    else:
        main()
