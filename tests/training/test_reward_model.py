"""Reward models: the loss, the classifier that begins as the policy, and what a pair is to it."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from agentevo.algorithms.preference import bradley_terry
from agentevo.config import build_config
from agentevo.config.sft import RMSection
from agentevo.errors import ConfigError, ModelError, TrainingError
from agentevo.models.files.save import save_model
from agentevo.rewards.reward_model import conversation_ids, outputs
from agentevo.runs.orchestration.reward_model import split_pairs
from agentevo.training.pair_file import read_pair_file
from agentevo.training.reward_model import (
    RewardPair,
    RewardTrainer,
    classifier_of,
    encode_pairs,
    held_out,
    keep_scale,
    rewards_of,
)
from agentevo.types import Message

PAIRS = [
    RewardPair([5, 6, 7, 8], [5, 6, 9], 0.0),
    RewardPair([5, 9, 7], [5, 9, 6, 6, 6, 6], 0.5),
    RewardPair([8, 6], [8, 7], 2.0),
]


@pytest.fixture
def classifier(tiny_policy):
    loaded = tiny_policy()
    loaded.model.set_attn_implementation("sdpa")  # as it is before it is prepared to be a policy
    return classifier_of(loaded.model, loaded.tokenizer, 3)


def test_the_loss_is_the_papers():
    better = torch.tensor([1.0, -2.0])
    worse = torch.tensor([0.5, 3.0])
    margin = torch.tensor([0.0, 1.0])
    losses, measured = bradley_terry(chosen=better, rejected=worse, margin=margin, center=0.1)
    wanted = [
        -math.log(1 / (1 + math.exp(-(1.0 - 0.5)))) + 0.1 * 1.5**2,
        -math.log(1 / (1 + math.exp(-(-2.0 - 3.0 - 1.0)))) + 0.1 * 1.0**2,
    ]
    assert losses.tolist() == pytest.approx(wanted, rel=1e-5)
    assert measured["accuracy"].tolist() == [1, 0]

    far = torch.tensor([1e4, -1e4])
    losses, _ = bradley_terry(chosen=far, rejected=-far, margin=torch.zeros(2))
    assert losses.tolist() == pytest.approx([0.0, 2e4]), "nothing overflows"


def test_its_trunk_is_the_policys(tiny_policy):
    loaded = tiny_policy()
    one, same, other = (classifier_of(loaded.model, loaded.tokenizer, seed) for seed in (3, 3, 4))
    wanted = loaded.model.base_model.state_dict()
    found = one.base_model.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert torch.equal(one.score.weight, same.score.weight), "the head is drawn by the seed"
    assert not torch.equal(one.score.weight, other.score.weight)
    assert one.config.num_labels == 1


def test_a_pair_has_the_same_rewards_in_any_company(classifier):
    """Padding stands on the right and counts for nothing."""
    together = rewards_of(classifier, PAIRS)
    for index, pair in enumerate(PAIRS):
        alone = rewards_of(classifier, [pair])
        assert together[0][index].item() == pytest.approx(alone[0].item(), abs=1e-5)
        assert together[1][index].item() == pytest.approx(alone[1].item(), abs=1e-5)


@pytest.mark.slow
def test_micro_batches_change_nothing(classifier):
    results = []
    for size in (1, 2, 8):
        model = copy.deepcopy(classifier)
        section = RMSection(micro_batch_pairs=size, learning_rate=1e-3, center=0.01)
        metrics = RewardTrainer(model, section, 4).step(PAIRS)
        results.append((metrics, dict(model.named_parameters())))

    for metrics, weights in results[1:]:
        assert metrics == pytest.approx(results[0][0], abs=1e-5)
        for name, parameter in weights.items():
            assert torch.allclose(parameter, results[0][1][name], atol=2e-5), name


@pytest.mark.slow
def test_it_learns_and_says_how_its_rewards_lie(classifier):
    section = RMSection(learning_rate=3e-3, schedule="constant")
    trainer = RewardTrainer(classifier, section, 30)
    losses = [trainer.step(PAIRS)["rm/loss"] for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]

    found = held_out(classifier, PAIRS, 2)
    assert found["rm/eval/accuracy"] == 1 and found["rm/eval/reward_margin"] > 0.5
    keep_scale(classifier, found)
    assert classifier.config.reward_std == found["rm/eval/reward_std"] > 0


def test_numbers_that_are_not_finite_change_no_weight(classifier):
    with torch.no_grad():
        classifier.score.weight.fill_(math.inf)
    before = copy.deepcopy(classifier.base_model.state_dict())
    with pytest.raises(TrainingError, match=r"lower rm\.learning_rate"):
        RewardTrainer(classifier, RMSection(), 4).step(PAIRS)
    after = classifier.base_model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_saved_is_what_transformers_reads(classifier, tiny_policy, tmp_path):
    save_model(classifier, tiny_policy().tokenizer, tmp_path / "model")
    read = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    rows = [pair.chosen for pair in PAIRS]
    assert torch.allclose(outputs(read, rows), outputs(classifier.eval(), rows), atol=1e-6)


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line(chosen="left", rejected="right", **more):
    prompt = [{"role": "user", "content": "Take the coin"}]
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def test_a_line_may_have_its_own_margin(tmp_path, tiny_policy):
    path = write(tmp_path / "pairs.jsonl", line(), line(margin=2), line(margin=0))
    lines = read_pair_file(path, "bradley_terry", key="rm.pairs")
    pairs = encode_pairs(lines, tiny_policy().tokenizer, 0.5, 100)
    assert [pair.margin for pair in pairs] == [0.5, 2.0, 0.0]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"margin": -1}, r"pairs\.jsonl:2: margin is -1: give a number of at least 0"),
        ({"margin": "big"}, r"pairs\.jsonl:2: margin is 'big'"),
        ({"margin": True}, r"margin is True"),
        ({"margin": math.inf}, r"margin is inf|is not JSON"),
        ({"rejected": "left"}, "chosen and rejected are the same answer"),
    ],
)
def test_bad_lines_are_named(bad, words, tmp_path):
    path = write(tmp_path / "pairs.jsonl", line(), line(**bad))
    with pytest.raises(ConfigError, match=words):
        read_pair_file(path, "bradley_terry", key="rm.pairs")


def test_margins_are_nothing_to_other_losses(tmp_path):
    path = write(tmp_path / "pairs.jsonl", line(margin="big"))
    assert read_pair_file(path, "dpo")[0].margin is None


def test_pairs_that_read_the_same_are_refused(tmp_path, tiny_policy):
    """Of a long conversation the end counts; answers that differ before it are one."""
    path = write(tmp_path / "pairs.jsonl", line("left Up Up Up Up", "right Up Up Up Up"))
    lines = read_pair_file(path, "bradley_terry")
    tokenizer = tiny_policy().tokenizer
    encode_pairs(lines, tokenizer, 0.0, 100)

    with pytest.raises(ConfigError, match=r"are the same in the last 4 tokens: raise rm\.max_tok"):
        encode_pairs(lines, tokenizer, 0.0, 4)

    messages = [Message("user", "Take the coin"), Message("assistant", "left")]
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ModelError, match="does not take this conversation"):
        conversation_ids(tokenizer, messages, 10)


def test_held_out_pairs_are_drawn_by_the_seed_and_never_trained_on(tmp_path):
    path = write(tmp_path / "p.jsonl", *(line(f"left {i}") for i in range(20)))
    tree = {"rm": {"pairs": str(path), "eval_share": 0.25}}

    def parts(**more):
        config = build_config(tree | more, needs_environment=False)
        return [{one.where for one in part} for part in split_pairs(config)]

    train, held = parts()
    assert (len(train), len(held)) == (15, 5) and not train & held
    assert parts() == [train, held] != parts(run={"seed": 1})

    tree["rm"]["eval_share"] = 0.0
    with pytest.raises(ConfigError, match=r"holds out 0: at least one must be held out.*rm\.eval"):
        parts()
