"""The reward `reward_model`: what transformers' own pass says, for ours and for others' models."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
)

from agentevo.errors import ConfigError, ModelError
from agentevo.models.files.save import save_model
from agentevo.rewards import make_reward
from agentevo.rewards.reward import reward_config
from agentevo.training.reward_model import classifier_of, keep_scale
from agentevo.types import Message, Task, Trajectory, Turn

TASK = Task(id="t", query="?")
REPLIES = ["left", "Up Down Up", "the left coin wins", "red red red red red"]


def attempt(*replies, number=0):
    turns = [
        Turn(
            index=index,
            parent=index - 1 if index else None,
            prompt_ids=[1],
            completion_ids=[2],
            logprobs=[-1.0],
            versions=[0],
            finish_reason="stop",
            messages=[Message("user", "Take the coin"), Message("assistant", reply)],
        )
        for index, reply in enumerate(replies)
    ]
    return Trajectory(id=f"a{number}", task_id="t", group_id="g", turns=turns)


def scorer(folder, **options):
    return make_reward(
        reward_config("reward_model")(name="reward_model", model=str(folder), **options)
    )


def scored(one, *attempts):
    async def work():
        return await asyncio.gather(*(one.score(trajectory, TASK) for trajectory in attempts))

    return [score.value for score in asyncio.run(work())]


@pytest.fixture
def ours(tiny_policy, tmp_path):
    """A folder as `agentevo sft --reward-model` saves it, and what transformers says of a
    conversation."""
    loaded = tiny_policy()
    model = classifier_of(loaded.model, loaded.tokenizer, 3).eval()
    keep_scale(model, {"rm/eval/reward_mean": 0.5, "rm/eval/reward_std": 2.0})
    folder = save_model(model, loaded.tokenizer, tmp_path / "model")
    read = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    def value(*replies):
        messages = [
            message
            for reply in replies
            for message in (
                {"role": "user", "content": "Take the coin"},
                {"role": "assistant", "content": reply},
            )
        ]
        text = loaded.tokenizer.apply_chat_template(messages, tokenize=False)
        ids = loaded.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.inference_mode():
            return read(input_ids=ids).logits.item()

    return folder, value


@pytest.mark.slow
def test_it_is_what_transformers_says_of_the_whole_conversation(ours):
    folder, value = ours
    attempts = [attempt(reply, number=i) for i, reply in enumerate(REPLIES)]
    attempts.append(attempt("left", "Up Up", number=9))
    wanted = [value(reply) for reply in REPLIES] + [value("left", "Up Up")]
    assert len({round(one, 4) for one in wanted}) == 5

    for batch in (1, 3, 16):
        found = scored(scorer(folder, normalise="none", batch=batch), *attempts)
        assert found == pytest.approx(wanted, abs=1e-5)

    (normal,) = scored(scorer(folder), attempts[0])
    assert normal == pytest.approx((wanted[0] - 0.5) / 2.0, abs=1e-5)

    (squashed,) = scored(scorer(folder, normalise="sigmoid"), attempts[0])
    assert squashed == pytest.approx(torch.tensor(wanted[0]).sigmoid().item(), abs=1e-5)


@pytest.mark.slow
def test_what_an_attempt_gets_does_not_depend_on_those_beside_it(ours):
    attempts = [attempt("Up Up " * (7 * i % 31), number=i) for i in range(16)]
    alone = [scored(scorer(ours[0]), one)[0] for one in attempts]
    assert scored(scorer(ours[0]), *attempts) == alone, "to the last bit"


def test_attempts_that_wait_together_are_judged_together(ours, monkeypatch):
    sizes = []
    one = scorer(ours[0], batch=4)
    compute = one._classifier.values
    monkeypatch.setattr(
        one._classifier, "values", lambda them: sizes.append(len(them)) or compute(them)
    )
    scored(one, *(attempt(REPLIES[i % 4], number=i) for i in range(9)))
    assert sum(sizes) == 9 and len(sizes) <= 4 and max(sizes) <= 4


@pytest.mark.slow
def test_what_is_wrong_with_one_attempt_is_its_own(ours):
    one = scorer(ours[0])
    good = attempt("left")

    async def work():
        late = asyncio.create_task(one.score(good, TASK))
        given_up = asyncio.create_task(one.score(good, TASK))
        results = await asyncio.gather(
            one.score(attempt(), TASK), one.score(good, TASK), return_exceptions=True
        )
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        return results, await late

    (nothing, found), late = asyncio.run(work())
    assert isinstance(nothing, ValueError) and "no reply to judge" in str(nothing)
    assert found.value == late.value
    assert not one._waiting


@pytest.mark.slow
def test_a_template_that_refuses_fails_that_attempt_alone(ours):
    folder, _ = ours
    template = (folder / "chat_template.jinja").read_text()
    check = "{% if messages[-1]['content'] == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(check + template)
    one = scorer(folder)

    async def work():
        return await asyncio.gather(
            *(one.score(attempt(text, number=i), TASK) for i, text in enumerate(("bad", "left"))),
            return_exceptions=True,
        )

    bad, good = asyncio.run(work())
    assert isinstance(bad, ModelError) and "does not take this conversation" in str(bad)
    assert isinstance(good.value, float)


def bert(folder, labels):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "take", "the", "coin", "left", "right"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=32)
    torch.manual_seed(0)

    shape = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=labels,
    )
    model = BertForSequenceClassification(shape).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    return model, tokenizer


def test_other_peoples_classifiers_judge_too(tmp_path):
    """BERT reads a pair of texts, by a tokenizer without a chat template."""
    model, tokenizer = bert(tmp_path / "bert", 1)
    with torch.inference_mode():
        wanted = model(**tokenizer("Take the coin", "left", return_tensors="pt")).logits.item()
    assert scored(scorer(tmp_path / "bert"), attempt("left")) == pytest.approx([wanted], abs=1e-5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_DYNAMIC", "true")
        with pytest.raises(ModelError, match="results on a CPU are wrong under OMP_DYNAMIC=true"):
            scored(scorer(tmp_path / "bert"), attempt("left"))

    long = attempt("left " * 100)
    assert len(scored(scorer(tmp_path / "bert"), long, attempt("left", number=1))) == 2


def test_of_several_outputs_one_is_chosen(tmp_path):
    model, tokenizer = bert(tmp_path / "bert", 3)
    with torch.inference_mode():
        logits = model(**tokenizer("Take the coin", "left", return_tensors="pt")).logits

    found = scored(scorer(tmp_path / "bert", output=2), attempt("left"))
    assert found == pytest.approx([logits.softmax(-1)[0, 2].item()], abs=1e-5)
    for output in (None, 3):
        with pytest.raises(ModelError, match="has 3 outputs: choose one with output=0 to 2"):
            scored(scorer(tmp_path / "bert", output=output), attempt("left"))


def test_what_is_no_classifier_is_refused_when_the_recipe_is_read(tiny_policy, tmp_path):
    loaded = tiny_policy()
    save_model(loaded.model, loaded.tokenizer, tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"has LlamaForCausalLM, not a sequence classifier"):
        scorer(tmp_path / "policy")
    with pytest.raises(ConfigError, match="does not exist"):
        scorer(tmp_path / "nowhere")

    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        scorer(tmp_path / "empty")

    scorer("somebody/their-model"), "a hub is not asked before it is needed"


def test_a_head_that_was_never_trained_is_no_reward(ours):
    folder, _ = ours
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: value for name, value in weights.items() if "score" not in name},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ModelError, match=r"lacks score\.weight: it is not a trained sequence"):
        scored(scorer(folder), attempt("left"))

    (folder / "config.json").write_text(
        json.dumps({"architectures": ["XForSequenceClassification"]})
    )
    with pytest.raises(ModelError, match="can't be read as a sequence classifier"):
        scored(scorer(folder), attempt("left"))
