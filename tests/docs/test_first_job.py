"""docs/first_job.md as a newcomer follows it: the page's own commands for a laptop, with a tiny
Qwen3 of random weights."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chat_templates import QWEN3, tokenizer_with
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentevo.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "first_job.md"


def read_commands(heading: str) -> list[list[str]]:
    """The words after `agentevo` of each such command in a section of the page."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("agentevo ")]
    return [shlex.split(line)[1:] for line in lines]


def save_tiny_qwen3(folder: Path) -> None:
    tokenizer = tokenizer_with(QWEN3)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


pytestmark = pytest.mark.usefixtures("folder")


def test_a_copied_recipe_is_one_whose_dry_run_passes_and_names_the_lines_to_change(capsys):
    (words,) = read_commands("1. The files")
    folder = words[-1]
    assert main(words) == 0
    said = capsys.readouterr().out
    names = {path.name for path in Path(folder).iterdir()}
    assert names == {"first_job.yaml", "my_reward.py", "train.jsonl", "held_out.jsonl"}
    for line in Path(folder, "first_job.yaml").read_text().splitlines():
        assert ("# yours" in line) == (line.strip() in said and bool(line.strip())), line

    (laptop, *_) = read_commands("2. On a laptop")
    assert main([*laptop, "model.name=tiny", "model.lora.rank=0", "--dry-run"]) == 0
    assert main(words) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_copy_of_any_packaged_recipe(capsys):
    assert main(["config", "frozen_lake", "--copy", "lake"]) == 0
    assert [path.name for path in Path("lake").iterdir()] == ["frozen_lake.yaml"]
    assert main(["train", "lake/frozen_lake.yaml", "--dry-run"]) == 0
    assert main(["config", "lake", "--copy", "other"]) == 2
    assert not Path("other").exists()
    assert "is for a recipe" in capsys.readouterr().err


@pytest.mark.slow
def test_a_newcomer_runs_the_page_on_a_laptop():
    save_tiny_qwen3(Path("tiny-qwen3"))
    commands = read_commands("1. The files") + read_commands("2. On a laptop")
    assert [words[0] for words in commands] == ["config", "train", "trajectories", "audit", "chat"]
    for words in commands:
        done = subprocess.run(
            [sys.executable, "-m", "agentevo", *words],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        assert "kernels" not in done.stderr, "a library's warning that concerns nobody here"

    assert list(Path("runs/laptop/checkpoints").glob("*/adapter_config.json"))
