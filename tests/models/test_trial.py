"""A short text shows which models the token tree would compute otherwise than transformers does:
they compute rows. Models that are not causal are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    BertConfig,
    BertForTokenClassification,
    BertLMHeadModel,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    HrmTextConfig,
    HrmTextForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForTokenClassification,
    NemotronConfig,
    NemotronForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from agentevo.errors import ModelError
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.rows import row_settings
from agentevo.models.compute.trial import PackedTextsPlan, key_value_sizes

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.fixture
def strange():
    """`strange(name)`: a small model of an architecture that can't be packed."""

    def make(name: str):
        if name == "lfm2":
            return Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]))

        if name == "granite-hybrid":
            mamba = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
            config = GraniteMoeHybridConfig(
                **SHAPE,
                **EXPERTS,
                **mamba,
                layer_types=["mamba", "attention"],
                shared_intermediate_size=16,
            )
            return GraniteMoeHybridForCausalLM(config)

        if name == "llama4":
            kinds = ["chunked_attention", "sliding_attention"]
            return Llama4ForCausalLM(
                Llama4TextConfig(
                    **SHAPE, **EXPERTS, intermediate_size_mlp=48, head_dim=8, layer_types=kinds
                )
            )

        if name == "bert":
            return BertLMHeadModel(BertConfig(**SHAPE, initializer_range=0.25))

        if name == "roberta":
            return RobertaForCausalLM(
                RobertaConfig(**SHAPE, initializer_range=0.25, is_decoder=True)
            )

        if name == "nemotron":
            return NemotronForCausalLM(NemotronConfig(**SHAPE))
        assert name == "recurrent-gemma"
        return RecurrentGemmaForCausalLM(
            RecurrentGemmaConfig(**SHAPE, lru_width=32, block_types=["recurrent", "attention"])
        )

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lfm2", "layers of the kind conv, which AgentEvo can't pack"),
        ("granite-hybrid", "layers of the kind linear_attention"),
        ("nemotron", "NemotronForCausalLM does not pass its arguments on to its attention"),
    ],
)
def test_architectures_that_compute_rows(name, reason, strange):
    with pytest.raises(ModelError, match=reason) as refusal:
        prepare(strange(name), compute="tree")
    assert "choose a Llama" in str(refusal.value) and "plan=" not in str(refusal.value)

    model = strange(name)
    implementation = model.config._attn_implementation
    settings = row_settings(prepare(model))
    assert reason in settings.reason and settings.pads
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bert", "BertLMHeadModel: a token sees those after it"),
        ("roberta", "RobertaForCausalLM: its positions do not begin at 0"),
        ("recurrent-gemma", "a pass leaves its state in model.layers.0"),
    ],
)
@pytest.mark.parametrize("compute", ["auto", "rows"])
def test_a_model_that_neither_way_computes_is_refused(compute, name, reason, strange):
    with pytest.raises(ModelError, match=reason):
        prepare(strange(name), compute=compute)


def test_a_model_that_the_tree_computes_can_be_asked_to_compute_rows(random_model):
    model = copy.deepcopy(random_model("llama").alone)
    assert row_settings(prepare(model, compute="rows")).reason == "trainer.compute=rows"
    assert row_settings(prepare(copy.deepcopy(random_model("llama").alone))) is None


class Shifted(torch.nn.Module):
    """Half of each token's input comes from the token before it, as in RWKV."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner((x + x.roll(1, dims=1)) / 2)


class Full(torch.nn.Module):
    """Takes so many tokens, as an expert with a capacity; the rest it leaves as they are."""

    def __init__(self, inner: torch.nn.Module, capacity: int) -> None:
        super().__init__()
        self.inner = inner
        self.capacity = capacity

    def forward(self, x):
        taken = torch.arange(x.shape[1], device=x.device) < self.capacity
        return self.inner(x) * taken[:, None]


def test_windows_and_chunks_together_are_refused(strange):
    """Both kinds of masks are made from a size alone."""
    with pytest.raises(ModelError, match="kind chunked_attention, sliding_attention, which"):
        prepare(strange("llama4"), compute="tree")


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [Shifted, lambda inner: Full(inner, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_no_config_tells_is_found_by_trying(wrapped, dtype, random_model):
    model = copy.deepcopy(random_model("llama").alone).to(dtype)
    prepare(copy.deepcopy(model))
    model.model.layers[1].mlp = wrapped(model.model.layers[1].mlp)
    with pytest.raises(
        ModelError, match="depends on the tokens around it by another way than attention"
    ):
        prepare(copy.deepcopy(model), compute="tree")

    if wrapped is Shifted:  # the first token sees the last one
        with pytest.raises(ModelError, match="a token sees those after it"):
            prepare(model)
    else:
        assert row_settings(prepare(model)) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma2",
        "gemma3",
        "phi3",
        "qwen3-moe",
        "mixtral",
        "gpt-oss",
        "granite-swa",
        "llama4",
    ],
)
def test_decoders_of_attention_and_feed_forward_are_accepted(name, dtype, random_model):
    model = copy.deepcopy(random_model(name).alone).to(dtype)
    model.train()
    state = torch.random.get_rng_state()
    prepare(model, compute="tree")

    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())

    with torch.device("meta"):
        unread = type(model)(model.config)

    prepare(unread)


def test_a_window_that_is_not_named_to_the_attention_function_is_kept(monkeypatch):
    """Eager attention goes by the mask, and Qwen2-MoE's layers say nothing else about it."""
    windows = []
    layers = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    model = Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SHAPE, **layers, **experts, sliding_window=7, max_window_layers=2)
    )
    attend = PackedTextsPlan.attend

    def listened(self, q, k, v, scaling, window, *others):
        windows.append(window)
        return attend(self, q, k, v, scaling, window, *others)

    monkeypatch.setattr(PackedTextsPlan, "attend", listened)
    prepare(model)
    assert windows == [7, None] * 2


def test_models_that_score_tokens_are_tried_too():
    """A reward model has no output embeddings; that it sees in both directions shows all the
    same."""
    config = {**SHAPE, "initializer_range": 0.25, "num_labels": 1}
    prepare(LlamaForTokenClassification(LlamaConfig(**config)))
    del config["num_key_value_heads"]
    with pytest.raises(ModelError, match="BertForTokenClassification"):
        prepare(BertForTokenClassification(BertConfig(**config)))


@pytest.mark.slow
def test_every_call_of_attention_is_counted(random_model):
    """Latent attention keeps keys of another width than values; loops keep those of each round."""
    shape = SHAPE | {"num_key_value_heads": 4}
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
    model = DeepseekV2ForCausalLM(
        DeepseekV2Config(**shape, **latent, v_head_dim=6, first_k_dense_replace=2)
    )
    assert key_value_sizes(prepare(model)) == [(4, 12, 12)] * 2  # values are padded
    loop = HrmTextForCausalLM(HrmTextConfig(**SHAPE, head_dim=8, H_cycles=2, L_cycles=3))
    assert len(key_value_sizes(prepare(loop))) == 2 * 2 * (3 + 1)
    assert key_value_sizes(random_model("llama").model) == [(2, 8, 8)] * 2


def test_a_mask_of_the_models_own_is_refused(random_model):
    model = copy.deepcopy(random_model("llama").alone)
    attention = model.model.layers[0].self_attn
    inner = attention.forward
    attention.forward = lambda *args, **kwargs: inner(
        *args, **kwargs | {"attention_mask": torch.zeros(1, 1, 14, 14)}
    )

    with pytest.raises(
        ModelError, match="LlamaForCausalLM: the model makes an attention mask of its own"
    ):
        prepare(model, compute="tree")
