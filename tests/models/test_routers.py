"""What routers choose is recorded and replayed, for every kind of router that transformers has, and
what can't be replayed is refused."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch
from slow import slow

from agentevo.config import MemorySection
from agentevo.errors import ModelError
from agentevo.models.compute.activations import keep_activations
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.routers import (
    Recording,
    RouterReplay,
    Routers,
    enable_routing,
    routers_of,
)
from agentevo.models.compute.sharded import make_plain
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import Sample

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
QUICK = ("mixtral", "qwen3_moe", "deepseek_v3")
SLOW = (
    "afmoe",
    "aria_text",
    "axk1",
    "cohere2_moe",
    "deepseek_v2",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "glm4_moe_lite",
    "granitemoe",
    "gpt_oss",
    "granitemoeshared",
    "granitemoe_swa",
    "hunyuan_v1_moe",
    "hy_v3",
    "laguna",
    "longcat_flash",
    "mellum",
    "mimo_v2_flash",
    "minimax_m2",
    "olmoe",
    "qwen2_moe",
    "solar_open",
)
CPU = torch.device("cpu")
IDS = [list(range(7, 27)), [*range(7, 19), 3, 4, 5, 6], [9, 8, 7]]


@pytest.fixture
def tiny(monkeypatch):
    """`tiny(name, **settings)`: a prepared tiny model of an architecture, with random weights."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    made = importlib.import_module("architectures")

    def make(name: str, **settings):
        config = made.tiny_config(name)
        for key, value in settings.items():
            setattr(config, key, value)
        return prepare(made.tiny_model(config))

    yield make
    for name in ("architectures", "tiny_configs"):
        sys.modules.pop(name, None)


def batch_of(ids=IDS):
    return pack(
        [Sample.given(str(n), "g", s, [False] + [True] * (len(s) - 1)) for n, s in enumerate(ids)],
        CPU,
    )


def gradient(model, batch) -> dict[str, torch.Tensor]:
    """Of a sum of log-probs, each with a weight of its own."""
    model.zero_grad()
    logp, _ = token_logprobs(model, batch)
    (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def recorded(model, batch) -> torch.Tensor:
    """[N, layers, top_k]"""
    recording = Recording(routers_of(model))
    with torch.no_grad():
        token_logprobs(model, batch.with_routing(recording))
    return torch.from_numpy(recording.rows().astype("int64"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *slow(*SLOW)])
def test_replaying_what_was_chosen_changes_no_bit_and_other_experts_are_taken(name, tiny):
    model = enable_routing(tiny(name))
    batch = batch_of()
    own = gradient(model, batch)
    rows = recorded(model, batch)
    routers = routers_of(model)
    assert rows.shape == (batch.num_distinct, routers.layers, routers.top_k)

    replay = RouterReplay(rows)
    again = gradient(model, batch.with_routing(replay))
    assert not replay.differs().any()
    assert own.keys() == again.keys()
    assert all(torch.equal(own[key], again[key]) for key in own)

    other = RouterReplay((rows + 1) % routers.num_experts)
    moved = gradient(model, batch.with_routing(other))
    assert other.differs().any(1).all()
    assert any(not torch.allclose(own[key], moved[key], atol=1e-3) for key in own)

    with torch.no_grad():
        assert torch.equal(recorded(model, batch), rows), "a replay leaves nothing behind"


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_weights_are_the_softmax_of_present_logits_over_the_recorded_experts(name, random_model):
    """g_i = exp(z_i) / sum of exp(z_j) over the recorded j (arXiv 2510.11370, section 3.2)."""
    model = enable_routing(copy.deepcopy(random_model(name).model))
    batch = batch_of()
    routers = routers_of(model)
    draws = torch.Generator().manual_seed(0)
    rows = torch.rand(batch.num_distinct, routers.layers, routers.num_experts, generator=draws)
    rows = rows.argsort(-1)[..., : routers.top_k]
    gates = [module for key, module in model.named_modules() if key.endswith("mlp.gate")]
    heard = []
    hooks = [gate.register_forward_hook(lambda *given: heard.append(given[2])) for gate in gates]
    token_logprobs(model, batch.with_routing(RouterReplay(rows)))

    for hook in hooks:
        hook.remove()
    assert len(heard) == routers.layers
    for layer, (logits, weights, chosen) in enumerate(heard):
        assert torch.equal(chosen, rows[:, layer])
        wanted = logits.gather(-1, rows[:, layer]).softmax(-1)
        torch.testing.assert_close(weights, wanted)
        (slope,) = torch.autograd.grad(weights[:, 0].sum(), logits, retain_graph=True)
        assert slope.any(-1).all(), "the router learns at every token"


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_layers_that_are_computed_again_choose_the_same_experts(checkpointing, random_model):
    model = enable_routing(copy.deepcopy(random_model("qwen3-moe").model))
    batch = batch_of()
    rows = (recorded(model, batch) + 1) % 4
    wanted = gradient(model, batch.with_routing(RouterReplay(rows)))
    kept = keep_activations(model, MemorySection(checkpointing=checkpointing))
    found = gradient(kept, batch.with_routing(RouterReplay(rows)))
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)

    make_plain(kept)  # as a sharded model is
    plain = gradient(kept, batch.with_routing(RouterReplay(rows)))
    assert all(torch.allclose(wanted[key], plain[key], atol=1e-5) for key in wanted)


def test_a_copy_has_routers_of_its_own(random_model):
    model = enable_routing(copy.deepcopy(random_model("mixtral").model))
    twin = copy.deepcopy(model)
    assert routers_of(twin) == routers_of(model) == Routers(2, 2, 4)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert recorded(twin, batch_of()).unique().numel() == 4


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("llama", {}, "it has no block with both experts and a router"),
        ("phimoe", {}, "its PhimoeTopKRouter returns no experts that topk has chosen"),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
            "its DeepseekV2TopkRouter gives no weight to experts of groups",
        ),
        pytest.param(
            "dbrx",
            {},
            "its DbrxRouter returns no experts that topk has chosen",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "jetmoe", {}, "it has no block with both experts and a router", marks=pytest.mark.slow
        ),
    ],
)
def test_what_cant_be_replayed_is_refused_and_left_as_it_was(name, settings, why, tiny):
    model = tiny(name, **settings)
    before = {key: vars(module).get("forward") for key, module in model.named_modules()}
    with pytest.raises(
        ModelError, match=f"^trainer.routing_replay: the routing .*{why}.*: set trainer"
    ):
        enable_routing(model)
    after = {key: vars(module).get("forward") for key, module in model.named_modules()}
    assert before == after and routers_of(model) is None


def test_experts_that_are_chosen_elsewhere_too_are_refused(random_model, monkeypatch):
    model = copy.deepcopy(random_model("mixtral").model)
    layer = type(model.model.layers[0].self_attn)
    original = layer.forward

    def choosing(self, hidden_states, *args, **kwargs):
        torch.topk(hidden_states, 2)
        return original(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", choosing)
    with pytest.raises(ModelError, match="it also chooses experts outside its routers"):
        enable_routing(model)
