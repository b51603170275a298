"""A loss and an advantage by functions of the user's."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import PretrainedConfig

import agentevo
from agentevo.algorithms.advantage_inputs import AdvantageTables
from agentevo.algorithms.estimators import bind_advantage
from agentevo.config import AlgorithmSection, TrainerSection, build_config
from agentevo.errors import ConfigError, OverreachError, TrainingError
from agentevo.runs.orchestration.trainers import training_notes
from agentevo.runtime.signals import Interrupt
from agentevo.training import algorithm_functions as module
from agentevo.training.algorithm_functions import bound_advantage, try_out
from agentevo.training.trainer import Trainer


@agentevo.policy_loss("test_clip")
def clip(inputs):
    """PPO's, written by a user."""
    ratio = torch.exp(inputs.log_ratio)
    clipped = ratio.clamp(0.8, 1.2)
    losses = torch.maximum(-inputs.advantages * ratio, -inputs.advantages * clipped)
    return losses, {"test_ratio": ratio}


@agentevo.policy_loss("test_sequence")
def sequence(inputs):
    """A mean over a row's own tokens."""
    share = inputs.mask.sum(1, keepdim=True).clamp(min=1)
    ratio = torch.exp(inputs.log_ratio.sum(1, keepdim=True) / share)
    return (-inputs.advantages * ratio).expand_as(inputs.logp)


@agentevo.advantage("test_group")
def group(inputs):
    """GRPO's without the division."""
    return inputs.members.subtract_mean(inputs.score)


@agentevo.advantage("test_tokens")
def tokens(inputs):
    inputs.rewards.add_(1.0)
    return inputs.rewards


@pytest.fixture
def step(random_model, samples_of, gradient):
    """`step(micro_batch_tokens, **algorithm)` -> the gradient of an update, and its metrics."""
    prompts = [[3, 5, 7] * 4, [4, 6] * 9, [8] * 20]
    texts = [[*prompt, *range(9, 9 + 3 * number)] for number, prompt in enumerate(prompts, 1)]
    batch = samples_of([text for text in texts for _ in range(2)], seed=3, group_size=2)

    def run(micro_batch_tokens: int, **algorithm):
        model = copy.deepcopy(random_model("llama").model)
        trainer = TrainerSection(
            max_grad_norm=1e9, warmup_steps=0, micro_batch_tokens=micro_batch_tokens
        )
        metrics = Trainer(model, trainer, AlgorithmSection(**algorithm)).step(batch)
        return gradient(model), metrics

    return run


def test_a_loss_written_by_a_user_is_the_update_of_ours(step):
    ours, metrics = step(4096, policy_loss="ppo_clip")
    theirs, measured = step(4096, loss_function="test_clip")
    torch.testing.assert_close(theirs, ours)
    assert measured["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"])
    assert measured["actor/test_ratio"] > 0


@pytest.mark.parametrize("name", ["test_clip", "test_sequence"])
def test_micro_batches_do_not_change_its_update(name, step):
    whole, _ = step(4096, loss_function=name)
    parts, _ = step(64, loss_function=name)
    assert float(whole.norm()) > 0
    assert float((whole - parts).norm() / whole.norm()) < 1e-4


TABLES = AdvantageTables(
    token_rewards=torch.tensor([[0.0, 1.0], [0.0, 3.0], [2.0, 9.0]], dtype=torch.float64),
    mask=torch.tensor([[True, True], [True, True], [True, False]]),
    group_ids=["a", "a", "b"],
    trajectory_ids=["0", "1", "2"],
)


def advantages_by(name):
    section = AlgorithmSection(advantage_function=name)
    function = bound_advantage(section)
    return bind_advantage("function", {}, function=function)(TABLES)[0].tolist()


def test_an_advantage_is_a_number_for_each_trajectory_or_for_each_token():
    assert advantages_by("test_group") == [[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]]
    before = TABLES.token_rewards.clone()
    assert advantages_by("test_tokens") == [[1.0, 2.0], [1.0, 4.0], [3.0, 0.0]]
    assert torch.equal(TABLES.token_rewards, before), "it got a copy"


