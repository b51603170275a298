"""Fused layers compute what the layer's own forward computes, from the weights as they are now."""

from __future__ import annotations

import copy

import pytest
import torch
from fused_passes import TREE, fused, logits, num_fused_calls, outputs, unfused
from torch import nn

from agentevo.models.compute.attention import prepare
from agentevo.models.compute.fused import FUSED_CLASSES
from agentevo.models.compute.fused_decoder import DECODERS
from agentevo.models.compute.linear import PackedMatrix, available, drop_packed

pytestmark = [
    pytest.mark.skipif(
        not available(),
        reason="oneDNN's linear operator is not in this build of PyTorch, or this is no x86 CPU",
    ),
    pytest.mark.usefixtures("with_and_without_kernels"),
]


@pytest.fixture
def model(random_model):
    """`model(name)`: a copy that may be changed; its weights large enough to tell layers apart."""

    def make(name: str) -> nn.Module:
        made = prepare(copy.deepcopy(random_model(name).alone))
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.dim() == 1:  # norm weights and biases, which start as ones and zeros
                    parameter.add_(0.3 * torch.randn_like(parameter))
        return made

    return make


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_agrees_with_the_layers_own_forward(name, model):
    torch.manual_seed(0)
    made = model(name)
    assert num_fused_calls(made) == made.config.num_hidden_layers
    torch.testing.assert_close(fused(made), unfused(made), rtol=1e-4, atol=2e-5)


def test_other_layers_are_left_alone(model):
    made = model("gemma2")
    assert num_fused_calls(made) == 0
    assert not any(type(layer) in FUSED_CLASSES for layer in made.modules())


@pytest.mark.parametrize("change", ["fused-update", "in-place", "bias", "norm", "dropped"])
def test_the_weights_of_now(change, model):
    torch.manual_seed(1)
    made = model("qwen2")
    before = fused(made)

    layer = made.model.layers[0]
    if change == "fused-update":
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.05, fused=True)
        logits(made).square().sum().backward()
        optimizer.step()
    elif change == "dropped":
        layer.mlp.up_proj.weight.data = torch.randn_like(layer.mlp.up_proj.weight)
        drop_packed(made)
    else:
        changed = {
            "in-place": layer.mlp.down_proj.weight,
            "bias": layer.self_attn.k_proj.bias,
            "norm": layer.input_layernorm.weight,
        }[change]
        with torch.no_grad():
            changed.copy_(torch.randn_like(changed))

    after = fused(made)
    assert (after - before).abs().max() > 1e-3

    torch.testing.assert_close(after, unfused(made), rtol=1e-4, atol=1e-4)


def test_a_copy_has_weights_of_its_own(model):
    torch.manual_seed(2)
    made = model("llama")
    before = fused(made)
    twin = copy.deepcopy(made)

    with torch.no_grad():
        made.model.layers[0].mlp.up_proj.weight.zero_()

    torch.testing.assert_close(fused(twin), before)
    assert twin.model.layers[0].forward.layer is twin.model.layers[0]


def test_wrapped_products_and_hooks_run(model):
    """Somebody who puts an adapter around a product, or listens in on it, gets his way."""

    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.inner(x)

    torch.manual_seed(3)
    made = model("llama")
    before = fused(made)
    made.model.layers[0].self_attn.v_proj = Doubled(made.model.layers[0].self_attn.v_proj)
    assert (fused(made) - before).abs().max() > 1e-3

    torch.testing.assert_close(fused(made), unfused(made), rtol=1e-4, atol=2e-5)
    seen = []
    made.model.layers[1].mlp.down_proj.register_forward_hook(
        lambda module, inputs, output: seen.append(output.shape)
    )
    fused(made)
    assert len(seen) == 1


def test_other_types_take_the_ordinary_way(model, monkeypatch):
    made = model("llama").bfloat16()
    packings = []
    packed = PackedMatrix.__init__
    monkeypatch.setattr(
        PackedMatrix, "__init__", lambda self, *of: packings.append(of) or packed(self, *of)
    )
    assert num_fused_calls(made) == 0
    assert not packings
    assert fused(made).isfinite().all()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_decoder_of_fused_layers_is_walked_straight_through(name, model, monkeypatch):
    """Its own forward is not called, and gives the same bits."""
    torch.manual_seed(4)
    made = model(name)
    decoder = made.model
    assert type(decoder) in DECODERS

    own = type(decoder).forward
    with monkeypatch.context() as patch:
        patch.setattr(type(decoder), "forward", lambda *args, **kwargs: pytest.fail("called"))
        straight = fused(made)

    del decoder.forward
    assert type(decoder).forward is own
    assert torch.equal(straight, fused(made))


def test_a_decoder_that_others_have_a_hand_in_runs_its_own_forward(model):
    made = model("llama")
    expected = fused(made)
    seen = []
    layer = made.model.layers[1]
    hook = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))

    assert torch.equal(fused(made), expected)
    assert len(seen) == 1

    hook.remove()
    layer.forward = lambda hidden, **kwargs: 2 * hidden
    assert not torch.equal(fused(made), expected)


def test_what_a_pass_asks_for_beyond_ids_is_given(model):
    made = model("llama")
    embedded = made.get_input_embeddings()(torch.as_tensor(TREE.ids)[None]).detach()
    with torch.no_grad():
        recorded = outputs(made, output_hidden_states=True)
        of_embeddings = outputs(made, input_ids=None, inputs_embeds=embedded)

    assert len(recorded.hidden_states) == made.config.num_hidden_layers + 1
    assert torch.equal(recorded.logits, fused(made))
    assert torch.equal(of_embeddings.logits, fused(made))
