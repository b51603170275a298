"""`agentevo sft --reward-model`: what it refuses, what it leaves behind, and one small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

RECIPE = """
model: {name: tiny, tiny: {hidden_size: 16, num_layers: 1, num_heads: 1}}
rm: {pairs: pairs.jsonl, epochs: 6, learning_rate: 0.01, batch_pairs: 8, eval_share: 0.25}
"""


@pytest.fixture
def pairs():
    """A recipe and comparisons in the current folder: who says yes is better."""
    words = ("lamp", "coin", "tree", "door")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"say {word}"}],
            "chosen": f"yes {word}",
            "rejected": f"no {other}",
        }
        for word in words
        for other in words
        if other != word
    ]
    path = Path("pairs.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    Path("rewards.yaml").write_text(RECIPE)

    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rm.pairs=null"], "rm.pairs: there is no training data: give a JSONL file"),
        (["rm.pairs=nowhere.jsonl"], "rm.pairs: nowhere.jsonl"),
        (["rm.eval=nowhere.jsonl"], "rm.eval: nowhere.jsonl"),
        (["rm.eval_share=0"], "holds out 0"),
        (["rm.margin=-1"], "rm.margin"),
        (["rm.epoch=3"], "rm.epoch"),
    ],
)
def test_bad_words_create_nothing(words, message, pairs, agentevo):
    before = sorted(Path().rglob("*"))
    code, _, err = agentevo("sft", "rewards.yaml", "--reward-model", *words)
    assert code == 2 and message in err and "Traceback" not in err
    assert sorted(Path().rglob("*")) == before


def test_adapters_are_refused(pairs, agentevo):
    Path("rewards.yaml").write_text(
        "model: {name: a/b, lora: {rank: 4}}\nrm: {pairs: pairs.jsonl}\n"
    )
    code, _, err = agentevo("sft", "rewards.yaml", "--reward-model")
    assert code == 2 and "model.lora: a reward model does not support adapters" in err


def test_a_torn_line_is_named_before_anything_is_created(pairs, agentevo):
    pairs.write_text(pairs.read_text() + '{"prompt": [')
    code, _, err = agentevo("sft", "rewards.yaml", "--reward-model")
    assert code == 2 and "pairs.jsonl:37: is not JSON" in err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_run_makes_a_model_and_is_not_written_over(pairs, agentevo):
    code, out, _ = agentevo("sft", "rewards.yaml", "--reward-model", "--dry-run")
    assert code == 0 and yaml.safe_load(out)["rm"]["epochs"] == 6 and not Path("runs").exists()

    code, out, err = agentevo("sft", "rewards.yaml", "--reward-model")
    assert code == 0, err
    assert "runs/rewards/model: held-out accuracy" in out

    folder = Path("runs/rewards")
    result = json.loads((folder / "reward_model.json").read_text())
    assert (result["pairs"], result["held_out_pairs"]) == (27, 9)
    assert result["rm/eval/accuracy"] > 0.75

    shape = json.loads((folder / "model" / "config.json").read_text())
    assert shape["architectures"] == ["LlamaForSequenceClassification"]
    assert shape["reward_std"] == pytest.approx(result["rm/eval/reward_std"])

    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rm/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 25))
    assert steps[-1]["rm/loss"] < steps[0]["rm/loss"]

    held_out = [(row["step"], row["rm/eval/accuracy"]) for row in rows if "rm/eval/accuracy" in row]
    assert held_out[0][0] == 0
    assert held_out[-1] == (24, result["rm/eval/accuracy"])

    code, _, err = agentevo("sft", "rewards.yaml", "--reward-model")
    assert code == 2 and "holds a run already" in err

    code, _, err = agentevo("train", "coins", "run.dir=runs/rewards", "--resume")
    assert code == 2 and "Traceback" not in err


@pytest.mark.slow
def test_a_run_that_fails_leaves_nothing(pairs, agentevo, monkeypatch):
    from agentevo.errors import TrainingError
    from agentevo.training.reward_model import RewardTrainer

    def fails(self, pairs):
        raise TrainingError("the loss is not finite")

    monkeypatch.setattr(RewardTrainer, "step", fails)
    code, _, err = agentevo("sft", "rewards.yaml", "--reward-model")
    assert code == 1 and "the loss is not finite" in err
    assert not Path("runs").exists()
