"""On-policy distillation beside GRPO: how much of `coins` a student learns in as many steps.

    .venv/bin/python benchmarks/distillation.py --seeds 0 1 2

The teacher is a tiny Llama that read demonstrations of the environment's solver. The student is a
Qwen3 of another shape with the teacher's tokenizer, which read demonstrations whose actions are
mostly random. Three runs start from the same student, with the same
tasks and number of attempts: GRPO on the reward, the teacher alone, and both. The success is that
of greedy attempts at held-out tasks, every 10 steps.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agentevo.api.run import Run, train
from agentevo.config import build_config
from agentevo.observability import read_metrics

SUCCESS = "val-core/coins/success/greedy"
ENVIRONMENT = {"type": "coins", "rule": "match", "num_coins": 4}
COMMON: dict[str, Any] = {
    "environment": ENVIRONMENT,
    "agent": {"format": "plain", "max_turns": 1},
    "sampling": {"max_new_tokens": 8},
    "tracking": {"report": False, "tensorboard": False},
    "checkpoint": {"every": 0},
}
TEACHER = {"teachers": {"default": "teacher"}, "clip": 2.0, "center": True}
WAYS: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "teacher": TEACHER,
    "both": TEACHER | {"reward_weight": 1.0},
}
"""Name of a run -> its section `distillation`."""


def make_teacher(folder: Path, seed: int) -> Run:
    """A run that only reads demonstrations."""
    tree = COMMON | {
        "model": {"name": "tiny", "tiny": {"hidden_size": 96, "num_layers": 2}},
        "cold_start": {"episodes": 2048, "batch_episodes": 16},
        "trainer": {"steps": 0},
        "evaluation": {"tasks": 128, "samples": 0},
        "run": {"dir": str(folder), "seed": seed},
    }
    return train(build_config(tree))


def make_student(folder: Path, teacher: Run, seed: int) -> None:
    """A folder with a fresh Qwen3 and the teacher's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(teacher.checkpoint)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_student(
    folder: Path, student: Path, teacher: Run, way: str, steps: int, seed: int
) -> Run:
    tree = COMMON | {
        "model": {"name": str(student), "device": "cpu"},
        "cold_start": {
            "episodes": 2048,
            "batch_episodes": 16,
            "learning_rate": 2e-3,
            "random_action_rate": 0.7,
        },
        "trainer": {
            "steps": steps,
            "groups_per_step": 16,
            "group_size": 8,
            "learning_rate": 2e-4,
        },
        "evaluation": {"tasks": 128, "samples": 0, "every": 10},
        "remote_models": {"teacher": {"api": "engine", "model": str(teacher.checkpoint)}},
        "distillation": WAYS[way],
        "run": {"dir": str(folder), "seed": seed},
    }
    return train(build_config(tree))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        for seed in arguments.seeds:
            folder = Path(name) / str(seed)
            teacher = make_teacher(folder / "taught", seed)
            make_student(folder / "student", teacher, seed)
            print(f"seed {seed}: the teacher's success {teacher.summary['eval']['after']:.3f}")
            for way in WAYS:
                run = train_student(
                    folder / way, folder / "student", teacher, way, arguments.steps, seed
                )
                curve = [
                    f"{row['step']}: {row[SUCCESS]:.3f}"
                    for row in read_metrics(run.dir / "metrics.jsonl")
                    if SUCCESS in row
                ]
                print(f"seed {seed}: {way}: {', '.join(curve)}")


if __name__ == "__main__":
    main()