def test_functions_that_can_be_trained_with_pass_the_trial():
    for keys in (
        {"loss_function": "test_clip"},
        {"loss_function": "test_sequence"},
        {"advantage_function": "test_group"},
        {"advantage_function": "test_tokens"},
        {},
    ):
        try_out(AlgorithmSection(**keys))


def raises(inputs):
    raise KeyError("colour")


def interrupts(inputs):
    raise KeyboardInterrupt


def spoils(inputs):
    inputs.mask.fill_(True)
    inputs.old_logp.zero_()
    return -inputs.advantages * inputs.logp


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (raises, r"raises: KeyError: 'colour'.*in a trial before the run"),
        (lambda inputs: 1.0, "the token losses are float: return a tensor of floats"),
        (lambda inputs: inputs.logp.sum(), r"have the shape \[\] in place of \[4, 6\]"),
        (lambda inputs: inputs.logp.sum(1), r"have the shape \[4\] in place of"),
        (lambda inputs: inputs.mask, "the token losses are torch.bool"),
        (lambda inputs: inputs.advantages, r"does not depend on inputs\.logp"),
        (lambda inputs: inputs.logp.detach(), r"does not depend on inputs\.logp"),
        (lambda inputs: inputs.logp / 0, "a loss of a trained token is not finite"),
        (
            lambda inputs: (inputs.logp - inputs.logp.detach()).sqrt(),
            "a gradient of a trained token is not finite",
        ),
        (lambda inputs: inputs.logp - inputs.logp.mean(), "a row alone has another loss"),
        (lambda inputs: inputs.logp / inputs.mask.sum(), "a row alone has another loss"),
        (lambda inputs: inputs.logp / inputs.logp.shape[1], "a row with padding has another loss"),
        (lambda inputs: inputs.logp.flip(0), "a row alone has another loss"),
        (lambda inputs: (inputs.logp, {"entropy": inputs.logp}), "already has a metric 'entropy'"),
        (lambda inputs: (inputs.logp, {"mine": inputs.logp[0]}), r"'mine' have the shape \[6\]"),
        (lambda inputs: (inputs.logp, [1]), "the metrics are list"),
        (lambda inputs: exit(3), "a loss function can't end the process"),
        (interrupts, "a loss function can't end the process"),
        (lambda inputs: -inputs.advantage * inputs.logp, "inputs has logp, .*advantages, "),
    ],
)
def test_a_loss_that_can_not_be_trained_with_is_refused_before_the_run(loss, words, monkeypatch):
    monkeypatch.setitem(module.POLICY_LOSSES.registry._items, "bad", loss)
    with pytest.raises(ConfigError, match=rf"(?s)algorithm\.loss_function: .*{words}"):
        try_out(AlgorithmSection(loss_function="bad"))


@pytest.mark.parametrize(
    ("advantage", "words"),
    [
        (raises, "raises: KeyError: 'colour'"),
        (lambda inputs: [1.0, 2.0, 3.0], "the advantages are list"),
        (lambda inputs: inputs.row_length, r"have the shape \[4\] in place of \[3\] or \[4, 6\]"),
        (lambda inputs: inputs.score / 0, "an advantage is not finite"),
        (lambda inputs: inputs.trajectory[:3], r"the advantages are torch\.int64"),
        (lambda inputs: exit(3), "an advantage function can't end the process"),
        (lambda inputs: inputs.scores, "inputs has .*score"),
    ],
)
def test_an_advantage_that_can_not_be_trained_with_is_refused_before_the_run(
    advantage, words, monkeypatch
):
    monkeypatch.setitem(module.ADVANTAGES.registry._items, "bad", advantage)
    with pytest.raises(ConfigError, match=rf"(?s)algorithm\.advantage_function: .*{words}"):
        try_out(AlgorithmSection(advantage_function="bad"))


