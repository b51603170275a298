"""Whole runs with adapters: small checkpoints, resumed bit for bit, evaluated, continued, merged;
early refusals."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentevo.api.run import Run, evaluate_model, train
from agentevo.cli.main import main
from agentevo.config import build_config, to_tree
from agentevo.errors import AgentEvoError, CheckpointError
from agentevo.runs.doctor.diagnostics import check_recipe
from agentevo.runs.orchestration.evaluation import headline

pytestmark = pytest.mark.slow

LORA = ("cold_start.episodes=0", "model.lora.rank=4", "trainer.learning_rate=0.01")


@pytest.fixture(scope="module")
def base(tmp_path_factory, small_config, quiet_view):
    """A policy that knows the format, as a folder."""
    config = small_config(
        tmp_path_factory.mktemp("base") / "run", "trainer.steps=0", "trainer.minibatches=1"
    )
    return train(config, view=quiet_view()).checkpoint


@pytest.fixture(scope="module")
def lora_config(base, small_config):
    """`lora_config(folder, "a.b=c", ...)`: the small run with adapters over `base`."""

    def make(folder, *overrides):
        tree = to_tree(small_config(folder)) | {"model": {"name": str(base)}}
        return build_config(tree, [f"run.dir={folder}", *LORA, *overrides])

    return make


@pytest.fixture(scope="module")
def whole(tmp_path_factory, lora_config, quiet_view):
    """The run that nobody interrupts."""
    return train(lora_config(tmp_path_factory.mktemp("whole") / "run"), view=quiet_view())


def test_checkpoints_hold_the_adapter_only_and_it_has_learnt(whole, base):
    folder = whole.checkpoint_path("last")
    assert not (folder / "model.safetensors").exists()
    assert json.loads((folder / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(base)

    weights = load_file(folder / "adapter_model.safetensors")
    assert all("lora_" in name for name in weights)
    assert any(bool(w.any()) for name, w in weights.items() if "lora_B" in name), "B started at 0"
    assert (folder / "tokenizer_config.json").is_file()

    state = torch.load(folder / "trainer.pt", weights_only=True)
    copied = state["roles"]["reference"]
    assert copied and all("lora_" in name for name in copied)


def test_a_resumed_run_is_the_same_to_the_last_bit(
    whole, tmp_path, lora_config, quiet_view, outcome_of, assert_same
):
    with pytest.raises(KeyboardInterrupt):
        train(lora_config(tmp_path / "run"), view=quiet_view(step=3))
    train(lora_config(tmp_path / "run"), resume=True, view=quiet_view())
    assert_same(outcome_of(tmp_path / "run"), outcome_of(whole.dir))


def test_evaluations_of_checkpoints(whole, base, lora_config, tmp_path, quiet_view):
    found = whole.eval(checkpoint="last", view=quiet_view())
    assert headline(found) == whole.summary["eval"]["after"]

    config = lora_config(tmp_path / "none")
    last = whole.checkpoint_path("last")
    again = evaluate_model(config, checkpoint=last, view=quiet_view())
    greedy = [key for key in found if "greedy" in key]
    assert [again[key] for key in greedy] == [found[key] for key in greedy]

    more = lora_config(tmp_path / "none", "evaluation.tasks=12")
    after = evaluate_model(more, checkpoint=last, view=quiet_view())
    before = evaluate_model(more, view=quiet_view())
    assert after != before, "the adapter is there"

    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        whole.eval(checkpoint=str(tmp_path))


def test_a_run_goes_on_from_a_saved_adapter(whole, lora_config, tmp_path, quiet_view):
    last = whole.checkpoint_path("last")
    config = lora_config(
        tmp_path / "run", "model.lora.rank=0", f"model.lora.adapter={last}", "trainer.steps=1"
    )
    run = train(config, view=quiet_view())
    assert run.summary["eval"]["before"] == whole.summary["eval"]["after"]

    now, then = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (run.checkpoint_path("last"), last)
    )
    assert now.keys() == then.keys()
    assert any(not torch.equal(now[name], then[name]) for name in now)

    reference = torch.load(run.checkpoint_path("last") / "trainer.pt", weights_only=True)["roles"][
        "reference"
    ]
    start = {name: tensor for name, tensor in reference.items() if "lora_B" in name}
    assert any(bool(tensor.any()) for tensor in start.values()), (
        "kept near to where this run started, which is not the base"
    )


def test_the_doctor_looks_at_adapters_too(whole, small_config, tmp_path):
    found = {one.name: one for one in check_recipe(whole.config, whole.checkpoint_path("last"))}
    assert found["log-probs"].status == "good"
    assert all(
        one.status != "wrong" for name, one in found.items() if name not in ("rewards", "format")
    ), found


@pytest.mark.parametrize("of", ["checkpoint", "run"])
def test_the_merge_command(of, whole, base, tmp_path, capsys):
    last = whole.checkpoint_path("last")
    source = last if of == "checkpoint" else whole.dir
    assert main(["models", str(source), "--merge", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    chosen = last if of == "checkpoint" else whole.checkpoint
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), chosen)
    ids = torch.tensor([[5, 9, 20, 31]])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)

    assert main(["models", str(base), "--merge", str(tmp_path / "other")]) == 2
    assert "holds no adapter" in capsys.readouterr().err

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["models", str(last), "--merge", str(tmp_path / "full")]) == 2
    assert (tmp_path / "full" / "file").exists()


def test_dropout_is_for_the_cold_start_alone(lora_config, tmp_path, quiet_view):
    """With a quarter of the inputs dropped the cold start ends elsewhere; RL's log-probs are still
    the engine's."""
    found = {}
    for dropout in (0.0, 0.25):
        config = lora_config(
            tmp_path / f"{dropout}",
            "cold_start.episodes=24",
            f"model.lora.dropout={dropout}",
            "trainer.steps=1",
        )
        run = train(config, view=quiet_view())
        rows = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
        assert (
            next(row["actor/logprob_diff_max"] for row in rows if "actor/logprob_diff_max" in row)
            < 1e-4
        )

        found[dropout] = next(
            row["cold_start/loss_last"] for row in rows if "cold_start/loss_last" in row
        )

    assert found[0.0] != found[0.25]


