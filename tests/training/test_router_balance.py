"""The load-balancing loss of a mixture's routers is transformers' own, over merged and packed
samples, in micro-batches, and through layers that are computed again."""

from __future__ import annotations

import copy
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from several_processes import run_processes
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from agentevo.config import (
    AlgorithmSection,
    MemorySection,
    SFTSection,
    TrainerSection,
    build_config,
)
from agentevo.errors import ConfigError
from agentevo.models.compute.activations import keep_activations
from agentevo.models.compute.attention import prepare
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.training.router_balance import RouterBalance, check_balance
from agentevo.training.supervised import SupervisedTrainer
from agentevo.training.trainer import Trainer
from agentevo.types import Sample

sys.path.insert(0, str(Path(__file__).parent))
import router_balance_runs as runs
from router_balance_runs import COEF, SAMPLES, gradients, of_transformers, parts_of

TREES = ["mixtral", "qwen3-moe", "gpt-oss"]


def supervised(
    model: PreTrainedModel, monkeypatch, coef: float = COEF, **settings
) -> tuple[dict[str, float], dict[str, torch.Tensor], list[list[int]]]:
    """The metrics and gradients of a step that changes no weight, and its micro-batches."""
    section = SFTSection(router_aux_loss_coef=coef, max_grad_norm=1e9, **settings)
    trainer = SupervisedTrainer(model, section, 10)
    monkeypatch.setattr(trainer.optimization, "_step", lambda: None)
    parts = parts_of(model, section.micro_batch_tokens, section.prefix_merging)
    return trainer.step(SAMPLES), gradients(model), parts


@pytest.mark.parametrize("settings", [{}, {"micro_batch_tokens": 64}, {"prefix_merging": False}])
@pytest.mark.parametrize("name", [*TREES, "gpt-oss-rows", "minimax", "qwen3-next"])
def test_a_step_has_the_loss_and_the_gradient_of_transformers(
    name, settings, random_model, monkeypatch
):
    model, alone = copy.deepcopy(random_model(name))
    parts = check_step(model, alone, monkeypatch, **settings)
    assert (len(parts) > 1) is ("micro_batch_tokens" in settings)


def test_the_number_of_experts_of_a_token_may_be_in_the_config_of_the_ffn(monkeypatch):
    check_step(prepare(runs.dbrx()), runs.dbrx(), monkeypatch)


def check_step(
    model: PreTrainedModel, alone: PreTrainedModel, monkeypatch, **settings
) -> list[list[int]]:
    """Compares a step with transformers' own loss and gradient. Returns the micro-batches."""
    found, of_step, parts = supervised(model, monkeypatch, **settings)
    expected, loss = of_transformers(alone, parts)
    assert found["sft/router_aux_loss"] == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    wanted = gradients(alone)
    assert wanted.keys() == of_step.keys()
    for key in wanted:
        torch.testing.assert_close(of_step[key], wanted[key], rtol=1e-3, atol=2e-5)
    return parts