def test_one_that_hangs_is_left_behind(monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(module, "LONGEST_TRIAL_S", 0.2)
    monkeypatch.setattr(module, "LONGEST_S", 0.2)
    for functions, key in (
        (module.POLICY_LOSSES, "loss_function"),
        (module.ADVANTAGES, "advantage_function"),
    ):
        monkeypatch.setitem(functions.registry._items, "hangs", lambda inputs: go.wait())
        with pytest.raises(ConfigError, match=r"did not return within 0\.2 s"):
            try_out(AlgorithmSection(**{key: "hangs"}))

    with pytest.raises(TrainingError, match=r"did not return within 0\.2 s"):
        advantages_by("hangs")
    go.set()


def test_a_loss_that_interrupts_in_a_step_is_an_error_of_the_step():
    with pytest.raises(OverreachError, match="a loss function can't end the process"):
        module._call_loss(interrupts, None)

    def ctrl_c(inputs):
        raise Interrupt

    with pytest.raises(Interrupt):
        module._call_loss(ctrl_c, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e30])
def test_an_advantage_may_have_any_dtype_of_floats(dtype, size, monkeypatch):
    if size <= torch.finfo(dtype).max:
        values = lambda inputs: torch.full_like(inputs.score, size, dtype=dtype)  # noqa: E731
        monkeypatch.setitem(module.ADVANTAGES.registry._items, "sized", values)
        try_out(AlgorithmSection(advantage_function="sized"))


def test_what_a_loss_does_to_its_inputs_is_seen_nowhere(step, monkeypatch):
    monkeypatch.setitem(module.POLICY_LOSSES.registry._items, "spoils", spoils)
    keys = {"old_logprobs": "recomputed", "importance": "token_tis"}
    _, metrics = step(4096, loss_function="spoils", **keys)
    _, expected = step(4096, policy_loss="reinforce", **keys)
    for name in ("actor/ppo_kl", "actor/rollout_is_mean"):
        assert metrics[name] == pytest.approx(expected[name])


def test_a_loss_that_raises_in_a_step_ends_it_with_its_traceback(step, monkeypatch, capsys):
    monkeypatch.setitem(module.POLICY_LOSSES.registry._items, "raises", raises)
    with pytest.raises(TrainingError, match=r"raises: KeyError: 'colour'.*were not changed"):
        step(4096, loss_function="raises")
    assert "in raises" in capsys.readouterr().err


def test_what_does_not_fit_together_is_refused():
    for algorithm, words in (
        ({"loss_function": "test_clip", "policy_loss": "gspo"}, "leave one of them out"),
        ({"loss_function": "test_clip", "clip_high": 0.3}, "clip_high belongs to"),
        ({"advantage_function": "test_group", "advantage": "rloo"}, "leave one of them out"),
        (
            {"advantage_function": "test_group", "credit": "any"},
            "leave out credit or advantage_function",
        ),
        ({"policy_loss": "function"}, "name it with algorithm.loss_function"),
        ({"advantage": "function"}, "name it with algorithm.advantage_function"),
        ({"name": "dpo", "loss_function": "test_clip"}, "does not use loss_function"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_config({"environment": {"type": "coins"}, "algorithm": algorithm})

    section = AlgorithmSection(loss_function="test_clip", advantage_function="test_group")
    assert section.credit_rule == "function by test_group"
    assert section.resolve().policy_loss == "function"


def test_an_unknown_function_and_one_without_a_name_are_refused_with_what_to_do():
    with pytest.raises(ConfigError) as unknown:
        agentevo.train("coins", algorithm={"loss_function": "nobody-has"})
    assert "`@agentevo.policy_loss('nobody-has')` above a function `def loss(inputs)`" in str(
        unknown.value
    )
    with pytest.raises(ConfigError, match=r"put `@agentevo\.advantage\(NAME\)` above it"):
        agentevo.train("coins", algorithm={"advantage_function": group})


def test_a_run_names_the_users_loss():
    algorithm = {"loss_function": "test_clip"}
    parts = SimpleNamespace(
        config=build_config({"environment": {"type": "coins"}, "algorithm": algorithm}),
        model=SimpleNamespace(device=torch.device("cpu"), config=PretrainedConfig()),
        tasks=SimpleNamespace(shortfall=lambda: ""),
    )
    assert "loss: your function test_clip" in training_notes(parts, "train")