def test_refusals_come_before_anything_is_created(base, lora_config, tmp_path, quiet_view):
    with pytest.raises(AgentEvoError, match="holds no adapter"):
        train(
            lora_config(tmp_path / "run", f"model.lora.adapter={base}", "model.lora.rank=0"),
            view=quiet_view(),
        )
    assert not (tmp_path / "run").exists()


def test_a_quantized_base_trains_and_is_resumed(tmp_path, lora_config, small_config, quiet_view):
    wide = small_config(
        tmp_path / "base", "trainer.steps=0", "trainer.minibatches=1", "model.tiny.hidden_size=64"
    )
    overrides = (  # 64, because bitsandbytes quantizes so many weights together
        f"model.name={train(wide, view=quiet_view()).checkpoint}",
        "model.lora.quantize=4bit",
        "trainer.steps=1",
        "trainer.epochs=1",
    )
    run = train(lora_config(tmp_path / "run", *overrides), view=quiet_view())
    row = next(
        row
        for row in map(json.loads, (run.dir / "metrics.jsonl").read_text().splitlines())
        if "actor/logprob_diff_max" in row
    )
    assert row["actor/logprob_diff_max"] < 1e-3 and row["actor/grad_norm"] > 0

    weights = load_file(run.checkpoint_path("last") / "adapter_model.safetensors")
    assert any(bool(w.any()) for name, w in weights.items() if "lora_B" in name)

    train(
        lora_config(tmp_path / "run", *overrides, "trainer.steps=2"), resume=True, view=quiet_view()
    )
    assert "2" in run.checkpoint_path("last").name


def test_a_run_object_finds_its_adapter(whole):
    assert (Run(whole.config).checkpoint / "adapter_config.json").is_file()
