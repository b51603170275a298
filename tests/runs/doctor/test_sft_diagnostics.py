"""The doctor on recipes for `agentevo sft`: it tells of rows that are left out and of memory that
is short, and leaves nothing behind."""

from __future__ import annotations

import json

import psutil
import pytest
from byte_policy import byte_policy

from agentevo.cli.main import main
from agentevo.config import RunConfig, build_config
from agentevo.errors import ConfigError
from agentevo.runs.doctor.diagnostics import check_sft_recipe


def rows(count: int, length: int) -> str:
    talk = [
        {"role": "user", "content": "Say it."},
        {"role": "assistant", "content": "it " * length},
    ]
    return "".join(json.dumps({"messages": talk}) + "\n" for _ in range(count))


def recipe(folder, text: str, *overrides: str) -> RunConfig:
    (folder / "rows.jsonl").write_text(text)
    model = byte_policy(hidden_size=64, num_layers=2, num_heads=2, context_length=4096)
    return build_config(
        {"model": model, "data": {"train": str(folder / "rows.jsonl"), "eval_share": 0}},
        overrides,
        needs_environment=False,
    )


def test_a_sound_recipe(tmp_path):
    found = check_sft_recipe(recipe(tmp_path, rows(8, 20)))
    assert [(check.name, check.status) for check in found] == [
        ("rows", "good"),
        ("lengths", "good"),
        ("memory", "good"),
    ]
    assert "8 of 8 conversations" in found[0].finding
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"], (
        "the doctor leaves nothing behind"
    )


def test_rows_that_are_left_out_are_told(tmp_path):
    (check, *_) = check_sft_recipe(recipe(tmp_path, rows(3, 20) + "no json\n"))
    assert check.status == "warning" and "3 of 4" in check.finding
    with pytest.raises(ConfigError, match="no usable row"):
        check_sft_recipe(recipe(tmp_path, "no json\n"))


@pytest.mark.slow
def test_too_little_memory_names_the_key_that_helps(tmp_path, monkeypatch):
    """What is free is set between what the recipe takes and what it takes with shorter
    micro-batches."""
    different = "".join(rows(1, 200 + place) for place in range(64))

    def asked(free: float):
        monkeypatch.setattr(
            psutil,
            "virtual_memory",
            lambda: type("Memory", (), {"available": free, "total": free})(),
        )
        return check_sft_recipe(
            recipe(tmp_path, different, "sft.prefix_merging=false", "sft.batch_conversations=64")
        )[-1]

    needed = float(asked(1e12).finding.split("about ")[1].split(" GiB")[0]) * 2**30
    short = asked(0.9 * needed)
    assert short.status == "wrong"
    assert short.advice.startswith("set sft.micro_batch_tokens=")


@pytest.mark.slow
def test_the_command_line_takes_recipes_of_both_kinds(tmp_path, capsys):
    main(["doctor", "frozen_lake_sft", "data.demonstrations=4", "model.tiny.hidden_size=32"])
    assert "good     rows: 4 of 4 conversations" in capsys.readouterr().out
