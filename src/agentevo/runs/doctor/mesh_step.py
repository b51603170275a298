"""`agentevo doctor RECIPE --world-size N`: the measured peak of one step in the recipe's mesh.

N processes on this machine load the recipe's model, split it by trainer.parallel and train it for
one step on random tokens, in micro-batches of the largest size that the recipe allows. Nothing is
sampled or saved: engine, reference and critic are not measured, and the recipe's tasks and folder
are not touched.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from agentevo.config import AlgorithmSection, RunConfig, load_config
from agentevo.config.parallel import world_size
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.models.compute.positions import context_length
from agentevo.runs.doctor.checks import GIB, Check
from agentevo.runs.doctor.memory_estimate import longest_pass, process_terms, sizes_of, total
from agentevo.runs.doctor.mesh_estimate import ROOM
from agentevo.runs.orchestration.checks import check_processes
from agentevo.runs.orchestration.components import load_policy
from agentevo.runs.orchestration.ranks import join_ranks
from agentevo.runtime import devices
from agentevo.runtime.progress import bar
from agentevo.training.trainer import Trainer
from agentevo.types import Sample

WITHIN_S = 1800.0
MOST_PROCESSES = 64


def check_mesh_step(config: RunConfig, world: int, words: Sequence[str]) -> Check:
    """`words`: the recipe and its overrides. Raises ConfigError for a mesh that `world` processes
    can't form here."""
    device = devices.find(config.model.device)
    most = len(devices.all_of(device)) if devices.is_accelerator(device) else MOST_PROCESSES
    if not 1 <= world <= most:
        raise ConfigError(
            f"--world-size {world}: give 1 to {most} processes on this machine; --devices "
            "estimates the memory of others"
        )

    check_processes(config, world=world)
    mesh = config.trainer.parallel.shared_by(world) or "one process"
    with tempfile.TemporaryDirectory(prefix="agentevo-mesh-") as temporary_path:
        folder = Path(temporary_path)
        with bar(f"one step of {world} processes", 1, "steps") as steps:
            problem = _run(folder, world, words)
            steps.advance()

        measured = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]

    if problem:
        finding = f"{world} processes ({mesh}) could not make one step: {problem}"
        advice = "the last line says what failed; --devices estimates what a mesh needs"
        return Check("mesh step", "wrong", finding, advice)

    peak = max(process["peak"] for process in measured)
    finding = (
        f"{world} processes ({mesh}) made one step with micro-batches of "
        f"{measured[0]['tokens']:,} tokens: the peak is {peak / GIB:.2f} GiB on the device that "
        f"needs most, the estimate {max(process['estimate'] for process in measured) / GIB:.2f}"
    )
    needed = peak * (1 if devices.is_accelerator(device) else world)
    memory = devices.memory(device)[1]
    if needed <= ROOM * memory:
        return Check("mesh step", "good", finding)

    advice = f"too near to the {memory / GIB:.1f} GiB of memory: see docs/training.md, Limit memory"
    return Check("mesh step", "warning", finding, advice)


def _run(folder: Path, world: int, words: Sequence[str]) -> str:
    """Starts the processes, which write their results to the folder. Returns the errors of a failed
    process, or else the end of its output; empty for success."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        f"--nproc-per-node={world}",
        "-m",
        "agentevo.runs.doctor.mesh_step",
        str(folder),
        *words,
    ]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    try:
        code = process.wait(WITHIN_S)
    except subprocess.TimeoutExpired:
        return f"not done within {WITHIN_S:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (
        f"exit code {code}: {' | '.join(dict.fromkeys(errors or lines[-5:]))[-1000:]}"
        if code
        else ""
    )


def measure_step(config: RunConfig) -> dict[str, float]:
    """Trains for one step with the other processes of the launcher. Returns the bytes that this
    process needed at its peak and those that the estimate gives, and the tokens of a
    micro-batch."""
    device = devices.find(config.model.device)
    with join_ranks(config) as ranks:
        resident = 0 if devices.is_accelerator(device) else psutil.Process().memory_info().rss
        model = load_policy(config, for_part=ranks is not None).model
        sizes = sizes_of(model)
        tokens = longest_pass(config, sizes)
        stage = 0
        if ranks is not None:
            model = ranks.share(model)
            stage = {name: index for name, index, _ in ranks.meshes.coordinates()}["pp"]

        updates = {"minibatches": 1, "micro_batch_tokens": tokens}
        section = config.trainer.model_copy(update=updates)
        trainer = Trainer(model, section, AlgorithmSection(), memory=config.memory)
        trainer.step(_make_samples(config, tokens, context_length(model.config)))
        if ranks is not None and os.environ["RANK"] != "0":
            ranks.receive()  # the first process's end

    terms = process_terms(config, sizes, stage)
    return {
        "peak": devices.peak_memory(device) - resident,
        "estimate": total(terms) - terms["other models"],
        "tokens": tokens,
    }


def _make_samples(config: RunConfig, tokens: int, context: int) -> list[Sample]:
    """Two full micro-batches for each stage of each data-parallel process."""
    mesh = config.trainer.parallel
    length = min(tokens, context)
    num_inner = mesh.tensor * mesh.context
    num_samples = 2 * -(-tokens // length) * world_size() // num_inner
    random = np.random.default_rng(0)
    return [
        Sample.given(f"t{n}", f"g{n}", random.integers(2, 100, length), np.arange(length) > 0)
        for n in range(num_samples)
    ]


def main() -> None:
    folder, recipe, *overrides = sys.argv[1:]
    config = load_config(recipe, overrides, needs_environment=False)
    try:
        result = measure_step(config)
    except AgentEvoError as error:
        raise SystemExit(f"error: {error}") from error
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
