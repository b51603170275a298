"""`agentevo doctor RECIPE --world-size N`: does the recipe's mesh work on this machine?

N processes on this machine's CPU, over gloo, train a tiny model for one step in the recipe's
trainer.parallel, and one process does the same alone: their weights must agree. The tiny model has
as many heads, layers and experts as the mesh divides. Nothing of the recipe's own model, tasks or
folder is touched.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentevo.config import ParallelSection, RunConfig, TinyModel, load_config
from agentevo.doctor.checks import Check
from agentevo.errors import ConfigError
from agentevo.models.save import save_model
from agentevo.models.tiny_tokenizer import tiny_tokenizer
from agentevo.orchestration.checks import check_processes
from agentevo.orchestration.players import corpus_of
from agentevo.progress import bar

TOLERANCE = 1e-5
"""Largest |difference| of a weight after the step."""
WITHIN_S = 600.0
MOST_PROCESSES = 64
RECIPE = (
    "coins",
    "model.device=cpu",
    "cold_start.episodes=0",
    "trainer.steps=1",
    "trainer.groups_per_step=4",
    "trainer.group_size=4",
    "trainer.warmup_steps=0",
    "evaluation.tasks=2",
    "evaluation.every=0",
    "tracking.tensorboard=false",
    "tracking.report=false",
    "run.threads=1",
)


def check_world(config: RunConfig, world: int) -> list[Check]:
    """Raises ConfigError for a mesh that `world` processes can't form, or that can't train the
    recipe."""
    if not 1 <= world <= MOST_PROCESSES:
        raise ConfigError(f"--world-size {world}: give 1 to {MOST_PROCESSES} processes")

    check_processes(config, world=world)
    sizes = config.trainer.parallel.model_dump()
    keys = [f"trainer.parallel.{key}={size}" for key, size in sizes.items() if size > 1]
    mesh = ", ".join(keys) or "replicas"
    with tempfile.TemporaryDirectory(prefix="agentevo-mesh-") as temporary_path:
        folder = Path(temporary_path)
        with bar(f"mesh trial: a step of 1, then of {world} processes", 2, "steps") as steps:
            _make_model(config.trainer.parallel, folder / "model")
            problem = _train(folder / "one", 1, [])
            steps.advance()
            problem = problem or _train(folder / "all", world, keys)
            steps.advance()

        if problem:
            return [
                Check(
                    "mesh trial",
                    "wrong",
                    f"{world} processes ({mesh}) could not make one step: {problem}",
                    "the last line says what failed",
                )
            ]

        difference = _difference(_weights(folder / "one"), _weights(folder / "all"))

    finding = (
        f"{world} processes ({mesh}) made one step of a tiny model over gloo, and their "
        f"weights differ from one process's by {difference:.1e}"
    )
    if difference <= TOLERANCE:
        return [Check("mesh trial", "good", finding)]

    advice = f"{TOLERANCE:g} is allowed: report this as a defect, with the versions above"
    return [Check("mesh trial", "wrong", finding, advice)]


def _make_model(parallel: ParallelSection, folder: Path) -> None:
    """Writes a tiny model that this mesh can divide, with random weights: a mixture if experts
    are spread."""
    heads = math.lcm(4, parallel.tensor * parallel.context)
    shape: dict[str, Any] = {
        "hidden_size": 16 * heads,
        "intermediate_size": 32 * heads,
        "num_hidden_layers": math.lcm(2, parallel.pipeline),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    experts: dict[str, Any] = {
        "num_experts": math.lcm(4, parallel.expert * parallel.tensor),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8 * heads,
    }
    corpus = corpus_of(load_config(RECIPE[0], list(RECIPE[1:])))
    tokenizer = tiny_tokenizer(TinyModel(), corpus)
    shape["vocab_size"] = len(tokenizer)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model: PreTrainedModel
        if parallel.expert > 1:
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, **ends))
        else:
            model = LlamaForCausalLM(LlamaConfig(**shape, **ends))

    save_model(model, tokenizer, folder)


def _train(run: Path, world: int, keys: list[str]) -> str:
    """The errors of a failed process, or else the end of its output; empty for success."""
    model = f"model.name={run.parent / 'model'}"
    words = ["-m", "agentevo", "train", *RECIPE, model, f"run.dir={run}", *keys]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    log = run.parent / f"{run.name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *(launcher if world > 1 else []), *words],
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
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
    errors = list(dict.fromkeys(line for line in lines if line.startswith("error: ")))
    return f"exit code {code}: {' | '.join(errors or lines[-5:])[-1000:]}" if code else ""


def _weights(run: Path) -> dict[str, torch.Tensor]:
    (folder,) = (run / "checkpoints").glob("step-000001")
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def _difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    if first.keys() != second.keys():
        return float("inf")
    return max(float((first[name] - second[name]).abs().max()) for name in first)