def loss_of(
    model: PreTrainedModel, parts: list[list[Sample]], merge: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the routers over these micro-batches, and its gradients."""
    balance = RouterBalance(model, COEF, "trainer.router_aux_loss_coef")
    balance.begin(list(chain(*parts)))
    losses = []
    for part in parts:
        batch = pack(part, torch.device("cpu"), merge=merge).with_all_rows()
        with balance.listen(batch) as routers:
            token_logprobs(model, batch)
        losses.append(routers.loss())

    loss = torch.stack(losses).sum()
    loss.backward()
    return float(loss.detach()), gradients(model)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-next"])
def test_the_loss_depends_on_the_micro_batches_and_not_on_merging(name, random_model):
    def loss(parts: list[list[Sample]], merge: bool) -> tuple[float, dict[str, torch.Tensor]]:
        return loss_of(copy.deepcopy(random_model(name).model), parts, merge)

    halves = [SAMPLES[:2], SAMPLES[2:]]
    merged, wanted = loss(halves, merge=True)
    unmerged, found = loss(halves, merge=False)
    assert unmerged == pytest.approx(merged, rel=1e-5)
    assert wanted.keys() == found.keys()
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-3, atol=2e-5)

    divided, _ = loss([[sample] for sample in SAMPLES], merge=True)
    assert divided != pytest.approx(merged, rel=1e-3)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-next"])
def test_tokens_whose_output_nobody_needs_count(name, random_model):
    samples = [
        Sample.given(str(n), "g", [*runs.PREFIX, 40 + n], [False] * 30 + [True]) for n in range(4)
    ]
    model, alone = copy.deepcopy(random_model(name))
    found, _ = loss_of(model, [samples], merge=True)
    ids, mask = runs.padded(samples)
    expected = alone(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    assert found == pytest.approx(expected.item(), rel=1e-5)


def test_without_a_coefficient_nothing_is_added(random_model, monkeypatch):
    steps = []
    for asks in (False, True):
        model = copy.deepcopy(random_model("mixtral").model)
        model.config.output_router_logits = asks
        model.config.router_aux_loss_coef = COEF
        steps.append(supervised(model, monkeypatch, 0.0))

    (before, wanted, _), (metrics, found, _) = steps
    assert metrics["sft/loss"] == before["sft/loss"]
    assert "sft/router_aux_loss" not in metrics
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_layers_that_are_computed_again_count_once(checkpointing, random_model, monkeypatch):
    model = copy.deepcopy(random_model("qwen3-moe").model)
    metrics, wanted, _ = supervised(model, monkeypatch)
    model = copy.deepcopy(random_model("qwen3-moe").model)
    keep_activations(model, MemorySection(checkpointing=checkpointing))
    again, found, _ = supervised(model, monkeypatch)
    assert again["sft/router_aux_loss"] == metrics["sft/router_aux_loss"]
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", TREES)
def test_a_step_on_attempts_adds_the_same(name, random_model, monkeypatch):
    steps = []
    for coef in (0.0, COEF):
        model = copy.deepcopy(random_model(name).model)
        section = TrainerSection(
            router_aux_loss_coef=coef, max_grad_norm=1e9, micro_batch_tokens=64
        )
        trainer = Trainer(model, section, AlgorithmSection())
        monkeypatch.setattr(trainer.optimization, "_step", lambda: None)
        steps.append((trainer.step(SAMPLES), gradients(model)))

    (before, without), (after, added) = steps
    alone = copy.deepcopy(random_model(name).alone)
    expected = of_transformers(alone, parts_of(model, 64))[0]
    expected.backward()
    assert after["actor/router_aux_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert after.keys() - before.keys() == {"actor/router_aux_loss"}
    for key, gradient in gradients(alone).items():
        torch.testing.assert_close(added[key] - without[key], COEF * gradient, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [1, 2], ids=["replicas", "shards"])
def test_two_processes_have_the_loss_and_the_gradient_of_transformers(shard, tmp_path):
    outs = [tmp_path / f"{process}.pt" for process in range(2)]
    run_processes(
        runs.__file__,
        [(shard, process, tmp_path / "meeting", out) for process, out in enumerate(outs)],
        within_s=300,
    )
    metrics, of_step, parts = zip(*map(torch.load, outs), strict=True)
    alone = runs.mixture()
    expected, loss = of_transformers(alone, [part for of_rank in parts for part in of_rank])
    loss.backward()
    wanted = gradients(alone)
    for process in range(2):
        found = metrics[process]["sft/router_aux_loss"]
        assert found == pytest.approx(expected.item(), rel=1e-5)
        assert wanted.keys() == of_step[process].keys()
        for key in wanted:
            torch.testing.assert_close(of_step[process][key], wanted[key], rtol=1e-3, atol=2e-5)


def test_a_model_without_routers_is_refused(random_model):
    for name in ("llama", "llama4"):
        model = random_model(name).model
        with pytest.raises(ConfigError, match=r"sft\.router_aux_loss_coef: .*can't be balanced"):
            SupervisedTrainer(model, SFTSection(router_aux_loss_coef=COEF), 10)


@pytest.mark.parametrize("name", ["minimax_m2", "ernie4_5_moe"])
def test_a_model_whose_routers_choose_by_a_bias_is_refused(name):
    shape = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 97, "num_hidden_layers": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**shape))
    with pytest.raises(ConfigError, match="a bias decides its choices"):
        check_balance(model, "trainer.router_aux_loss_coef")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer": {"parallel": {"context": 2}}}, "together with trainer.parallel.context=2"),
        ({"trainer": {"parallel": {"expert": 2}}}, "together with trainer.parallel.expert=2"),
        ({"algorithm": {"name": "dpo"}}, "algorithm.name=dpo compares"),
    ],
)
def test_what_the_loss_can_not_be_combined_with_is_refused(changes, words):
    tree = {"environment": {"type": "coins"}, "model": {"name": "tiny"}}
    trainer = {"router_aux_loss_coef": 0.01} | changes.get("trainer", {})
    with pytest.raises(ConfigError, match=words):
        build_config(tree | changes | {"trainer": trainer})
